"""Shared by methods with sparse weights: masks per parameter, tensor by tensor, and training within them.

A client of capacity p keeps a share p of the entries of each weight; biases and norms are always kept. The network
keeps its shape, so with dense kernels only the traffic falls with p, not the time (carving.py has smaller networks).
The densities of the weights may differ: then a client keeps the share p of all of them together.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from coterie.federation import Shard, Static
from coterie.methods.base import Draw
from coterie.methods.shared.works import own_rows
from coterie.methods.submodels.carving import moved
from coterie.numerics.sparse import largest
from coterie.problems.models.submodel import Anatomy


def counts(cut: Anatomy, density: float | Sequence[float]) -> list[int]:
    """How many entries of each weight tensor are kept: its density's share, at least one."""
    weights = [s for s in cut.segments if s.is_weight]
    each = [density] * len(weights) if isinstance(density, float) else density
    return [min(max(1, round(p * (s.stop - s.start))), s.stop - s.start) for p, s in zip(each, weights, strict=True)]


def densest(cut: Anatomy, score: Tensor, kept: Sequence[int]) -> Tensor:
    """The entries of each weight tensor with the largest scores, and all other parameters, [..., d] bool."""
    left = iter(kept)
    parts = [
        largest(score[..., start:stop], next(left))
        if is_weight
        else torch.ones_like(score[..., start:stop], dtype=torch.bool)
        for start, stop, is_weight in cut.segments
    ]
    return torch.cat(parts, -1)


def spread(cut: Anatomy, share: float, relative: Tensor) -> list[int]:
    """Entries per weight tensor that a client of this share keeps, in densities that go with relative [tensors].

    The surplus of tensors that are kept whole goes to the others.
    """
    sizes = torch.tensor([s.stop - s.start for s in cut.segments if s.is_weight], dtype=torch.float64)
    density = share * relative.double().cpu()
    for _ in range(len(sizes)):
        full = density >= 1.0
        spare = share * sizes.sum() - sizes[full].sum()
        rest = (density * sizes)[~full].sum()
        density = torch.where(full, 1.0, density * spare / rest if float(rest) > 0 else density)
    return counts(cut, density.clamp(max=1.0).tolist())


def erdos_renyi_kernel(cut: Anatomy) -> Tensor:
    """ERK (Evci et al. 2020): relative densities Σ dimensions/Π dimensions of each weight tensor."""
    parameters = dict(cut.module.named_parameters())
    shapes = [tuple(p.shape) for name, p in parameters.items() if len(cut.axes[name]) > 1]
    return torch.tensor([sum(shape) / prod(shape) for shape in shapes], dtype=torch.float64)


def size(cut: Anatomy, kept: Sequence[int]) -> int:
    """How many parameters such a mask keeps."""
    return sum(kept) + sum(s.stop - s.start for s in cut.segments if not s.is_weight)


def within(shard: Shard, theta: Tensor, mask: Tensor, steps: int, static: Static, draw: Draw) -> Tensor:
    """θ after steps of the local rule in the whole network, which move only the entries that the mask keeps."""
    own = shard.task.own(shard.task, own_rows(shard))
    return moved(theta, lambda x, batch: own.gradient(x, batch) * mask, shard, steps, static, draw)
