"""Paired tests of two methods over the same seeds, and ranks."""

from collections.abc import Sequence
from math import inf, sqrt
from statistics import fmean, stdev
from typing import TypeVar

import numpy as np

P = TypeVar("P", float, float | None)
MOST_FLIPS = 16  # 2^16 sign patterns are still quick


def t_test(differences: Sequence[float]) -> float | None:
    """Two-sided p-value of Student's paired test, which assumes normal differences; None for fewer than two."""
    from scipy.stats import t as student

    n = len(differences)
    if n < 2:
        return None
    mean, spread = fmean(differences), stdev(differences)
    if spread == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    return float(2.0 * student.sf(abs(mean) / spread * sqrt(n), n - 1))


def flip_test(differences: Sequence[float]) -> float | None:
    """Two-sided p-value of the exact sign-flip test: the share of the 2^n patterns whose |sum| is at least as large.

    It assumes only symmetry, and cannot fall below 2^(1 − n). None where n is 0 or above MOST_FLIPS.
    """
    from scipy.stats import permutation_test

    n = len(differences)
    if not 0 < n <= MOST_FLIPS:
        return None
    if n == 1:
        return 1.0
    exact = permutation_test((np.asarray(differences),), np.sum, permutation_type="samples", n_resamples=inf)
    return float(exact.pvalue)


def least_p(n: int) -> float:
    """The smallest p-value that the exact test can give with n pairs."""
    return min(1.0, 2.0 ** (1 - n))


def holm(ps: Sequence[P]) -> list[P]:
    """p-values of several tests made together, by Holm's rule; None stands for a test that was not made."""
    known = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    corrected = list(ps)
    running = 0.0
    for position, (p, i) in enumerate(known):
        running = max(running, min(1.0, p * (len(known) - position)))
        corrected[i] = running
    return corrected


def ranks(values: Sequence[float], *, higher_is_better: bool) -> list[float]:
    """1 is best; equal values share the mean of their ranks."""
    from scipy.stats import rankdata

    ranked: list[float] = rankdata([-v if higher_is_better else v for v in values]).tolist()
    return ranked
