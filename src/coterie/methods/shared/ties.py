"""Ties between clients of equal merit: a penalty, or a link, that spreads weight evenly among them.

Two clients whose slopes ∂F/∂w_k are equal are equally good, and a step along the slope leaves their weights as
different as chance made them (mirror descent keeps their ratio, a projected step their difference). The penalised goal

    F(w) + (τ/2) ‖w − 1/n‖²,   slope ∂F/∂w_k + τ (w_k − 1/n)

has one answer: equals get equal weights, and for constant slopes g the fixed point on the (capped) simplex is
Π(−g/τ), in either geometry. A projected step of size η brings the difference of two equals down by the factor 1 − ητ,
so keep ητ < 1. The penalty moves the limit towards uniform weights by O(τ) wherever slopes differ; therefore it is off
unless it is set, and τ = 0 changes no bit.

The link takes the slopes summed over all steps, S_k, where the sums of mirror descent go through an exponential. With
u_k = (S_k − min S)/(max S − min S), from 0 for the best client to 1 for the worst,

    w_k ∝ 1/(1 + exp((u_k − m)/s)),   m = 0.4,   s = 0.05

It is flat on either side of m: clients whose merit is nearly that of the best get nearly the same weight, whatever
chance made of their slopes, and those near the worst get nearly nothing. Neither the units of the loss nor the number
of steps count. What it cannot say is that all clients are equal: the worse part of their range gets little even then.
"""

import torch
from torch import Tensor

MIDDLE, SOFTNESS = 0.4, 0.05  # m and s


def tied(slope: Tensor, w: Tensor, tie: float) -> Tensor:
    """The slope of the weights with that of the tie penalty.

    Args:
        slope: ∂F/∂w_k per client.
        w: the weights at which it was taken.
        tie: τ, strength of the penalty; 0 returns the slope as it is.

    Example:
        >>> import torch
        >>> tied(torch.zeros(2), torch.tensor([0.75, 0.25]), 2.0)
        tensor([ 0.5000, -0.5000])
    """
    return slope + tie * (w - w.mean()) if tie else slope


def saturating(sums: Tensor) -> Tensor:
    """Weights by the logistic link.

    Args:
        sums: S_k, the slopes ∂F/∂w_k summed over all steps, per client, or rows of them; where all are equal, so are
            the weights.

    Example:
        >>> saturating(torch.tensor([0.0, 1.0, 9.0, 10.0])).round(decimals=3)
        tensor([0.5000, 0.5000, 0.0000, 0.0000])
    """
    least = sums.amin(-1, keepdim=True)
    spread = sums.amax(-1, keepdim=True) - least
    u = (sums - least) / torch.where(spread > 0.0, spread, 1.0)
    w = torch.sigmoid((MIDDLE - u) / SOFTNESS)
    return w / w.sum(-1, keepdim=True)
