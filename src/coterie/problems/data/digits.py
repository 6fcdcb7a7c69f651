"""The embedded data set: scikit-learn's 1,797 digits, 8 × 8."""

from functools import cache

import torch

from coterie.problems.data.examples import Examples


def digits() -> Examples:
    """All 1,797 digits, in [0, 1]; a copy that the caller may change."""
    images, labels = _parsed()
    return Examples(images.clone(), labels.clone())


@cache
def _parsed() -> tuple[torch.Tensor, torch.Tensor]:
    """The file, parsed once per process."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.tensor(bunch.images / 16.0, dtype=torch.float32).unsqueeze(1)
    return x, torch.tensor(bunch.target, dtype=torch.int64)
