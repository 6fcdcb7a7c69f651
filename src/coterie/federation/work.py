"""Works: module-level functions that run where the data is, and what is passed to them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from coterie.errors import PlacementError
from coterie.federation.shards import Shard
from coterie.federation.tree import Tree, mapped, tree_leaves, tree_map
from coterie.numerics import Draw

Work = Callable[[Shard, Tree, Tree, "Static", Draw], Tree]


def work(function: Work) -> Work:
    """Mark a function as a work. Only marked module-level functions are run at clients, by their name."""
    if "<locals>" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is defined inside a function; a work must be found by its name")
    function.__coterie_work__ = True  # type: ignore[attr-defined]
    return function


def walks(function: Work) -> Work:
    """Mark a work whose result begins with the point that it walked to from the first shared value.

    What it contributes, its update, is then the way between the two; of every other work it is the result itself.
    """
    function.__coterie_walks__ = True  # type: ignore[attr-defined]
    return function


def passes(function: Work) -> Work:
    """Mark a work that goes over all of a client's rows once: many rows at a time need no other clients beside them."""
    function.__coterie_passes__ = True  # type: ignore[attr-defined]
    return function


def name_of(function: Work) -> str:
    """module:function, the name by which a work is asked for and billed."""
    if not getattr(function, "__coterie_work__", False):
        raise TypeError(f"{function!r} is not a work; mark it with @work")
    return f"{function.__module__}:{function.__qualname__}"


class Static(Mapping[str, Any]):
    """Hyper-parameters of a work: plain data, read as attributes, fixed while the work runs."""

    __slots__ = ("_values",)

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if not _plain(value):
                raise TypeError(f"{name} is a {type(value).__name__}, no plain data; send it as a shared value")
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"this work was given no {name!r}, only {sorted(self._values)}") from None

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _plain(value: Any) -> bool:
    """Whether a value can be written down: numbers, words, nothing, and collections of these."""
    if isinstance(value, Mapping):
        return all(map(_plain, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


@dataclass(frozen=True)
class Each:
    """Marks a value that holds one row for every client: client k is sent row k, and only that is billed.

    With ids, ascending, it holds rows for these clients only.
    """

    rows: Tensor
    ids: Tensor | None = None

    def of(self, clients: Tensor) -> Tensor:
        """The rows of these clients, by number."""
        return self.rows[clients if self.ids is None else torch.searchsorted(self.ids, clients)]


class Handle(NamedTuple):
    """What stands for memory that lies elsewhere: the rows that clients began with, and by client the version that
    its holder keeps, [n]; version 0 is the beginning."""

    start: Tree
    versions: Tensor


class Memory:
    """Client memory: values that stay at the clients between rounds.

    Methods hold it in their state and hand it to the verbs; they cannot look inside. `start` is what every client
    remembers at first. The local engine keeps the stacked rows here; a network engine leaves them at the nodes and
    keeps a `Handle`. With `recall`, records may look.
    """

    __slots__ = ("__weakref__", "_held", "_recall")

    def __init__(self, held: Tree, recall: Callable[[Handle], Tree] | None = None) -> None:
        self._held, self._recall = held, recall
        if isinstance(held, Handle):
            _ELSEWHERE.add(self)

    @staticmethod
    def start(value: Tree, n: int) -> "Memory":
        """Every one of n clients begins with this value."""
        return Memory(mapped(lambda t: t.expand(n, *t.shape), value))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise PlacementError(
            "client memory lives at the clients; ask for it with fed.gather or fed.mean and a work that returns it."
        )

    __getitem__ = __iter__ = __len__ = __array__ = __float__ = _refuse


_ELSEWHERE: "WeakSet[Memory]" = WeakSet()


def held(memory: Memory) -> Tree:
    """The rows or the handle inside, for engines and checkpoints only."""
    return memory._held


def seen(memory: Memory) -> Tree:
    """The rows, for records only: asked for where they lie elsewhere."""
    inside = memory._held
    if not isinstance(inside, Handle):
        return inside
    return inside.start if memory._recall is None else memory._recall(inside)


def elsewhere(state: Tree) -> list[Memory]:
    """The memory in a state that lies at nodes."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Memory) and isinstance(leaf._held, Handle)]


def lent(state: Tree, recall: Callable[[Handle], Tree] | None) -> Tree:
    """A state whose memory records may look into; they ask for it if and when they do."""
    if recall is None:
        return state

    def open(leaf: Any) -> Any:
        if not isinstance(leaf, Memory):
            return leaf
        inside = leaf._held
        if not isinstance(inside, Handle):
            first = tree_leaves(inside)[0]
            inside = Handle(inside, torch.zeros(len(first), dtype=torch.int64, device=first.device))
        return Memory(inside, recall)

    return tree_map(open, state)


def in_use() -> list[Tensor]:
    """The versions by client, [n], of all memory elsewhere that somebody in this process still holds."""
    return [memory._held.versions for memory in _ELSEWHERE]
