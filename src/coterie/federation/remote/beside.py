"""A node of the server's own beside those of a network: a coordinator takes part with its own rows."""

from collections.abc import Collection, Mapping

from coterie.federation.remote.codec import Message
from coterie.federation.remote.exchange import Transport
from coterie.federation.remote.messages import Trouble
from coterie.federation.remote.node import Node
from coterie.federation.remote.roster import Address

HERE = "(here)"


class Beside:
    """A transport with one more node, which is in this process.

    Args:
        inner: reaches the others.
        node: the node of the server's own client.
    """

    def __init__(self, inner: Transport, node: Node) -> None:
        self.inner, self.node = inner, node
        self.fixed = getattr(inner, "fixed", False)

    def nodes(self) -> Mapping[Address, int | None]:
        """The others, and this one, which is known for certain."""
        return {**self.inner.nodes(), HERE: self.node.clients[0]}

    def exchange(
        self, orders: Mapping[Address, Message], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        """This node first, then all others at once."""
        others = {address: order for address, order in orders.items() if address != HERE}
        own = [(HERE, self.node.handle(bytes(orders[HERE])))] if HERE in orders else []
        return [*own, *self.inner.exchange(others, [address for address in needed if address != HERE], timeout)]
