"""Reading public files, plain or gzipped. Whatever is wrong with a file becomes an error that names it."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from coterie.errors import UsageError

BLOCK = 1 << 20
LARGEST = 1 << 28  # no file of a known data set is a third of this: a larger one is not what it claims to be
LONGEST = 1 << 16  # a line
GZIP = b"\x1f\x8b"


def damaged(path: Path, what: str) -> UsageError:
    """The error for a file that cannot be what its name says."""
    return UsageError(f"{path} is damaged: {what}. Remove it and get it again (`coterie data get`).")


def is_gzip(path: Path) -> bool:
    """By the first bytes, not by the name: browsers and mirrors decompress files and keep their names."""
    with path.open("rb") as file:
        return file.read(2) == GZIP


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The content as a stream, decompressed where it is gzipped; failures while it is read are explained."""
    try:
        with gzip.open(path) if is_gzip(path) else path.open("rb") as file:
            yield cast(BinaryIO, file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(path, f"the gzip stream is broken ({_gist(error)})") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None


def blocks(path: Path) -> Iterator[bytes]:
    """The content, a block at a time."""
    with opened(path) as file:
        yield from iter(partial(file.read, BLOCK), b"")


def raw_blocks(path: Path) -> Iterator[bytes]:
    """The file as it lies there, a block at a time."""
    with path.open("rb") as file:
        yield from iter(partial(file.read, BLOCK), b"")


def content(path: Path) -> bytearray:
    """The whole content. It is read in blocks, so that a false size in a header never asks for memory."""
    data = bytearray()
    for block in blocks(path):
        data += block
        if len(data) > LARGEST:
            raise _too_large(path)
    return data


def lines(path: Path) -> Iterator[bytes]:
    """The content by lines, of which neither one nor all may be longer than any real file's."""
    total = 0
    with opened(path) as file:
        while line := file.readline(LONGEST):
            total += len(line)
            if len(line) == LONGEST:
                raise damaged(path, f"it has a line of {LONGEST >> 10} KiB or more")
            if total > LARGEST:
                raise _too_large(path)
            yield line


def _too_large(path: Path) -> UsageError:
    return damaged(path, f"it holds more than {LARGEST >> 20} MiB")


def _gist(error: Exception) -> str:
    return str(error).rstrip(".").lower() or type(error).__name__
