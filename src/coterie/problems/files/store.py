"""Rows that may be more than memory holds: appended block by block, then one tensor, mapped from a file if it is large.

A mapped tensor is backed by a file that nobody else can see (it is unlinked at once where the system allows), so that
what is paged in can be paged out again. All holders' rows lie in one tensor, as the engine wants them.
"""

import os
import tempfile
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
import torch
from platformdirs import user_cache_path
from torch import Tensor

from coterie.errors import RunError

TYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}


class RowBuffer:
    """Blocks of rows of one shape and type; in memory, or in a file of the cache folder."""

    def __init__(self, shape: tuple[int, ...], dtype: str, *, mapped: bool, folder: str | None = None) -> None:
        self.shape, self.dtype, self.rows = shape, np.dtype(dtype), 0
        self._blocks: list[np.ndarray] = []
        self._file: IO[bytes] | None = _scratch(folder) if mapped else None

    def append(self, block: np.ndarray) -> None:
        """Some rows more."""
        block = np.ascontiguousarray(block, dtype=self.dtype).reshape(len(block), *self.shape)
        self.rows += len(block)
        if self._file is None:
            self._blocks.append(block)
            return
        try:
            self._file.write(block.tobytes())
        except OSError as error:
            raise RunError(
                f"{self._file.name} cannot be written: {error.strerror or error}. Name a folder with problem.cache."
            ) from None

    def tensor(self) -> Tensor:
        """All rows, [rows, *shape]; nothing can be appended afterwards."""
        shape = (self.rows, *self.shape)
        if self._file is None:
            blocks, self._blocks = self._blocks, []
            whole = np.concatenate(blocks) if blocks else np.empty(shape, self.dtype)
            return torch.from_numpy(whole)
        self._file.flush()
        name = self._file.name
        tensor = torch.from_file(name, shared=False, size=prod(shape), dtype=TYPES[self.dtype.name]).view(shape)
        self._file.close()
        with suppress(OSError):  # where an open file cannot be removed it stays in the cache folder
            os.unlink(name)
        return tensor


def _scratch(folder: str | None) -> IO[bytes]:
    place = Path(folder) if folder else user_cache_path("coterie") / "files"
    try:
        place.mkdir(parents=True, exist_ok=True)
        return tempfile.NamedTemporaryFile(dir=place, prefix="rows-", delete=False)
    except OSError as error:
        raise RunError(f"{place} cannot be written: {error.strerror or error}. Set problem.cache.") from None
