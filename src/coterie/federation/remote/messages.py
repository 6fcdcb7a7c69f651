"""What goes over the wire: orders to a node and its replies. `codec` encodes them; a node holds one client or several.

Rows that belong to clients (of `Each` values, of memory, of results) are stacked in the order of `Order.clients`.
"""

from typing import Any, NamedTuple

from coterie.federation.tree import Tree

PROTOCOL = 1


class Past(NamedTuple):
    """Client memory of a step: its version by client before and after; the rows to start from where before is 0."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    start: Tree


class Step(NamedTuple):
    """One work, by name. `draw` is the key of its randomness, to which the node adds the client's id."""

    work: str
    static: dict[str, Any]
    draw: int
    shared: Tree
    memory: Past | None
    at_target: bool


class Order(NamedTuple):
    """What a node shall do: "whoami", "run" the steps, or "recall" the memory of versions (in `alive`).

    A node may forget all versions of a run that are not in `alive`, by client.
    """

    protocol: int
    number: int
    kind: str
    run: str
    clients: tuple[int, ...]
    steps: tuple[Step, ...]
    alive: tuple[tuple[int, ...], ...]


class Done(NamedTuple):
    """The result of a step: values, and for which clients the new memory is finite and was kept."""

    values: Tree
    kept: tuple[bool, ...]


class Trouble(NamedTuple):
    """Why there is no result. Of kind "forgotten": clients whose memory of the version asked for is not there."""

    kind: str
    reason: str
    clients: tuple[int, ...] = ()


class Card(NamedTuple):
    """A node's own declaration: its clients, their rows of training data, the columns of a row as (dtype, shape)."""

    clients: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[tuple[str, tuple[int, ...]], ...]
    has_target: bool
    shares_memory: bool


class Reply(NamedTuple):
    """The answer to the order of that number: a Done for each step, a Card, memory rows, or a Trouble."""

    number: int
    content: Any
