"""CIFAR-10 in its binary version: one label byte and 3,072 pixel bytes per image."""

from pathlib import Path

import numpy as np
import torch

from coterie.problems.data.examples import DataSet, Examples
from coterie.problems.data.files import content, damaged
from coterie.problems.data.sets import locate

PIXELS = 3 * 32 * 32


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
    x, y = read_binary(path)
    if not len(x):
        raise damaged(path, "it holds no images")
    if y.max() > 9:
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
