"""The extreme eigenvalues of a symmetric H that is seen only through products, so that H may live on clients."""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.numerics.linear import Matvec


class Extremes(NamedTuple):
    """Ritz values of a symmetric H: `least` is never below its least eigenvalue, `largest` never above its largest.

    An eigenvalue is within `least_error` of the one, and one within `largest_error` of the other.
    """

    least: float
    largest: float
    least_error: float
    largest_error: float


def extreme_eigenvalues(matvec: Matvec, start: Tensor, *, products: int) -> Extremes:
    """Estimate the least and the largest eigenvalue by Lanczos' method; one product per step, at most d of them.

    Args:
        matvec: the product v ↦ H v.
        start: the first vector [d]; it should have a part along every eigenvector, as random ones do.
        products: the most products.

    Example:
        >>> H = torch.diag(torch.tensor([1.0, 2.0, 7.0]))
        >>> found = extreme_eigenvalues(lambda v: H @ v, torch.ones(3), products=3)
        >>> round(found.least, 4), round(found.largest, 4)
        (1.0, 7.0)
    """
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(products, len(start))):
        w = matvec(basis[-1])
        diagonal.append(float(basis[-1] @ w))
        whole = float(w.norm())
        for _ in range(2):  # twice is enough to keep the basis orthogonal
            for q in basis:
                w = w - (q @ w) * q
        beside.append(float(w.norm()))
        if beside[-1] <= 10.0 * torch.finfo(w.dtype).eps * whole:  # the basis spans an invariant subspace
            break
        basis.append(w / beside[-1])
    off = torch.tensor(beside[:-1], dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    errors = beside[-1] * vectors[-1].abs()
    return Extremes(float(values[0]), float(values[-1]), float(errors[0]), float(errors[-1]))
