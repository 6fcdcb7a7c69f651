"""Convex sets for the variables of nested problems: `Box`, `Ball`, `Simplex`, or a projection of your own.

A variable with a set is projected after every step, at clients and at the server: x ← Π(x − α h). A set belongs to a
whole variable, or, in a dict, to one part of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie.errors import UsageError, gist
from coterie.numerics.proximal import project_ball
from coterie.numerics.simplex import project_simplex


class ConvexSet(Protocol):
    """What can project a flat vector."""

    def project(self, v: Tensor) -> Tensor:
        """The nearest point of the set."""


Projection = Callable[[Tensor], Tensor]
Within = ConvexSet | Projection | Mapping[str, Any] | None
"""A set for a whole variable, or sets for parts of a dict, by name."""


@dataclass(frozen=True)
class Box:
    """{v : lower ≤ v ≤ upper}, number by number.

    Args:
        lower: one number, or a tensor with one per entry of the flat variable; −inf for no bound.
        upper: likewise; inf for no bound.

    Example:
        >>> Box(0.0, 1.0).project(torch.tensor([-1.0, 0.5, 3.0])).tolist()
        [0.0, 0.5, 1.0]
    """

    lower: float | Tensor = 0.0
    upper: float | Tensor = 1.0

    def __post_init__(self) -> None:
        lower, upper = (torch.as_tensor(bound, dtype=torch.float64) for bound in (self.lower, self.upper))
        if not bool((lower <= upper).all()):
            raise UsageError(f"Box({self.lower}, {self.upper}) is empty: a lower bound is above its upper bound.")

    def project(self, v: Tensor) -> Tensor:
        """The nearest point of the box."""
        return torch.minimum(torch.maximum(v, _like(self.lower, v)), _like(self.upper, v))


@dataclass(frozen=True)
class Ball:
    """{v : ‖v − centre‖ ≤ radius}.

    Args:
        radius: at least 0.
        centre: one number for all entries, or a tensor of the variable's size.

    Example:
        >>> Ball(1.0).project(torch.tensor([3.0, 4.0])).tolist()
        [0.6000000238418579, 0.800000011920929]
    """

    radius: float
    centre: float | Tensor = 0.0

    def __post_init__(self) -> None:
        if not self.radius >= 0.0:
            raise UsageError(f"Ball({self.radius}) is empty: the radius must be at least 0.")

    def project(self, v: Tensor) -> Tensor:
        """The nearest point of the ball."""
        centre = _like(self.centre, v)
        return centre + project_ball(v - centre, self.radius)


@dataclass(frozen=True)
class Simplex:
    """{v ≥ 0 : Σ v = total}.

    Args:
        total: the sum of the entries, at least 0.

    Example:
        >>> Simplex().project(torch.zeros(4)).tolist()
        [0.25, 0.25, 0.25, 0.25]
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        if not (self.total > 0.0 and isfinite(self.total)):
            raise UsageError(f"Simplex({self.total}) is empty or a point: the total must be a positive number.")

    def project(self, v: Tensor) -> Tensor:
        """The nearest point of the simplex."""
        return self.total * project_simplex(v / self.total)


def projection(within: Any, start: Tensor, name: str) -> Projection:
    """The projection onto a set, tried at the start: what is no projection is refused before the first round.

    Args:
        within: a set, or a function of the flat variable.
        start: where it is tried.
        name: of the variable, for errors.
    """
    project: Any = getattr(within, "project", within)
    if not callable(project):
        raise UsageError(
            f"{name}_set is a {type(within).__name__}; give Box, Ball or Simplex of coterie.problems, or a "
            "function that projects the flat variable."
        )
    away = start + 1.0 + torch.arange(len(start), dtype=start.dtype, device=start.device) / max(1, len(start))
    for point in (start, away):
        try:
            inside = project(point)
            again = project(inside)
        except Exception as error:
            raise UsageError(f"{name}_set fails on {name} with {len(start)} numbers: {gist(error)}") from error
        if not isinstance(inside, Tensor) or inside.shape != point.shape:
            raise UsageError(f"{name}_set must return a tensor of shape {tuple(point.shape)}, as it is given.")
        if not bool(torch.isfinite(inside).all()):
            raise UsageError(f"{name}_set projects to NaN or infinity: the set is empty, or the function is wrong.")
        if not torch.allclose(inside, again, rtol=1e-4, atol=1e-5):
            raise UsageError(f"{name}_set is no projection: applied twice it moves a point again.")
    found: Projection = project
    return found


def _like(bound: float | Tensor, v: Tensor) -> Tensor:
    return torch.as_tensor(bound, dtype=v.dtype, device=v.device)
