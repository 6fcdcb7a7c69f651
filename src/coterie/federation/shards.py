"""Private data, and what a work sees of it.

All clients' rows lie one after the other in one tensor per column, with one offset and one count per client. So unequal
shards cost no padding, and taking a batch for every client is one indexing operation, under `vmap` too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from coterie.errors import UsageError

Columns = tuple[Tensor, ...]
GATHERED = 64 << 20  # bytes


class Batch(NamedTuple):
    """Some rows: their columns (inputs, labels …) and, where rows are padding, a weight of 0 for those."""

    columns: Columns
    weight: Tensor | None = None

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

    Where the clients at hand lie one after the other, `whole` are all rows of each as views.
    """

    columns: Columns
    offset: Tensor
    count: Tensor
    capacity: int
    ragged: bool = False
    whole: Columns = ()

    def take(self, index: Tensor) -> Batch:
        """The rows with these numbers (below count)."""
        rows = self.offset + index
        return Batch(tuple(_at(c, rows) for c in self.columns))

    def all(self) -> Batch:
        """Every row; where clients differ in size, padded to the largest by its last row at weight 0."""
        return next(self.blocks(self.capacity))

    def alone(self, offset: Tensor, count: Tensor) -> "Rows":
        """The rows of one client as views, where offset and count are plain numbers (not under vmap)."""
        first, length = int(offset), int(count)
        columns = tuple(c[first : first + length] for c in self.columns)
        return Rows(columns, torch.zeros_like(offset), count, length)

    def blocks(self, size: int) -> Iterator[Batch]:
        """Every row, at most size at a time. Weights say which rows are real where counts differ."""
        device = self.offset.device
        for start in range(0, self.capacity, size):
            stop = min(start + size, self.capacity)
            if len(self.columns[0]) == self.capacity and not self.ragged:  # nobody else's rows: no copy is needed
                yield Batch(tuple(c[start:stop] for c in self.columns))
                continue
            if self.whole:
                yield Batch(tuple(c[start:stop] for c in self.whole))
                continue
            index = torch.arange(start, stop, device=device)
            if not self.ragged:
                yield self.take(index)
                continue
            batch = self.take(torch.minimum(index, self.count - 1))
            yield Batch(batch.columns, (index < self.count).to(_float_of(self.columns)))


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

    ids: Tensor | None = None
    columns: Columns = ()

    def of(self, columns: Columns, ids: Tensor, offsets: Tensor, n: int) -> Columns:
        if self.ids is None or not torch.equal(self.ids, ids):
            self.ids, self.columns = ids, ()
        elif not self.columns and len(ids) * n * sum(c[:1].nbytes for c in columns) <= GATHERED:
            rows = offsets[:, None] + torch.arange(n, device=ids.device)
            self.columns = tuple(_at(c, rows) for c in columns)
        return self.columns


@dataclass(frozen=True)
class Stack:
    """The rows of many clients. A part of a larger stack pads as that does (capacity, ragged), so that the bits of a
    client's result do not depend on which others are in its part."""

    columns: Columns
    offsets: Tensor
    counts: Tensor
    padding: tuple[int, bool] | None = None
    _gathered: "_Gathered" = field(default_factory=lambda: _Gathered(), init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def capacity(self) -> int:
        """The largest count."""
        return int(self.counts.max()) if self.padding is None else self.padding[0]

    @property
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
        offset, count = int(self.offsets[index]), int(self.counts[index])
        columns = tuple(c[offset : offset + count] for c in self.columns)
        zero = torch.zeros((), dtype=torch.int64, device=self.offsets.device)
        return Rows(columns, zero, self.counts[index], count)

    def shared_by(self, holders: Tensor) -> "Stack":
        """One part per holder, by the part's number; holders of the same part share its rows."""
        return replace(self, offsets=self.offsets[holders], counts=self.counts[holders])

    def to(self, *, dtype: torch.dtype, device: torch.device | str) -> "Stack":
        """The same rows as another type on another device; integer columns keep their type."""
        columns = tuple(c.to(device, dtype if c.is_floating_point() else c.dtype) for c in self.columns)
        return Stack(columns, self.offsets.to(device), self.counts.to(device), self.padding)


def pack(shards: Sequence[Any], *, who: str = "client") -> Stack:
    """Lay shards out one after the other, checked.

    Args:
        shards: one per client: a tuple of arrays with equally many rows, an array, or a torch Dataset.
        who: what the holders are called in errors.

    Example:
        >>> pack([torch.ones(2, 3), torch.ones(5, 3)]).counts.tolist()
        [2, 5]
    """
    if not len(shards):
        raise UsageError(f"there is no {who}; at least one shard is needed.")
    parts = [_columns(shard, f"{who} {k}") for k, shard in enumerate(shards)]
    first = parts[0]
    for k, columns in enumerate(parts):
        if len(columns) != len(first):
            raise UsageError(f"{who} {k} has {len(columns)} columns, {who} 0 has {len(first)}; all shards must agree.")
        for j, (column, reference) in enumerate(zip(columns, first, strict=True)):
            if column.shape[1:] != reference.shape[1:] or column.dtype != reference.dtype:
                raise UsageError(
                    f"column {j} of {who} {k} has rows of shape {tuple(column.shape[1:])} and type {column.dtype}, "
                    f"that of {who} 0 {tuple(reference.shape[1:])} and {reference.dtype}; bring all shards to one form."
                )
    counts = torch.tensor([len(columns[0]) for columns in parts])
    columns = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    return Stack(columns, counts.cumsum(0) - counts, counts)


def _columns(shard: Any, name: str) -> Columns:
    """One shard as equally long tensors, refused where it is empty, ragged or not finite."""
    if isinstance(shard, Tensor | np.ndarray):
        shard = (shard,)
    elif hasattr(shard, "__getitem__") and hasattr(shard, "__len__") and not isinstance(shard, tuple | list | dict):
        if len(shard) == 0:
            raise UsageError(f"{name} is empty; leave it out or give it data.")
        shard = _from_dataset(shard, name)
    elif not isinstance(shard, tuple | list):
        raise UsageError(f"{name} is a {type(shard).__name__}; give (inputs, labels), an array or a torch Dataset.")
    columns = tuple(_tensor(column, name) for column in shard)
    lengths = {len(c) for c in columns}
    if len(lengths) > 1:
        raise UsageError(f"{name} has columns of different lengths {sorted(lengths)}; each row needs all of them.")
    if not columns or lengths == {0}:
        raise UsageError(f"{name} is empty; leave it out or give it data.")
    for j, column in enumerate(columns):
        if column.is_floating_point() and not bool(torch.isfinite(column).all()):
            bad = (
                int((~torch.isfinite(column)).flatten(1).any(1).nonzero()[0])
                if column.dim() > 1
                else int((~torch.isfinite(column)).nonzero()[0])
            )
            raise UsageError(
                f"column {j} of {name} holds NaN or infinity (first in row {bad}); drop or impute such rows first."
            )
    return columns


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


def _from_dataset(dataset: Any, name: str) -> tuple[Any, ...]:
    """The items of a map-style Dataset, stacked column by column."""
    items = [dataset[i] for i in range(len(dataset))]
    try:
        columns = zip(*(item if isinstance(item, tuple | list) else (item,) for item in items), strict=True)
        return tuple(torch.stack([torch.as_tensor(value) for value in column]) for column in columns)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"the items of {name} are not equally shaped numbers: {error}.") from None
