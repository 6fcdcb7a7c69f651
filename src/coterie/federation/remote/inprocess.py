"""A transport without a network: every node in this process, through real bytes. For tests and for trying things."""

from collections.abc import Collection, Mapping

from coterie.federation.remote.codec import Message
from coterie.federation.remote.messages import Trouble
from coterie.federation.remote.node import Node
from coterie.federation.remote.roster import Address


class InProcess:
    """Nodes by address. Change `here` to take nodes away and bring others."""

    def __init__(self, nodes: Mapping[Address, Node]) -> None:
        self.here = dict(nodes)

    def nodes(self) -> Mapping[Address, int | None]:
        """Everybody; nobody's identity is known for certain."""
        return dict.fromkeys(self.here)

    def exchange(
        self, orders: Mapping[Address, Message], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        """Node after node."""
        gone = Trouble("lost", "the node is gone")
        return [(n, self.here[n].handle(bytes(order)) if n in self.here else gone) for n, order in orders.items()]
