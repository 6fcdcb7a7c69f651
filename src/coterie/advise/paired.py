"""Differences of two models on the same rows, with an interval that holds for models trained on other rows."""

from math import sqrt
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

SHARED = 2.0  # by which rows that folds share widen intervals; with it they cover what they promise
SAME = 1e-9


class Interval(NamedTuple):
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


class Paired(NamedTuple):
    """A mean difference with its interval, its standard error, and the probability that it is above 0."""

    interval: Interval
    error: float
    probability: float

    @property
    def z(self) -> float:
        """In standard errors."""
        return self.interval.value / self.error if self.error else 0.0


NOTHING = Paired(Interval(0.0, 0.0, 0.0), 0.0, 0.5)


def paired(differences: np.ndarray, folds: int) -> Paired:
    """The mean of differences [R, n] by dealing of the folds and row.

    Rows vary, and so do the models that folds train: the variance over rows is inflated for shared training rows
    (Nadeau and Bengio 2003), and that between dealings is added.

    Args:
        differences: how much better one model is than the other.
        folds: how many folds there are.

    Example:
        >>> paired(np.array([[0.1, 0.3, 0.2, 0.2]]), 5).interval.value
        0.2
    """
    by_row = differences.mean(0)
    n, mean = len(by_row), float(by_row.mean())
    between = float(differences.mean(1).var(ddof=1)) / len(differences) if len(differences) > 1 else 0.0
    error = sqrt(float(by_row.var(ddof=1)) / n * (1.0 + SHARED / (folds - 1.0)) + between)
    if error <= SAME:
        return Paired(Interval(mean, mean, mean), 0.0, 0.5)
    half = float(student.ppf(0.975, n - 1)) * error
    return Paired(Interval(mean, mean - half, mean + half), error, float(student.cdf(mean / error, n - 1)))
