"""Writing files so that a crash leaves the old one or the new one, never half of either."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from coterie.errors import RunError


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside, flush to disk, rename over."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}. What was saved before is intact."
        ) from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_json(path: Path, data: Any) -> None:
    """Atomically, readable by people."""
    write_atomically(path, (json.dumps(data, indent=2) + "\n").encode())


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; not every system can open a folder."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
