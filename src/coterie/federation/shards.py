"""Private data, and what a work sees of it.

All clients' rows lie one after the other in one tensor per column, with one offset and one count per client. So unequal
shards cost no padding, and taking a batch for every client is one indexing operation, under `vmap` too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from coterie.errors import UsageError
from coterie.federation import mapped
from coterie.federation.mapped import Collate
from coterie.federation.points import batch_taken, touched
from coterie.numerics import Draw
from coterie.numerics.tracing import recording

Columns = tuple[Tensor, ...]
GATHERED = 64 << 20  # bytes
READ = 512 << 20  # bytes; Datasets up to this size are read into memory
LABELS = ("labels", "label")


class Batch(NamedTuple):
    """Some rows: their columns (inputs, labels …) and, where rows are padding, a weight of 0 for those.

    Where a model drops units in training, each row has a key, from which its masks are drawn.
    """

    columns: Columns
    weight: Tensor | None = None
    keys: Tensor | None = None

    @property
    def inputs(self) -> Tensor:
        """The first column."""
        return self.columns[0]

    @property
    def labels(self) -> Tensor:
        """The last column."""
        return self.columns[-1]


@dataclass(frozen=True)
class Rows:
    """The rows of one client. Under `vmap`, offset and count are those of each client in turn.

    Where the clients at hand lie one after the other, `whole` are all rows of each as views. `key` is where masks of
    dropout are drawn from; without it there are none. Under `vmap`, `clients` is how many clients these rows stand for,
    and `total` how many rows they have together; both are for the count of points alone.
    """

    columns: Columns
    offset: Tensor
    count: Tensor
    capacity: int
    ragged: bool = False
    whole: Columns = ()
    key: Tensor | None = None
    clients: int = 1
    total: int | None = None

    def take(self, index: Tensor) -> Batch:
        """The rows with these numbers (below count); masks depend on all of them and on the place in the batch."""
        self.count_batch(index)
        return self.at(index)

    def at(self, index: Tensor) -> Batch:
        """As `take`, without counting the rows: the caller counts them, or looks at their form only."""
        keys = None if self.key is None else Draw(self.key).of_batch(index)
        return Batch(self._columns_at(self._numbers(index)), keys=keys)

    def count_batch(self, index: Tensor) -> None:
        """Count the rows of a batch."""
        batch_taken(index, self.clients)

    def step(self, number: int) -> "Rows":
        """The same rows at a local step: its masks differ from those of the other steps of the work."""
        return self if self.key is None else replace(self, key=Draw(self.key).step(number).key)

    def _keys(self, start: int, stop: int) -> Tensor:
        """Keys of consecutive rows, by their numbers."""
        assert self.key is not None
        return Draw(self.key).client(torch.arange(start, stop, device=self.key.device)).key

    def _numbers(self, index: Tensor) -> Tensor:
        """Where rows lie in the columns. A recording chooses among all of them: what is computed of all rows anyway
        need then not be computed of a batch again (`coterie.numerics.rewriting`)."""
        if recording() and not self.ragged and not self.whole and index.dim() == 1:
            return (self.offset + torch.arange(0, self.capacity, device=self.offset.device)).gather(0, index)
        return self.offset + index

    def _columns_at(self, rows: Tensor) -> Columns:
        if mapped.is_mapped(self.columns):
            return mapped.fetch(self.columns, rows)
        return tuple(_at(c, rows) for c in self.columns)

    def all(self) -> Batch:
        """Every row; where clients differ in size, padded to the largest by its last row at weight 0."""
        return next(self.blocks(self.capacity))

    def touch(self, times: int) -> None:
        """Count all rows so many times; for a work that takes them once and passes over them again."""
        touched(times * (self.capacity if self.total is None else self.total))

    def alone(self, offset: Tensor, count: Tensor) -> "Rows":
        """The rows of one client as views, where offset and count are plain numbers (not under vmap)."""
        first, length = int(offset), int(count)
        columns = tuple(mapped.part(c, first, length) for c in self.columns)
        return Rows(columns, torch.zeros_like(offset), count, length, key=self.key)

    def blocks(self, size: int) -> Iterator[Batch]:
        """Every row, at most size at a time. Weights say which rows are real where counts differ."""
        self.touch(1)
        device = self.offset.device
        for start in range(0, self.capacity, size):
            stop = min(start + size, self.capacity)
            keys = None if self.key is None else self._keys(start, stop)
            weight = None
            if len(self.columns[0]) == self.capacity and not self.ragged:  # nobody else's rows: no copy is needed
                rows = slice(start, stop)
                on_disk = mapped.is_mapped(self.columns)
                columns = mapped.fetch(self.columns, rows) if on_disk else tuple(c[rows] for c in self.columns)
            elif self.whole:
                columns = tuple(c[start:stop] for c in self.whole)
            else:
                index = torch.arange(start, stop, device=device)
                real = torch.minimum(index, self.count - 1) if self.ragged else index
                columns = self._columns_at(self.offset + real)
                weight = (index < self.count).to(_float_of(self.columns)) if self.ragged else None
            yield Batch(columns, weight, keys)


def _at(column: Tensor, rows: Tensor) -> Tensor:
    """column[rows]. A look-up copies rows whole, where indexing would go through them number by number."""
    if column.dim() < 2:
        return column[rows]
    return F.embedding(rows, column.flatten(1)).reshape(*rows.shape, *column.shape[1:])


def _float_of(columns: Columns) -> torch.dtype:
    return next((c.dtype for c in columns if c.is_floating_point()), torch.get_default_dtype())


@dataclass(frozen=True)
class Shard:
    """What a work may touch: the problem's oracles and one client's rows.

    train is what the client learns from; valid, where there is one, what its goal is judged by (the target's
    validation rows, the outer data of a nested problem).
    """

    task: Any
    train: Rows | None
    valid: Rows | None


@dataclass
class _Gathered:
    """The rows of sampled clients, gathered when these are asked a second time; methods with several exchanges per
    round would gather them for each."""

    last: tuple[Tensor | None, Columns] = (None, ())  # in one assignment: threads find ids with their own rows

    def of(self, columns: Columns, ids: Tensor, offsets: Tensor, n: int) -> Columns:
        known, gathered = self.last
        if known is None or not torch.equal(known, ids):
            self.last = ids, ()
            return ()
        if not gathered and len(ids) * n * sum(c[:1].nbytes for c in columns) <= GATHERED:
            rows = offsets[:, None] + torch.arange(n, device=ids.device)
            gathered = tuple(_at(c, rows) for c in columns)
            self.last = ids, gathered
        return gathered


@dataclass(frozen=True)
class Stack:
    """The rows of many clients. A part of a larger stack pads as that does (capacity, ragged), so that the bits of a
    client's result do not depend on which others are in its part. Inputs that were given by name have `names`."""

    columns: Columns
    offsets: Tensor
    counts: Tensor
    padding: tuple[int, bool] | None = None
    names: tuple[str, ...] = ()
    _gathered: "_Gathered" = field(default_factory=lambda: _Gathered(), init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def mapped(self) -> bool:
        """Whether the rows stay on disk until a work asks for them."""
        return mapped.is_mapped(self.columns)

    @cached_property
    def capacity(self) -> int:
        """The largest count."""
        return int(self.counts.max()) if self.padding is None else self.padding[0]

    @cached_property
    def ragged(self) -> bool:
        """Whether counts differ."""
        return bool((self.counts != self.counts[0]).any()) if self.padding is None else self.padding[1]

    def views(self, ids: Tensor) -> Columns:
        """All rows of these clients, [a, n, …], where they lie one after the other in equal parts, or where the same
        clients were asked for before; else nothing.
        """
        if self.ragged:
            return ()
        n, offsets = self.capacity, self.offsets[ids]
        first = int(offsets[0])
        if not torch.equal(offsets, first + n * torch.arange(len(ids), device=ids.device)):
            return self._gathered.of(self.columns, ids, offsets, n)
        return tuple(c[first : first + n * len(ids)].view(len(ids), n, *c.shape[1:]) for c in self.columns)

    def client(self, index: int) -> Rows:
        """One client's rows, as views without padding."""
        offset, count = self.offsets[index], self.counts[index]
        return Rows(self.columns, offset, count, 0).alone(offset, count)

    def shared_by(self, holders: Tensor) -> "Stack":
        """One part per holder, by the part's number; holders of the same part share its rows."""
        return replace(self, offsets=self.offsets[holders], counts=self.counts[holders])

    def to(self, *, dtype: torch.dtype, device: torch.device | str) -> "Stack":
        """The same rows as another type on another device; integer columns keep their type."""
        if self.mapped:
            columns: Any = self.columns[0].table.to(dtype, device).columns()  # type: ignore[attr-defined]
        else:
            columns = tuple(c.to(device, dtype if c.is_floating_point() else c.dtype) for c in self.columns)
        return Stack(columns, self.offsets.to(device), self.counts.to(device), self.padding, self.names)


def pack(shards: Sequence[Any], *, who: str = "client", collate: Collate | None = None) -> Stack:
    """Lay shards out one after the other, checked.

    Mapped files (np.memmap) and Datasets of more than 512 MiB stay on disk; see `coterie.federation.mapped`.

    Args:
        shards: one per client: a tuple of arrays with equally many rows, an array, or a torch Dataset. The last column
            are labels. Inputs may be a tuple, for several arguments of the model, or a dict, for arguments by name; a
            dict with labels in it is a shard too.
        who: what the holders are called in errors.
        collate: makes columns of a list of items, for items of unequal length; shards are then Datasets or lists.

    Example:
        >>> pack([torch.ones(2, 3), torch.ones(5, 3)]).counts.tolist()
        [2, 5]
    """
    if not len(shards):
        raise UsageError(f"there is no {who}; at least one shard is needed.")
    if collate is not None:
        return _padded(shards, who, collate)
    sizes = [_bytes_of(shard, f"{who} {k}") for k, shard in enumerate(shards)]
    if sum(sizes) > READ:
        return _left_on_disk(shards, who, None)
    shards = [
        _read(shard, f"{who} {k}") if size else shard for k, (shard, size) in enumerate(zip(shards, sizes, strict=True))
    ]
    read = [_columns(shard, f"{who} {k}") for k, shard in enumerate(shards)]
    names, parts = read[0][0], [columns for _, columns in read]
    for k, (own, _) in enumerate(read):
        if own != names:
            raise UsageError(f"{who} {k} has the inputs {own or 'without names'}, {who} 0 {names or 'without names'}.")
    first = parts[0]
    for k, columns in enumerate(parts):
        if len(columns) != len(first):
            raise UsageError(f"{who} {k} has {len(columns)} columns, {who} 0 has {len(first)}; all shards must agree.")
        for j, (column, reference) in enumerate(zip(columns, first, strict=True)):
            shape, kind = _form(column)
            if (shape, kind) != _form(reference):
                expected = " and ".join(map(str, _form(reference)))
                raise UsageError(
                    f"column {j} of {who} {k} has rows of shape {shape} and type {kind}, that of {who} 0 {expected}; "
                    "bring all shards to one form."
                )
    if mapped.stays_mapped(shards):
        arrays = (tuple(map(np.asanyarray, columns)) for columns in parts)
        return _on_disk(mapped.Table(tuple(map(mapped.Arrays, arrays)), who), names)
    counts = torch.tensor([len(columns[0]) for columns in parts])
    joined = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    return Stack(joined, counts.cumsum(0) - counts, counts, names=names)


def _read(dataset: Any, name: str) -> Any:
    """A Dataset in memory."""
    return _collated([dataset[i] for i in range(len(dataset))], name, None)


def _bytes_of(shard: Any, name: str) -> int:
    """What a Dataset would take in memory, by its first item; 0 for shards that are there already."""
    if not _is_dataset(shard):
        return 0
    if len(shard) == 0:
        raise UsageError(f"{name} is empty; leave it out or give it data.")
    return len(shard) * sum(torch.as_tensor(c).nbytes for c in _flat(_collated([shard[0]], name, None), name)[1])


def _padded(shards: Sequence[Any], who: str, collate: Collate) -> Stack:
    """Items of unequal length: all of them padded together, or, where they are many, those of a batch at a time."""
    for k, shard in enumerate(shards):
        if not isinstance(shard, list) and not _is_dataset(shard):
            raise UsageError(
                f"{who} {k} is a {type(shard).__name__}; with collate=, give torch Datasets or lists of items."
            )
        if len(shard) == 0:
            raise UsageError(f"{who} {k} is empty; leave it out or give it data.")
    first = _flat(_collated([shards[0][0]], f"{who} 0", collate), f"{who} 0")[1]
    if sum(map(len, shards)) * sum(torch.as_tensor(column).nbytes for column in first) > READ:
        return _left_on_disk(shards, who, collate)
    items = [shard[i] for shard in shards for i in range(len(shard))]
    names, columns = _columns(_collated(items, who, collate), f"what collate made of the items of {who}s")
    counts = torch.tensor([len(shard) for shard in shards])
    if len(columns[0]) != len(items):
        raise UsageError(f"collate made {len(columns[0])} rows of {len(items)} items; it must keep one row per item.")
    return Stack(columns, counts.cumsum(0) - counts, counts, names=names)


def _left_on_disk(shards: Sequence[Any], who: str, collate: Collate | None) -> Stack:
    """Datasets that are too large to be read; beside them, other shards as they are."""

    def columns_of(items: list[Any]) -> tuple[Any, ...]:
        return _flat(_collated(items, who, collate), who)[1]

    sources: list[Any] = []
    names: tuple[str, ...] = ()
    for k, shard in enumerate(shards):
        if collate is not None or _is_dataset(shard):
            names = _flat(_collated([shard[0]], f"{who} {k}", collate), f"{who} {k}")[0]
            sources.append(mapped.Items(shard, columns_of))
        else:
            names, columns = _columns(shard, f"{who} {k}")
            sources.append(mapped.Arrays(tuple(map(np.asanyarray, columns))))
    return _on_disk(mapped.Table(tuple(sources), who), names)


def _form(column: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape of a row and the type of its numbers."""
    first = column[:1] if isinstance(column, Tensor) else torch.as_tensor(np.array(column[:1]))
    return tuple(first.shape[1:]), first.dtype


def _on_disk(table: mapped.Table, names: tuple[str, ...]) -> Stack:
    """A stack of mapped rows, read through once where that is cheap, so that bad numbers are found."""
    for _ in table.scan():
        pass
    counts = torch.tensor(table.counts)
    columns: Any = table.columns()
    return Stack(columns, counts.cumsum(0) - counts, counts, names=names)


def _is_dataset(shard: Any) -> bool:
    if isinstance(shard, Tensor | np.ndarray | tuple | list | Mapping):
        return False
    return hasattr(shard, "__getitem__") and hasattr(shard, "__len__")


def _flat(shard: Any, name: str) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The names of the inputs, where they have some, and the columns: inputs, then labels."""
    if isinstance(shard, Mapping):
        labels = [key for key in LABELS if key in shard]
        if not labels:
            raise UsageError(f"{name} is a dict of {', '.join(map(str, shard))}; it needs an entry 'labels'.")
        names = tuple(key for key in shard if key != labels[0])
        return names, (*(shard[key] for key in names), shard[labels[0]])
    if isinstance(shard, Tensor | np.ndarray):
        return (), (shard,)
    if not isinstance(shard, tuple | list):
        raise UsageError(f"{name} is a {type(shard).__name__}; give (inputs, labels), an array or a torch Dataset.")
    if len(shard) == 2 and isinstance(shard[0], Mapping):
        return tuple(shard[0]), (*shard[0].values(), shard[1])
    if len(shard) == 2 and isinstance(shard[0], tuple):
        return (), (*shard[0], shard[1])
    return (), tuple(shard)


def _columns(shard: Any, name: str) -> tuple[tuple[str, ...], Columns]:
    """One shard as equally long tensors with names, refused where it is empty, ragged or not finite."""
    names, values = _flat(shard, name)
    # mapped files stay as they are, and are looked at a block at a time later
    columns: Any = tuple(c if isinstance(c, np.memmap) else _tensor(c, name) for c in values)
    lengths = {len(c) for c in columns}
    if len(lengths) > 1:
        raise UsageError(f"{name} has columns of different lengths {sorted(lengths)}; each row needs all of them.")
    if not columns or lengths == {0}:
        raise UsageError(f"{name} is empty; leave it out or give it data.")
    for j, column in enumerate(columns):
        if isinstance(column, Tensor):
            mapped.check_finite(column, f"column {j} of {name}", range(len(column)))
    return names, columns


def _tensor(column: Any, name: str) -> Tensor:
    if isinstance(column, np.ndarray) and not column.flags.writeable:
        column = column.copy()  # torch warns of read-only arrays, such as pandas gives out
    try:
        tensor = torch.as_tensor(column)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} holds a {type(column).__name__} that is no numeric array: {error}.") from None
    if tensor.dim() == 0:
        raise UsageError(f"{name} holds a single number where an array of rows is needed.")
    return tensor.detach()


def _collated(items: list[Any], name: str, collate: Collate | None) -> Any:
    """Items as one shard: by collate, or stacked column by column where they have one form."""
    if collate is not None:
        try:
            return collate(items)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(f"collate fails on {len(items)} items of {name}: {reason}.") from error
    flat = [_flat(item if isinstance(item, tuple | list | Mapping) else (item,), name) for item in items]
    try:
        columns = zip(*(values for _, values in flat), strict=True)
        stacked = tuple(torch.stack([torch.as_tensor(value) for value in column]) for column in columns)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the items of {name} are not equally shaped numbers: {error}. Give collate=, which pads a list of items."
        ) from None
    names = flat[0][0]
    return stacked if not names else (dict(zip(names, stacked, strict=False)), stacked[-1])
