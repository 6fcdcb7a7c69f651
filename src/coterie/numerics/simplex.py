"""Euclidean and entropic geometry of the simplex Δ and the capped simplex Δ_b = {w ∈ Δ, w ≤ b}.

Every function works on the last dimension, so a matrix of rows is projected in one call.
"""

import torch
from torch import Tensor


def uniform(n: int, like: Tensor | None = None) -> Tensor:
    """The centre of the simplex, 1/n each."""
    if like is None:
        return torch.full((n,), 1.0 / n)
    return torch.full((n,), 1.0 / n, dtype=like.dtype, device=like.device)


def project_simplex(v: Tensor) -> Tensor:
    """Π_Δ(v), exactly, by one sort: O(n log n)."""
    n = v.shape[-1]
    u = v.sort(dim=-1, descending=True).values
    excess = u.cumsum(-1) - 1.0
    ranks = torch.arange(1, n + 1, dtype=v.dtype, device=v.device)
    support = (u * ranks > excess).sum(-1, keepdim=True).clamp(min=1)
    threshold = excess.gather(-1, support - 1) / support
    return _on_the_plane((v - threshold).clamp(min=0.0), upper=None)


def project_capped_simplex(v: Tensor, cap: float) -> Tensor:
    """Π_{Δ_b}(v) with b = cap, exactly, by one sort of the 2n kinks: O(n log n).

    The solution is clamp(v − t, 0, b); Σ clamp(v − t, 0, b) falls piecewise linearly in t, with kinks at v and
    v − b, so the right piece is found on the sorted kinks and solved in closed form.
    """
    n = v.shape[-1]
    if not 1.0 / n <= cap * (1 + 1e-12):
        raise ValueError(
            f"no weights of {n} clients sum to 1 below a cap of {cap:g}; the cap must be at least {1 / n:g}"
        )
    if cap >= 1.0:
        return project_simplex(v)
    u = v.sort(dim=-1).values
    kinks = torch.cat([u - cap, u], dim=-1).sort(dim=-1).values
    total = _clamped_sum(u, kinks, cap)  # falls from n·b (≥ 1) to 0 along the kinks
    piece = ((total >= 1.0).sum(-1, keepdim=True) - 1).clamp(0, 2 * n - 2)
    left, right = kinks.gather(-1, piece), kinks.gather(-1, piece + 1)
    high, low = total.gather(-1, piece), total.gather(-1, piece + 1)
    share = ((high - 1.0) / (high - low).clamp(min=torch.finfo(v.dtype).tiny)).clamp(0.0, 1.0)
    return _on_the_plane((v - (left + share * (right - left))).clamp(0.0, cap), upper=cap)


def _clamped_sum(u: Tensor, t: Tensor, cap: float) -> Tensor:
    """Σ_i clamp(u_i − t, 0, cap) for ascending u and every t, by prefix sums."""
    n = u.shape[-1]
    prefix = torch.cat([torch.zeros_like(u[..., :1]), u.cumsum(-1)], dim=-1)
    u = u.contiguous()
    first_positive = torch.searchsorted(u, t, right=True)
    first_capped = torch.searchsorted(u, t + cap, right=True)
    inner = prefix.gather(-1, first_capped) - prefix.gather(-1, first_positive)
    return inner - t * (first_capped - first_positive) + cap * (n - first_capped)


def _on_the_plane(w: Tensor, upper: float | None) -> Tensor:
    """Spread the last rounding error over the free coordinates, so that Σw = 1 to machine precision."""
    free = w > 0.0 if upper is None else (w > 0.0) & (w < upper)
    count = free.sum(-1, keepdim=True).clamp(min=1)
    w = w + torch.where(free, (1.0 - w.sum(-1, keepdim=True)) / count, 0.0)
    return w.clamp(min=0.0, max=upper)


def entropic_step(w: Tensor, gradient: Tensor, step: float) -> Tensor:
    """One step of entropic mirror descent, w_k exp(−step · gradient_k) / Z, in log space.

    A weight of zero stays zero; an exponent of any finite size neither over- nor underflows the sum.
    """
    return torch.softmax(w.log() - step * gradient, dim=-1)
