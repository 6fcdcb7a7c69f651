"""Small proximal maps."""

from torch import Tensor


def project_ball(v: Tensor, radius: float) -> Tensor:
    """The nearest point of {‖v‖ ≤ radius}, along the last dimension."""
    norm = v.norm(dim=-1, keepdim=True)
    return v * (radius / norm.clamp(min=radius))


def soft_threshold(v: Tensor, threshold: float) -> Tensor:
    """The proximal map of threshold · ‖·‖₁."""
    return v.sign() * (v.abs() - threshold).clamp(min=0.0)
