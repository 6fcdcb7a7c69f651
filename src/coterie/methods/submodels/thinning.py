"""Shared by methods with sparse weights: masks per parameter, tensor by tensor, and training within them.

A client of capacity p keeps a share p of the entries of each weight; biases and norms are always kept. The network
keeps its shape, so with dense kernels only the traffic falls with p, not the time (carving.py has smaller networks).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.federation import Shard, Static
from coterie.methods.base import Draw
from coterie.methods.submodels.carving import moved
from coterie.problems.models.submodel import Anatomy


def counts(cut: Anatomy, density: float | Sequence[float]) -> list[int]:
    """How many entries of each weight tensor are kept: its density's share, at least one."""
    weights = [s for s in cut.segments if s.is_weight]
    each = [density] * len(weights) if isinstance(density, float) else density
    return [min(max(1, round(p * (s.stop - s.start))), s.stop - s.start) for p, s in zip(each, weights, strict=True)]


def densest(cut: Anatomy, score: Tensor, kept: Sequence[int]) -> Tensor:
    """The entries of each weight tensor with the largest scores, and all other parameters, [..., d] bool."""
    mask, left = torch.ones_like(score, dtype=torch.bool), iter(kept)
    parts = []
    for start, stop, is_weight in cut.segments:
        scores = score[..., start:stop]
        if not is_weight:
            parts.append(mask[..., start:stop])
            continue
        best = scores.argsort(dim=-1, descending=True, stable=True)[..., : next(left)]
        parts.append(torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True))
    return torch.cat(parts, -1)


def size(cut: Anatomy, kept: Sequence[int]) -> int:
    """How many parameters such a mask keeps."""
    return sum(kept) + sum(s.stop - s.start for s in cut.segments if not s.is_weight)


def within(shard: Shard, theta: Tensor, mask: Tensor, steps: int, static: Static, draw: Draw) -> Tensor:
    """θ after steps of the local rule in the whole network, which move only the entries that the mask keeps."""
    return moved(theta, lambda x, batch: shard.task.gradient(x, batch) * mask, shard, steps, static, draw)
