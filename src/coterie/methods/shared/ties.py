"""Ties between clients of equal merit: a penalty that spreads weight evenly among them.

Two clients whose slopes ∂F/∂w_k are equal are equally good, and a step along the slope leaves their weights as
different as chance made them (mirror descent keeps their ratio, a projected step their difference). The penalised goal

    F(w) + (τ/2) ‖w − 1/n‖²,   slope ∂F/∂w_k + τ (w_k − 1/n)

has one answer: equals get equal weights, and for constant slopes g the fixed point on the (capped) simplex is
Π(−g/τ), in either geometry. A projected step of size η brings the difference of two equals down by the factor 1 − ητ,
so keep ητ < 1. The penalty moves the limit towards uniform weights by O(τ) wherever slopes differ; therefore it is off
unless it is set, and τ = 0 changes no bit.
"""

from torch import Tensor


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
