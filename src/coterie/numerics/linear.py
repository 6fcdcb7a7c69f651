"""Solvers of H x = b that see H only through products, so that H may live on clients."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Matvec = Callable[[Tensor], Tensor]


def neumann(matvec: Matvec, b: Tensor, *, scale: float, terms: int) -> Tensor:
    """(1/ℓ) Σ_{n<N} (I − H/ℓ)ⁿ b ≈ H⁻¹ b, with ℓ = scale ≥ ‖H‖ and N = terms; costs N − 1 products.

    Args:
        matvec: the product v ↦ H v.
        b: the right-hand side [d].
        scale: ℓ, an upper bound of ‖H‖.
        terms: N, terms of the series; 0 gives 0.
    """
    if terms < 1:
        return torch.zeros_like(b)
    term = b / scale
    total = term
    for _ in range(terms - 1):
        term = term - matvec(term) / scale
        total = total + term
    return total


class CGResult(NamedTuple):
    """What conjugate gradients found and how far it got."""

    x: Tensor
    residual: float
    steps: int
    converged: bool


def conjugate_gradients(matvec: Matvec, b: Tensor, *, steps: int, tolerance: float = 0.0) -> CGResult:
    """Solve H x = b for symmetric positive definite H from x = 0; one product per step.

    Args:
        matvec: the product v ↦ H v.
        b: the right-hand side [d].
        steps: the most steps.
        tolerance: ends earlier if ‖b − H x‖ ≤ tolerance · ‖b‖.
    """
    x, r, p = torch.zeros_like(b), b, b
    rr = r @ r
    goal = tolerance**2 * float(b @ b)
    taken = 0
    while taken < steps and float(rr) > goal:
        hp = matvec(p)
        curvature = p @ hp
        if not float(curvature) > 0.0:  # H is not positive definite along p, or NaN: keep the best point so far
            break
        alpha = rr / curvature
        x = x + alpha * p
        r = r - alpha * hp
        rr, previous = r @ r, rr
        p = r + (rr / previous) * p
        taken += 1
    return CGResult(x, float(rr) ** 0.5, taken, float(rr) <= goal)
