"""The embedded data set: scikit-learn's 1,797 digits, 8 × 8."""

from typing import NamedTuple

import torch
from torch import Tensor


class Images(NamedTuple):
    """Images [n, channels, height, width] in [0, 1] and their labels."""

    x: Tensor
    y: Tensor


def digits() -> Images:
    """All 1,797 digits."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.tensor(bunch.images / 16.0, dtype=torch.float32).unsqueeze(1)
    return Images(x, torch.tensor(bunch.target, dtype=torch.int64))
