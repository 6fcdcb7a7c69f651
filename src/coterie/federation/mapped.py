"""Rows that stay on disk: columns of np.memmap arrays, or a torch Dataset too large for memory.

Only the rows that a work asks for are read. Pages of a mapped file that were read are given back to the system from
time to time, so that the process does not grow by the whole file.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.errors import UsageError

Collate = Callable[[list[Any]], Any]
BLOCK = 1 << 24  # bytes that are read at once where all rows are looked at
RELEASE = 1 << 24  # bytes of pages, of all files together, after which they are given back
PAGES = 1 << 16  # bytes that the system may map around one row


class _Pages:
    """Pages of mapped files that this process has read, given back to the system when they are many."""

    def __init__(self) -> None:
        self._files: dict[int, mmap.mmap] = {}
        self._bytes = 0

    def add(self, file: mmap.mmap, count: int) -> None:
        """Note that so many bytes of a file were read."""
        self._files[id(file)] = file
        self._bytes += count
        if self._bytes > RELEASE:
            for known in self._files.values():
                known.madvise(mmap.MADV_DONTNEED)  # they are read again when they are asked for
            self._files, self._bytes = {}, 0


_PAGES = _Pages()


class Source(Protocol):
    """One client's rows on disk."""

    cheap: bool
    """Whether reading all rows once is a matter of seconds."""

    def __len__(self) -> int: ...

    def read(self, index: np.ndarray) -> tuple[Any, ...]:
        """The columns of these rows."""


@dataclass
class Arrays:
    """Columns that are arrays, mapped files among them."""

    columns: tuple[np.ndarray, ...]
    cheap: bool = True

    def __len__(self) -> int:
        return len(self.columns[0])

    def read(self, index: np.ndarray) -> tuple[Any, ...]:
        """Copies of these rows."""
        low, high = int(index[0]), int(index[-1]) + 1
        run = high - low == len(index) and bool((np.diff(index) == 1).all())
        rows = tuple(np.array(c[low:high] if run else c[index]) for c in self.columns)
        for column, found in zip(self.columns, rows, strict=True):
            pages = getattr(column, "_mmap", None)
            if isinstance(pages, mmap.mmap) and getattr(column, "mode", "c") != "c":  # private changes must stay
                _PAGES.add(pages, found.nbytes if run else len(found) * max(PAGES, found.nbytes // len(found)))
        return rows


@dataclass
class Items:
    """A map-style Dataset, whose items are turned into columns when they are read."""

    dataset: Any
    columns_of: Callable[[list[Any]], tuple[Any, ...]]
    cheap: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: np.ndarray) -> tuple[Any, ...]:
        """The columns of these items."""
        return self.columns_of([self.dataset[int(i)] for i in index])


@dataclass(frozen=True)
class Table:
    """The rows of all clients, one after the other, of which nothing is in memory.

    Args:
        sources: one per client.
        who: what the clients are called in errors.
        dtype: the type of real numbers; None leaves them as they are.
        device: where rows go.
    """

    sources: tuple[Source, ...]
    who: str
    dtype: torch.dtype | None = None
    device: torch.device | str = "cpu"

    @property
    def counts(self) -> list[int]:
        """Rows per client."""
        return [len(source) for source in self.sources]

    def columns(self) -> tuple["MappedColumn", ...]:
        """The columns of all rows."""
        width = len(self.sources[0].read(np.zeros(1, dtype=np.int64)))
        return tuple(MappedColumn(self, j, 0, sum(self.counts)) for j in range(width))

    def to(self, dtype: torch.dtype, device: torch.device | str) -> "Table":
        """The same rows as other numbers or on another device, once they are read."""
        return replace(self, dtype=dtype, device=device)

    def fetch(self, index: np.ndarray) -> tuple[Tensor, ...]:
        """The columns of these rows."""
        ends = np.cumsum(self.counts)
        holder = np.searchsorted(ends, index, side="right")
        parts = []
        for k in dict.fromkeys(holder.tolist()):
            here = np.flatnonzero(holder == k)
            local = index[here] - (ends[k - 1] if k else 0)
            parts.append((here, self._checked(self.sources[k].read(local), k, local)))
        if len(parts) == 1:
            return parts[0][1]
        order = torch.from_numpy(np.argsort(np.concatenate([here for here, _ in parts]), kind="stable"))
        joined = (torch.cat(column) for column in zip(*(columns for _, columns in parts), strict=True))
        return tuple(column[order.to(column.device)] for column in joined)

    def _checked(self, columns: tuple[Any, ...], k: int, index: np.ndarray) -> tuple[Tensor, ...]:
        tensors = []
        for j, column in enumerate(columns):
            tensor = torch.as_tensor(column)
            check_finite(tensor, f"column {j} of {self.who} {k}", index)
            real = tensor.is_floating_point() and self.dtype is not None
            tensors.append(tensor.to(self.device, self.dtype if real else tensor.dtype))
        return tuple(tensors)

    def scan(self) -> Iterator[tuple[Tensor, ...]]:
        """All rows of sources that are cheap to read, a block at a time."""
        end = 0
        for source in self.sources:
            start, end = end, end + len(source)
            if source.cheap:
                row = sum(column.nbytes for column in self.fetch(np.array([start])))
                step = max(1, BLOCK // max(1, row))
                yield from (self.fetch(np.arange(i, min(i + step, end))) for i in range(start, end, step))


@dataclass(frozen=True)
class MappedColumn:
    """A column that looks like a tensor where its rows are not needed, and reads them where they are."""

    table: Table
    number: int
    offset: int
    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def shape(self) -> torch.Size:
        """Of all rows."""
        return torch.Size((self.count, *self[:1].shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows once they are read."""
        return self[:1].dtype

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def is_floating_point(self) -> bool:
        """Whether it holds real numbers."""
        return self[:1].is_floating_point()

    def element_size(self) -> int:
        """Bytes per number."""
        return self[:1].element_size()

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        return fetch((self,), rows)[0]

    def part(self, offset: int, count: int) -> "MappedColumn":
        """Some consecutive rows, still on disk."""
        return replace(self, offset=self.offset + offset, count=count)


def check_finite(column: Tensor, name: str, numbers: Sequence[int] | np.ndarray) -> None:
    """Refuse numbers that are not finite; the numbers of the rows tell where the first one is."""
    if column.is_floating_point() and not bool(torch.isfinite(column).all()):
        bad = int((~torch.isfinite(column)).reshape(len(column), -1).any(1).nonzero()[0])
        where = f"first in row {int(numbers[bad])}"
        raise UsageError(f"{name} holds NaN or infinity ({where}); drop or impute such rows first.")


def is_mapped(columns: Sequence[Any]) -> bool:
    """Whether these columns stay on disk."""
    return bool(columns) and isinstance(columns[0], MappedColumn)


def fetch(columns: Sequence[Any], rows: slice | Tensor) -> tuple[Tensor, ...]:
    """The rows of all these columns of one table, read once."""
    first = columns[0]
    index = (
        np.arange(*rows.indices(first.count), dtype=np.int64) if isinstance(rows, slice) else rows.cpu().numpy().ravel()
    )
    found = first.table.fetch(first.offset + index)
    return tuple(found[column.number] for column in columns)


def part(column: Any, offset: int, count: int) -> Any:
    """Some consecutive rows of a column, in memory or on disk, without a copy."""
    return column.part(offset, count) if isinstance(column, MappedColumn) else column[offset : offset + count]


def stays_mapped(shards: Sequence[Any]) -> bool:
    """Whether one of these shards has a mapped file among its columns."""
    return any(isinstance(column, np.memmap) for shard in shards for column in _parts(shard))


def _parts(shard: Any) -> Iterator[Any]:
    if isinstance(shard, Mapping):
        shard = tuple(shard.values())
    if isinstance(shard, tuple | list):
        for item in shard:
            yield from _parts(item) if isinstance(item, tuple | Mapping) else (item,)
    else:
        yield shard


__all__ = ["Arrays", "Collate", "Items", "MappedColumn", "Table", "fetch", "is_mapped", "part", "stays_mapped"]
