"""Networks of nodes in this process, whole and broken ones."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from coterie.experiment.build import Network
from coterie.experiment.config import Config
from coterie.federation.remote import PERMISSIVE, Address, InProcess, Message, Node, Store, Trouble, node_for


def nodes(config: Config, problem: Any, *, folder: Path | None = None, **options: Any) -> dict[Address, Node]:
    """One node a client; the one that is the target has its rows too."""
    at = config.federation.target
    return {
        f"node{k}": node_for(
            problem,
            (k,),
            target=problem.target if at == k else None,
            store=Store(folder and folder / str(k)),
            shares_memory=True,
            **{"policy": PERMISSIVE, **options},
        )
        for k in range(problem.clients)
    }


def network(made: list[InProcess] | None = None, **options: Any) -> Network:
    """A whole network; what was made is put into the list."""

    def make(config: Config, problem: Any) -> InProcess:
        transport = InProcess(nodes(config, problem, **options))
        if made is not None:
            made.append(transport)
        return transport

    return make


Change = Callable[[Address, bytes, bytes], bytes | Trouble | None]


class Broken(InProcess):
    """A network on the way of which replies are changed: by (node, order, reply); None is a reply that never comes."""

    def __init__(self, here: Mapping[Address, Node], change: Change) -> None:
        super().__init__(here)
        self.change = change
        self.late: list[tuple[Address, bytes | Trouble]] = []

    def exchange(
        self, orders: Mapping[Address, Message], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        answers: list[tuple[Address, bytes | Trouble]] = []
        for node, data in super().exchange(orders, needed, timeout):
            changed = data if isinstance(data, Trouble) else self.change(node, bytes(orders[node]), data)
            if changed is not None:
                answers.append((node, changed))
        return answers
