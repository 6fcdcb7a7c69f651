"""Small proximal maps."""

import torch
from torch import Tensor


def project_ball(v: Tensor, radius: float) -> Tensor:
    """The nearest point of {‖v‖ ≤ radius}, along the last dimension.

    Args:
        v: points [..., n].
        radius: radius of the ball.
    """
    largest = v.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
    norm = largest * (v / largest).norm(dim=-1, keepdim=True).clamp(min=1.0)  # squares of v itself could overflow
    return torch.where(norm > radius, v / norm * radius, v)


def soft_threshold(v: Tensor, threshold: float) -> Tensor:
    """The proximal map of threshold · ‖·‖₁.

    Args:
        v: points of any shape.
        threshold: how much closer to 0 every entry comes.
    """
    return v.sign() * (v.abs() - threshold).clamp(min=0.0)
