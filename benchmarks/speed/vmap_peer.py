"""Paper 1's outer round as research code vectorises it: torch.func.vmap over stacked clients, and nothing else.

The network is made of torch's own layers; the two gradients of a correction are computed one after the other;
Hessian products go forward over reverse; anchors move for the clients whose coin came up (moving all of them at every
step would cost ten times as much).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

from benchmarks.speed.loops import Period
from benchmarks.speed.scene import Shards


def outer_round(
    net: nn.Module,
    start: Tensor,
    shards: Shards,
    goal: tuple[Tensor, Tensor],
    plans: tuple[list[Period], list[Period]],
    steps: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """θ by Local-SVRG on the losses, h on the linear system, and −∇L_k(θ)ᵀh for every client; equal weights."""
    names = [(name, p.shape, p.numel()) for name, p in net.named_parameters()]
    x, y = torch.stack([s[0] for s in shards]), torch.stack([s[1] for s in shards])
    K = len(shards)

    def loss(theta: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        parts = theta.split([size for _, _, size in names])
        parameters = {name: part.view(shape) for (name, shape, _), part in zip(names, parts, strict=True)}
        return F.cross_entropy(functional_call(net, parameters, (inputs,)), labels)

    slope = grad(loss)

    def product(theta: Tensor, v: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        return jvp(lambda t: slope(t, inputs, labels), (theta,), (v,))[1]

    def walk(
        begin: Tensor, gradient: Callable[[Tensor, Tensor, Tensor], Tensor], plan: list[Period], step: float
    ) -> Tensor:
        """Local-SVRG with any gradient(point, inputs, labels)."""
        at = begin.repeat(K, 1)
        anchor, whole = at, torch.stack([gradient(begin, x[k], y[k]) for k in range(K)])
        many, everyone = vmap(gradient), torch.arange(K)[:, None]
        for period in plan:
            for t in range(period.rows.shape[1]):
                rows = period.rows[:, t]
                some = x[everyone, rows], y[everyone, rows]
                old, at = at, at - step * (many(at, *some) - many(anchor, *some) + whole)
                for k in period.coins[:, t].nonzero().flatten().tolist():
                    anchor, whole = anchor.clone(), whole.clone()
                    anchor[k], whole[k] = old[k], gradient(old[k], x[k], y[k])
            at = at.mean(0).repeat(K, 1)
        return at[0]

    theta = walk(start, slope, plans[0], steps[0])
    g0 = slope(theta, *goal)
    h = walk(g0, lambda v, inputs, labels: product(theta, v, inputs, labels) - g0, plans[1], steps[1])
    merits = torch.stack([-(slope(theta, x[k], y[k]) @ h) for k in range(K)])
    return theta, merits
