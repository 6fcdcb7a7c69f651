"""MNIST and Fashion-MNIST: the idx format of LeCun, Cortes and Burges, plain or gzipped."""

from math import prod
from pathlib import Path

import numpy as np
import torch

from coterie.errors import UsageError
from coterie.problems.data.examples import DataSet, Examples
from coterie.problems.data.files import content, damaged
from coterie.problems.data.sets import locate

UNSIGNED_BYTES = 0x08


def images(name: str) -> DataSet:
    """60,000 and 10,000 digits (mnist) or clothes (fashion-mnist), 28 × 28."""
    paths = locate(name)
    train, test = (
        _part(paths[f"{stem}-images-idx3-ubyte"], paths[f"{stem}-labels-idx1-ubyte"]) for stem in ("train", "t10k")
    )
    if train.x.shape[1:] != test.x.shape[1:]:
        shapes = " and ".join("×".join(map(str, part.x.shape[2:])) for part in (train, test))
        raise UsageError(f"the training and test images of {name} differ in size ({shapes}); get it again.")
    return DataSet(name, 10, train, test, unit=255.0)


def _part(images: Path, labels: Path) -> Examples:
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if len(x) != len(y):
        raise UsageError(f"{images} holds {len(x)} images, {labels} {len(y)} labels; get both again.")
    if y.max() > 9:
        raise damaged(labels, f"it has the label {y.max()}, where classes are 0 … 9")
    return Examples(torch.from_numpy(x).unsqueeze(1), torch.from_numpy(y).to(torch.int64))


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """One idx file of bytes as an array; the header is checked against what follows it."""
    data = content(path)
    start = 4 + 4 * dimensions
    if len(data) < start:
        raise damaged(path, f"it has {len(data)} bytes, fewer than an idx header of {start}")
    mark = bytes([0, 0, UNSIGNED_BYTES, dimensions])
    if data[:4] != mark:
        raise damaged(path, f"it begins with {data[:4].hex()}, not with the idx mark {mark.hex()}")
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    if prod(shape) != len(data) - start:
        sizes = " × ".join(map(str, shape))
        raise damaged(path, f"its header says {sizes} bytes, but {len(data) - start} follow")
    if not prod(shape):
        raise damaged(path, "it holds no rows")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
