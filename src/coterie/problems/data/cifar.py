"""CIFAR-10, in its binary version (label byte and 3,072 pixel bytes an image) or its python version (pickled).

A pickle can name any function to be called. Here the three names of numpy that the published batches use become
inert records, any other name is refused, and the array is made from the record's bytes: nothing from a file is run.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.problems.data.examples import DataSet, Examples
from coterie.problems.data.files import content, damaged
from coterie.problems.data.sets import locate

PIXELS = 3 * 32 * 32
NUMPY = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")


def cifar10() -> DataSet:
    """50,000 and 10,000 images."""
    paths = locate("cifar10")
    test = next(name for name in paths if "test_batch" in name)
    train = [_batch(path) for name, path in sorted(paths.items()) if name != test]
    return DataSet("cifar10", 10, _examples(train), _examples([_batch(paths[test])]), unit=255.0)


def _examples(batches: list[tuple[np.ndarray, np.ndarray]]) -> Examples:
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return Examples(torch.from_numpy(x.reshape(-1, 3, 32, 32)), torch.from_numpy(y.astype(np.int64)))


def _batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    x, y = (read_binary if path.name.removesuffix(".gz").endswith(".bin") else read_pickled)(path)
    if not len(x):
        raise damaged(path, "it holds no images")
    if y.min() < 0 or y.max() > 9:
        raise damaged(path, f"it has labels from {y.min()} to {y.max()}, where classes are 0 … 9")
    return x, y


def read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [n, 3072] and labels of one batch of the binary version."""
    data = content(path)
    if len(data) % (PIXELS + 1):
        raise damaged(
            path, f"its {len(data)} bytes are no multiple of {PIXELS + 1}, the size of an image with its label"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, PIXELS + 1)
    return rows[:, 1:], rows[:, 0]


def read_pickled(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [n, 3072] and labels of one batch of the python version."""
    record = _Plain(io.BytesIO(content(path)), encoding="bytes")
    try:
        batch = record.load()
        fields = {k.decode() if isinstance(k, bytes) else k: v for k, v in batch.items()}
        labels, pixels = _labels(fields["labels"]), _pixels(fields["data"])
    except Exception as error:  # a damaged pickle raises nearly anything, from nearly anywhere
        raise damaged(path, f"it is no batch of the python version ({type(error).__name__}: {error})") from None
    if labels.shape != pixels.shape[:1]:
        raise damaged(path, f"it holds {len(pixels)} images, but labels of shape {labels.shape}")
    return pixels, labels


class _Record:
    """What a pickle says of an object: the arguments it was made with and its state. It does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Plain(pickle._Unpickler):
    """Reads plain data and numpy arrays, the latter as records.

    The reader written in Python: the one in C lets a file of a few bytes reserve all memory (a memo of 2³¹ places).
    """

    def find_class(self, module: str, name: str) -> type[_Record]:
        """A record for the names that make up an array; everything else is refused."""
        if module in NUMPY and name in ("_reconstruct", "ndarray", "dtype"):
            return _Record
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no such batch needs")


def _labels(values: Any) -> np.ndarray:
    """A flat list of whole numbers; lists of lists may name each other, and be endless when written out."""
    if type(values) is not list or not all(type(value) is int for value in values):
        raise ValueError("its labels are no list of whole numbers")
    return np.asarray(values, dtype=np.int64)


def _pixels(array: _Record) -> np.ndarray:
    """The array of a record whose state is numpy's (version, shape, dtype, Fortran order, bytes)."""
    _, shape, dtype, fortran, data = array.state
    kind = dtype.arguments[0]
    if kind not in (b"u1", "u1") or len(shape) != 2 or shape[1] != PIXELS:
        raise ValueError(f"an array of {kind!r} and shape {shape} where bytes of shape (n, {PIXELS}) are expected")
    return np.frombuffer(bytearray(data), np.uint8).reshape(shape, order="F" if fortran else "C")
