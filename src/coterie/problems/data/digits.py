"""The embedded data set: scikit-learn's 1,797 digits, 8 × 8."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from coterie.problems.data.examples import Examples


def digits() -> Examples:
    """All 1,797 digits, in [0, 1]; a copy that the caller may change."""
    images, labels = _parsed()
    return Examples(images.clone(), labels.clone())


@cache
def _parsed() -> tuple[torch.Tensor, torch.Tensor]:
    """The file, parsed once per process; without an import of scikit-learn, which takes longer than a short run."""
    package = find_spec("sklearn")
    home = None if package is None or package.origin is None else Path(package.origin).parent
    file = None if home is None else home / "datasets" / "data" / "digits.csv.gz"
    if file is not None and file.is_file():
        rows = np.loadtxt(file, delimiter=",")
        images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1]
    else:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images, labels = bunch.images[:, None], bunch.target
    return torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)
