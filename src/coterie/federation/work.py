"""Works: module-level functions that run where the data is, and what is passed to them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple, overload
from weakref import WeakSet

import torch
from torch import Tensor

from coterie.errors import PlacementError
from coterie.federation.naming import find, register
from coterie.federation.shards import Shard
from coterie.federation.tree import Tree, mapped, tree_flatten, tree_leaves, tree_map, tree_unflatten
from coterie.numerics import Draw
from coterie.numerics.tracing import Counter

Work = Callable[[Shard, Tree, Tree, "Static", Draw], Tree]
Forced = Literal["vmap", "sequential"] | None


class Result(Enum):
    """The kind of update that is the result itself."""

    RESULT = "the result itself"


RESULT = Result.RESULT
"""The update is the result itself: a gradient, a product, a change."""


@dataclass(frozen=True)
class MovedFrom:
    """The update is the difference between the result and the shared value at this path."""

    path: tuple[int | str, ...]

    def start(self, shared: Tree) -> "Tensor | Each":
        """The shared value from which the clients set out."""
        for key in self.path:
            shared = getattr(shared, key) if isinstance(key, str) and not isinstance(shared, dict) else shared[key]
        if not isinstance(shared, Tensor | Each):
            raise TypeError(f"the shared value at {self.path} is a {type(shared).__name__}, no tensor")
        return shared


Update = Result | MovedFrom | None | tuple["Update", ...]
"""What a work contributes: `RESULT`, `moved_from(…)`, None for a report that is no update (a count, a measure, an
acknowledgement), or one of these for each part of a result that is a tuple."""


def moved_from(*path: int | str) -> MovedFrom:
    """The update of a work that returns an iterate: its difference from the shared value that it started from.

    Args:
        path: where that value is in `shared`, by index or field; none where `shared` is the value itself.

    Example:
        `@work("mine/inner-steps", update=moved_from(1))` for a work whose shared values are (x, y) and which returns
        the y that its local steps led to.
    """
    return MovedFrom(path)


@dataclass(frozen=True)
class WorkInfo:
    """What a work declares about itself.

    Args:
        name: family/verb-noun, or module:function.
        update: what it contributes.
        whole_pass: whether it goes over all of a client's rows once; many rows at a time need no other clients
            beside them.
        mode: how the local engine must run it, where not as the engine is set up.
    """

    name: str
    update: Update = RESULT
    whole_pass: bool = False
    mode: Forced = None

    def kinds(self, result: Tree) -> list[Update]:
        """The update that is declared for each leaf of a result."""
        return list(self._kinds(self.update, result))

    def _kinds(self, update: Update, result: Tree) -> Iterator[Update]:
        if not isinstance(update, tuple):
            yield from (update for _ in tree_leaves(result))
            return
        if not isinstance(result, tuple | list) or len(result) != len(update):
            raise TypeError(f"{self.name} declares the updates of {len(update)} values and returns something else")
        for part, value in zip(update, result, strict=True):
            yield from self._kinds(part, value)


@overload
def work(function: Work, /) -> Work: ...
@overload
def work(
    name: str | None = None, /, *, update: Update, whole_pass: bool = False, mode: Forced = None
) -> Callable[[Work], Work]: ...
def work(
    name: Work | str | None = None, /, *, update: Update = RESULT, whole_pass: bool = False, mode: Forced = None
) -> Work | Callable[[Work], Work]:
    """Mark a module-level function as a work. Only works are run at clients, and they are found by their names.

    Args:
        name: family/verb-noun, unique; by default module:function.
        update: what the work contributes, see `Update`; stages such as compression act on that. A bare `@work` means
            `RESULT`.
        whole_pass: whether it goes over all of a client's rows once.
        mode: "vmap" or "sequential", where the local engine must run it so.

    Example:
        `@work("mine/local-steps", update=moved_from())` for a work that returns the model after some local steps from
        the shared one.
    """

    def mark(function: Work) -> Work:
        if "<locals>" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} is defined inside a function; a work must be found by its name")
        called = name if isinstance(name, str) else f"{function.__module__}:{function.__qualname__}"
        register(called, function)
        function.__coterie__ = WorkInfo(called, update, whole_pass, mode)  # type: ignore[attr-defined]
        return function

    return mark(name) if callable(name) else mark


def info_of(function: Work) -> WorkInfo:
    """What a work declares about itself."""
    info = getattr(function, "__coterie__", None)
    if not isinstance(info, WorkInfo):
        raise TypeError(f"{function!r} is not a work; mark it with @work")
    return info


def name_of(function: Work) -> str:
    """The name by which a work is asked for and billed."""
    return info_of(function).name


class Static(Mapping[str, Any]):
    """Hyper-parameters of a work: plain data, read as attributes, fixed while the work runs.

    A setting may name another work; `work` finds it by `resolver`, which at a node admits the operator's modules only.
    """

    __slots__ = ("_resolver", "_values")

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if not _plain(value):
                raise TypeError(f"{name} is a {type(value).__name__}, no plain data; send it as a shared value")
        self._values = values
        self._resolver: Callable[[str], Work] = find

    def resolved_by(self, resolver: Callable[[str], Work]) -> "Static":
        """The same settings, whose works are found by this resolver."""
        static = Static(**self._values)
        static._resolver = resolver
        return static

    def work(self, name: str) -> Work:
        """The work that the setting of this name names."""
        return self._resolver(getattr(self, name))

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
    return value is None or isinstance(value, bool | int | float | str | Counter)


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
    """What stands for memory that stays at nodes: the rows that clients began with, and per client the version that
    its node keeps, [n]; version 0 is the beginning."""

    start: Tree
    versions: Tensor


class Memory:
    """Client memory: values that stay at the clients between rounds.

    Methods keep it in their state and pass it to the verbs; they cannot read it. The local engine keeps the stacked
    rows here; a network engine leaves them at the nodes and keeps a `Handle`.

    Args:
        payload: the stacked rows, or the handle.
        recall: asks the nodes for the rows of a handle, for records.

    Example:
        >>> memory = Memory.start(torch.zeros(2), n=3)
        >>> memory.payload.shape
        torch.Size([3, 2])
    """

    __slots__ = ("__weakref__", "_payload", "_recall")

    def __init__(self, payload: Tree, recall: Callable[[Handle], Tree] | None = None) -> None:
        self._payload, self._recall = payload, recall
        if isinstance(payload, Handle):
            _REMOTE.add(self)

    @staticmethod
    def start(value: Tree, n: int) -> "Memory":
        """The memory of n clients that all begin with this value."""
        return Memory(mapped(lambda t: t.expand(n, *t.shape), value))

    @property
    def payload(self) -> Tree:
        """The stacked rows or the handle, for engines and checkpoints only."""
        return self._payload

    def with_rows(self, parts: list[tuple[Tensor, Tree]]) -> "Memory":
        """The memory after some clients changed theirs.

        Args:
            parts: pairs of client ids and their new rows, stacked; each client occurs once.
        """
        ids = torch.cat([part[0] for part in parts])
        old, structure = tree_flatten(self._payload)
        new = [torch.cat(column) for column in zip(*(tree_flatten(part[1])[0] for part in parts), strict=True)]
        whole = all(len(ids) == len(rows) for rows in old)
        rows = new if whole else [o.index_copy(0, ids, v) for o, v in zip(old, new, strict=True)]
        return Memory(tree_unflatten(rows, structure))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise PlacementError(
            "client memory lives at the clients; ask for it with fed.gather or fed.mean and a work that returns it."
        )

    __getitem__ = __iter__ = __len__ = __array__ = __float__ = _refuse


_REMOTE: "WeakSet[Memory]" = WeakSet()


def rows_for_records(memory: Memory) -> Tree:
    """The rows of a memory, for records only; the nodes are asked for theirs."""
    payload = memory.payload
    if not isinstance(payload, Handle):
        return payload
    return payload.start if memory._recall is None else memory._recall(payload)


def remote_memories(state: Tree) -> list[Memory]:
    """The memories in a state whose rows stay at nodes."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Memory) and isinstance(leaf.payload, Handle)]


def with_recall(state: Tree, recall: Callable[[Handle], Tree] | None) -> Tree:
    """The state with memories that records may read; the nodes are asked when a record does so.

    Args:
        state: a method's state.
        recall: asks the nodes for the rows of a handle; None leaves the state as it is.
    """
    if recall is None:
        return state

    def readable(leaf: Any) -> Any:
        if not isinstance(leaf, Memory):
            return leaf
        payload = leaf.payload
        if not isinstance(payload, Handle):
            first = tree_leaves(payload)[0]
            payload = Handle(payload, torch.zeros(len(first), dtype=torch.int64, device=first.device))
        return Memory(payload, recall)

    return tree_map(readable, state)


def live_versions() -> list[Tensor]:
    """The versions per client, [n], of every remote memory that this process still refers to."""
    return [memory.payload.versions for memory in _REMOTE]
