"""Writing files so that a crash leaves the old one or the new one, never half of either."""

import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from coterie.errors import RunError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

UNFINISHED = ".tmp"
LOOK = 0.1  # seconds between two tries to lock a folder
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # how a formula begins in a spreadsheet


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write beside, flush to disk, rename over.

    Args:
        path: the file.
        data: its content.
        mode: who may read and write it, as far as the umask allows.
    """
    name: Path | None = None
    try:
        name, handle = _beside(path, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}. What was saved before is intact."
        ) from None
    finally:
        if name is not None:
            with suppress(OSError):
                os.unlink(name)
    _sync_folder(path.parent)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file and flush it to disk, whole or not at all; a line that was torn before is ended first.

    Args:
        path: the file.
        line: without an end.
    """
    try:
        with path.open("ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            torn = file.read(1) not in (b"", b"\n")
            data = (b"\n" if torn else b"") + line.encode() + b"\n"
            try:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                os.truncate(path, end)
                raise
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}. What was saved before is intact; make room and "
            "start again."
        ) from None


def _beside(path: Path, mode: int) -> tuple[Path, int]:
    """A new file beside another one, open for writing; the system gives it the mode that the umask allows."""
    name = path.with_name(f".{path.name}.{token_hex(8)}{UNFINISHED}")
    return name, os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)


def tensor_bytes(tensors: "dict[str, Tensor]", about: dict[str, str]) -> bytes:
    """A safetensors file, the same bytes for the same content: the library writes its header in any order."""
    from safetensors.torch import save as save_tensors  # processes that only wait lock folders, and need no torch

    data = save_tensors(tensors, about)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]


def write_json(path: Path, data: Any) -> None:
    """Atomically, readable by people."""
    write_atomically(path, (json.dumps(data, indent=2) + "\n").encode())


def cell(value: object) -> object:
    """A value for a CSV file that people open in a spreadsheet: words that would be a formula there get a quote (').

    Args:
        value: a number, or a word that may have come from somebody's data.

    Example:
        >>> cell("=1+1"), cell("-1"), cell("healthy")
        ("'=1+1", '-1', 'healthy')
    """
    if not isinstance(value, str) or not value.lstrip(" ").startswith(FORMULA):
        return value
    with suppress(ValueError):
        if isfinite(float(value)):
            return value
    return f"'{value}"


def make_folder(path: Path) -> None:
    """A folder within a result folder, if it is not there yet."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"the folder {path} cannot be made: {error.strerror or error}.") from None


def unfinished(path: Path) -> bool:
    """Whether this is what a killed process left half-written."""
    return path.name.startswith(".") and path.name.endswith(UNFINISHED)


def sweep(folder: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in filter(unfinished, folder.glob(".*")):
        with suppress(OSError):
            path.unlink()


@contextmanager
def sole_user(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Keep everybody else out of a result folder; the lock goes with the process, however that ends.

    Args:
        folder: a folder that exists.
        patience: how many seconds to wait for another user to end.
    """
    if sys.platform == "win32":  # no such locks there
        yield
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror or error}.") from None
    try:
        with suppress(OSError):  # a file system without locks
            _lock(descriptor, folder, patience)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, patience: float) -> None:
    """Lock an open folder, or name who has locked it."""
    import fcntl

    end = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise UsageError(
                    f"another coterie is at work in {folder}{_locked_by(descriptor)}; wait for it to end, or choose "
                    "another folder."
                ) from None
            time.sleep(LOOK)


def _locked_by(descriptor: int) -> str:
    """The process that has locked a folder, where the system (Linux) tells."""
    with suppress(OSError, ValueError):
        inode = str(os.fstat(descriptor).st_ino)
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            kind, process, place = (line.split()[i] for i in (1, 4, 5))
            if kind == "FLOCK" and place.rpartition(":")[2] == inode and int(process) > 0:
                return f" (process {process})"
    return ""


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; not every system can open or flush a folder."""
    if os.name != "posix":
        return
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
