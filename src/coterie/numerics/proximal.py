"""Small proximal maps, and proximal points by gradient descent."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Pull(NamedTuple):
    """How a proximal point is found by gradient descent.

    Args:
        penalty: λ, the pull towards the centre.
        step: step size.
        steps: how many at most.
        accuracy: squared norm of the gradient at which θ moves no more.
    """

    penalty: float
    step: float
    steps: int
    accuracy: float


def proximal_point(gradient: Callable[[Tensor], Tensor], center: Tensor, pull: Pull) -> Tensor:
    """argmin f(θ) + λ/2 ‖θ − centre‖² by gradient descent from the centre, along the last dimension.

    Args:
        gradient: θ ↦ ∇f(θ).
        center: where θ starts and is pulled to, [..., d].
        pull: λ, and how to descend.

    Example:
        >>> proximal_point(lambda t: t - 2.0, torch.zeros(1), Pull(1.0, 0.1, 200, 1e-12))  # f = ½ (θ − 2)²
        tensor([1.0000])
    """
    theta = center
    for _ in range(pull.steps):
        g = gradient(theta) + pull.penalty * (theta - center)
        far = g.square().sum(-1, keepdim=True) > pull.accuracy
        theta = torch.where(far, theta - pull.step * g, theta)
    return theta


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
