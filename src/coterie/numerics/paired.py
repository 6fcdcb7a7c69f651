"""Paired tests of two methods over the same seeds, and ranks."""

from collections.abc import Sequence
from itertools import product
from math import atan2, cos, inf, pi, sin, sqrt
from statistics import fmean, stdev
from typing import TypeVar

P = TypeVar("P", float, float | None)
MOST_FLIPS = 16  # 2^16 sign patterns are still quick


def t_test(differences: Sequence[float]) -> float | None:
    """Two-sided p of Student's paired test. It takes differences for normally distributed; None below two of them."""
    n = len(differences)
    if n < 2:
        return None
    spread = stdev(differences)
    if spread == 0.0:
        return 1.0 if fmean(differences) == 0.0 else 0.0
    return student(fmean(differences) / spread * sqrt(n), n - 1)


def student(t: float, degrees: int) -> float:
    """P(|T| ≥ |t|) for a whole number of degrees of freedom, by finite sums (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    if abs(t) == inf:
        return 0.0
    angle = atan2(abs(t), sqrt(degrees))
    s, c = sin(angle), cos(angle)
    if degrees % 2:
        term, total = c, 0.0
        for k in range(3, degrees + 1, 2):
            total += term
            term *= c * c * (k - 1) / k
        inside = 2.0 / pi * (angle + s * total)
    else:
        term, total = 1.0, 0.0
        for k in range(2, degrees + 1, 2):
            total += term
            term *= c * c * (k - 1) / k
        inside = s * total
    return min(1.0, max(0.0, 1.0 - inside))


def flip_test(differences: Sequence[float]) -> float | None:
    """Two-sided p of the exact test that flips signs: the share of the 2^n patterns whose |sum| is at least as large.

    It takes nothing for granted but symmetry, and cannot fall below 2^(1 − n). None where n is 0 or too large.
    """
    n = len(differences)
    if not 0 < n <= MOST_FLIPS:
        return None
    found = abs(sum(differences)) * (1.0 - 1e-12)
    sums = (sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in product((1, -1), repeat=n))
    return sum(abs(one) >= found for one in sums) / 2**n


def least_p(n: int) -> float:
    """The smallest p that the exact test can give with n pairs."""
    return min(1.0, 2.0 ** (1 - n))


def holm(ps: Sequence[P]) -> list[P]:
    """p-values of several tests made together, by Holm's rule; None stands for a test that was not made."""
    known = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    out = list(ps)
    running = 0.0
    for place, (p, i) in enumerate(known):
        running = max(running, min(1.0, p * (len(known) - place)))
        out[i] = running
    return out


def ranks(values: Sequence[float], *, higher_is_better: bool) -> list[float]:
    """1 is best; equal values share the mean of their places."""
    signed = [-v if higher_is_better else v for v in values]
    return [1 + sum(w < v for w in signed) + (sum(w == v for w in signed) - 1) / 2 for v in signed]
