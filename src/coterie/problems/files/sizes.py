"""How large a packed table is once it is read, added up from what its headers declare before anything is read."""

import struct
import zipfile
from pathlib import Path
from typing import Any

from numpy.lib import format as npy

RATIO, SMALL = 200, 1 << 26  # a packed table unpacks to at most 200 times its size, or 64 MiB if that is more
NUMBER = 8  # bytes of a value once it is read
SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # kinds of Arrow's messages


class Unreadable(Exception):
    """Why a file cannot be read, and the remedy."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy


def limit_of(path: Path) -> int:
    """How many bytes a packed table may become.

    Args:
        path: the file.
    """
    return max(SMALL, RATIO * path.stat().st_size)


class Total:
    """The bytes of a file's parts; one that exceeds the limit is refused by its name.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._limit, self._bytes = path, limit_of(path), 0

    def add(self, part: str, count: int) -> None:
        """One more part of so many bytes.

        Args:
            part: what it is called.
            count: its bytes; fewer than none are a lie.
        """
        if count < 0:
            raise Unreadable(f"{part} of {self._path.name} declares a negative size", "Save the table again.")
        self._bytes += count
        if self._bytes > self._limit:
            raise Unreadable(
                f"{self._path.name} unpacks to more than {self._limit >> 20} MiB, {RATIO} times its size: with {part} "
                f"it comes to {self._bytes >> 20:,} MiB",
                "If it is really a table, save it without compression or as CSV.",
            )


def check_archive(path: Path) -> None:
    """Refuse an NPZ file whose arrays, as their own headers and the archive declare them, are too large together.

    Args:
        path: the file.
    """
    total = Total(path)
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            total.add(f"the member {entry.filename!r}", max(entry.file_size, _declared(archive, entry)))


def _declared(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> int:
    """The bytes of an array by its header; 0 of what is none."""
    with archive.open(entry) as file:
        if file.read(len(npy.MAGIC_PREFIX)) != npy.MAGIC_PREFIX:
            return 0
    with archive.open(entry) as file:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(file)
    count = dtype.itemsize
    for length in shape:
        count *= length
    return int(count)


def check_parquet(path: Path, about: Any) -> None:
    """Refuse a Parquet file whose row groups are too large together.

    Args:
        path: the file.
        about: its metadata, as pyarrow has it.
    """
    total = Total(path)
    for i in range(about.num_row_groups):
        group = about.row_group(i)
        total.add(f"row group {i}", max(group.total_byte_size, group.num_rows * group.num_columns * NUMBER))


def check_arrow(path: Path, messages: Any, columns: int) -> int:
    """Refuse an Arrow file whose batches are too large together; the number of its batches.

    Args:
        path: the file.
        messages: a reader of its messages, as pyarrow has it.
        columns: how many columns it has.
    """
    total, batches = Total(path), 0
    for message in iter(lambda: _next(messages), None):
        batch = _batch(memoryview(message.metadata))
        if batch is None:
            continue
        rows, buffers = batch.whole(0), batch.structs(2)
        packed = batch.at(3) is not None
        body = memoryview(message.body)
        size = sum(_unpacked(body, offset, length) if packed else length for offset, length in buffers)
        total.add(f"batch {batches}", max(size, rows * columns * NUMBER))
        batches += batch.kind == BATCH
    return batches


def _next(messages: Any) -> Any:
    try:
        return messages.read_next_message()
    except StopIteration:
        return None


def _unpacked(body: memoryview, offset: int, length: int) -> int:
    """The bytes of a compressed buffer: it begins with their number, or −1 where it is as it was."""
    if length < NUMBER:
        return length
    count: int = struct.unpack_from("<q", body, offset)[0]
    return length if count == -1 else count


class _Record:
    """A table of a flatbuffer, as Arrow's metadata are written: fields by number."""

    def __init__(self, data: memoryview, place: int, kind: int = 0) -> None:
        self.data, self.place, self.kind = data, place, kind
        self._fields = place - struct.unpack_from("<i", data, place)[0]
        self._size = struct.unpack_from("<H", data, self._fields)[0]

    def at(self, field: int) -> int | None:
        """Where a field is; None where it is missing."""
        entry = 4 + 2 * field
        offset = struct.unpack_from("<H", self.data, self._fields + entry)[0] if entry < self._size else 0
        return self.place + offset if offset else None

    def whole(self, field: int) -> int:
        """A field that is a number of 64 bits."""
        place = self.at(field)
        return 0 if place is None else int(struct.unpack_from("<q", self.data, place)[0])

    def byte(self, field: int) -> int:
        """A field that is a number of 8 bits."""
        place = self.at(field)
        return 0 if place is None else self.data[place]

    def below(self, field: int, kind: int = 0) -> "_Record | None":
        """A field that is a table."""
        place = self.at(field)
        if place is None:
            return None
        return _Record(self.data, place + struct.unpack_from("<I", self.data, place)[0], kind)

    def structs(self, field: int) -> list[tuple[int, int]]:
        """A field that is a list of pairs of 64-bit numbers."""
        place = self.at(field)
        if place is None:
            return []
        start = place + struct.unpack_from("<I", self.data, place)[0]
        count = struct.unpack_from("<I", self.data, start)[0]
        return list(struct.iter_unpack("<qq", self.data[start + 4 : start + 4 + 16 * count]))


def _batch(metadata: memoryview) -> _Record | None:
    """What a message says of the batch that it carries, of rows or of a dictionary; None of any other message."""
    message = _Record(metadata, struct.unpack_from("<I", metadata, 0)[0])
    kind = message.byte(1)
    if kind == BATCH:
        return message.below(2, BATCH)
    dictionary = message.below(2) if kind == DICTIONARY else None
    return None if dictionary is None else dictionary.below(1, DICTIONARY)
