"""Robust means of rows X [n, d]: what a few arbitrary rows cannot move far.

All commute with translations and with scalings, and equal the mean where all rows agree. With f arbitrary rows:
the coordinate-wise ones stay within the range of the others if 2f < n; the geometric median stays within a multiple of
their spread if 2f < n; Krum returns a row near most others if 2f + 3 ≤ n.
"""

import torch
from torch import Tensor


def trimmed_mean(X: Tensor, f: int) -> Tensor:
    """The mean by coordinate without the f smallest and the f largest numbers (Yin et al. 2018). O(nd log n)."""
    if not 0 <= 2 * f < len(X):
        raise ValueError(f"{f} rows cut from both ends of {len(X)} leave none")
    return X.sort(0).values[f : len(X) - f].mean(0)


def coordinate_median(X: Tensor) -> Tensor:
    """The median by coordinate, between the middle two if n is even: the trimmed mean that trims most."""
    return trimmed_mean(X, (len(X) - 1) // 2)


def geometric_median(X: Tensor, *, smoothing: float = 1e-6, steps: int = 100, tolerance: float = 1e-6) -> Tensor:
    """argmin_z Σ_k ‖x_k − z‖ by Weiszfeld's steps z ← Σ β_k x_k / Σ β_k, β_k = 1/max(ν, ‖x_k − z‖). O(nd) a step.

    smoothing is ν, which keeps a step finite at a row (Pillutla et al. 2022). It starts at the coordinate-wise median,
    from where far rows hardly count, and ends when a step is below tolerance times the median distance to a row.
    """
    z = coordinate_median(X)
    for _ in range(steps):
        distances = (X - z).norm(dim=1).clamp_min(smoothing)
        beta = 1.0 / distances
        new = (beta / beta.sum()) @ X
        moved, z = (new - z).norm(), new
        if bool(moved <= tolerance * distances.median()):
            break
    return z


def krum_scores(X: Tensor, f: int) -> Tensor:
    """Σ ‖x_k − x_j‖² over the n − f − 2 rows x_j nearest to x_k (at least one), [n] (Blanchard et al. 2017).

    O(n²d) by the Gram matrix, in float64 on the host, because distances are differences of large numbers there.
    """
    n, wide = len(X), X.cpu().double()
    gram = wide @ wide.T
    norms = gram.diagonal()
    distances = (norms[:, None] + norms[None, :] - 2.0 * gram).clamp_min(0.0)
    distances.fill_diagonal_(torch.inf)
    near = min(max(n - f - 2, 1), n - 1)
    return distances.sort(1).values[:, :near].sum(1)


def multi_krum(X: Tensor, f: int, keep: int) -> Tensor:
    """The mean of the rows with the `keep` lowest scores; ties go to the first. Krum is keep = 1."""
    best = krum_scores(X, f).argsort(stable=True)[:keep].sort().values
    return X[best.to(X.device)].mean(0)
