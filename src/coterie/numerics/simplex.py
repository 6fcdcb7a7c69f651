"""Euclidean and entropic geometry of the simplex Δ and the capped simplex Δ_b = {w ∈ Δ, w ≤ b}.

Every function works on the last dimension, so a matrix of rows is projected in one call.
"""

from math import ceil

import torch
from torch import Tensor


def uniform(n: int, like: Tensor | None = None) -> Tensor:
    """The centre of the simplex, 1/n each.

    Args:
        n: how many clients.
        like: a tensor with the dtype and device to use.
    """
    like = torch.empty(0) if like is None else like
    return torch.full((n,), 1.0 / n, dtype=like.dtype, device=like.device)


def project_simplex(v: Tensor) -> Tensor:
    """Π_Δ(v), exactly, by one sort: O(n log n).

    Args:
        v: points [..., n].
    """
    n = v.shape[-1]
    v = v - v.amax(-1, keepdim=True)  # only differences matter, and these keep their digits at any scale
    u = v.sort(dim=-1, descending=True).values
    excess = u.cumsum(-1) - 1.0
    ranks = torch.arange(1, n + 1, dtype=v.dtype, device=v.device)
    support = (u * ranks > excess).sum(-1, keepdim=True).clamp(min=1)
    threshold = excess.gather(-1, support - 1) / support
    return _on_the_plane((v - threshold).clamp(min=0.0), upper=None)


def project_capped_simplex(v: Tensor, cap: float) -> Tensor:
    """Π_{Δ_b}(v) with b = cap, exactly, by one sort of the 2n kinks: O(n log n).

    The solution is clamp(v − t, 0, b); Σ clamp(v − t, 0, b) grows piecewise linearly as t falls, with kinks at v and
    v − b, so the right piece is found on the sorted kinks and solved in closed form.

    Args:
        v: points [..., n].
        cap: b, the largest weight of one client; at least 1/n.
    """
    n = v.shape[-1]
    if not 1.0 / n <= cap * (1 + 1e-12):
        raise ValueError(
            f"no weights of {n} clients sum to 1 below a cap of {cap:g}; the cap must be at least {1 / n:g}"
        )
    if cap >= 1.0:
        return project_simplex(v)
    # With k = ⌈1/b⌉, t lies within b below the k-th largest: only what is within b of that one is not at a bound.
    pivot = v.topk(min(n, ceil(1.0 / cap)), dim=-1).values[..., -1:]
    v = (v - pivot).clamp(-cap, cap)
    kinks, order = torch.cat([v, v - cap], dim=-1).sort(dim=-1, descending=True)
    growth = torch.where(order < n, 1, -1).cumsum(-1)[..., :-1]  # of the sum, between this kink and the next
    total = (growth * (kinks[..., :-1] - kinks[..., 1:])).cumsum(-1)  # at the next kink; up to n·b ≥ 1
    total = torch.cat([torch.zeros_like(v[..., :1]), total], dim=-1)
    piece = ((total < 1.0).sum(-1, keepdim=True) - 1).clamp(0, 2 * n - 2)
    threshold = kinks.gather(-1, piece) - (1.0 - total.gather(-1, piece)) / growth.gather(-1, piece)
    return _on_the_plane((v - threshold).clamp(0.0, cap), upper=cap)


def _on_the_plane(w: Tensor, upper: float | None) -> Tensor:
    """Spread the last rounding error over the free coordinates, so that Σw = 1 to machine precision."""
    free = w > 0.0 if upper is None else (w > 0.0) & (w < upper)
    count = free.sum(-1, keepdim=True).clamp(min=1)
    w = w + torch.where(free, (1.0 - w.sum(-1, keepdim=True)) / count, 0.0)
    return w.clamp(min=0.0, max=upper)


def entropic_step(w: Tensor, gradient: Tensor, step: float) -> Tensor:
    """One step of entropic mirror descent, w_k exp(−step · gradient_k) / Z, in log space.

    A weight of zero stays zero. Gradients are measured from the least one that counts, so a common part of any size
    costs no digit and an exponent of any size neither over- nor underflows the sum.

    Args:
        w: client weights [..., n] on the simplex.
        gradient: the gradient with respect to them, [..., n].
        step: α, the step size.
    """
    absent = w == 0.0
    least = torch.where(absent, torch.inf, gradient).amin(-1, keepdim=True)
    return torch.softmax(torch.where(absent, -torch.inf, w.log() - step * (gradient - least)), dim=-1)
