"""What the single-loop federated methods share: the point (x, y, v), local steps on it, and a federated start.

v follows the linear system ∇²_yy g v = −∇_y f of the hypergradient. Its direction D_v (works.directions) is a gradient
of clients' own quadratic functions of v, so the mean of local directions is the direction of the mean problem, which a
mean of local inverses is not. Papers that write u = −v mean the same: all signs of the system change with it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Shard
from coterie.methods.base import Draw, View
from coterie.methods.nested import works
from coterie.numerics import project_ball
from coterie.problems.nested import NestedProblem

Triple = tuple[Tensor, Tensor, Tensor]
"""x, y and v, or something of each: a direction, a momentum."""


class CoupledState(NamedTuple):
    """Outer x, inner y and v of the linear system; v is empty where there is no indirect term, y on one level."""

    x: Tensor
    y: Tensor
    v: Tensor


def start_coupled(problem: NestedProblem) -> CoupledState:
    """The start of a nested problem, with v = 0."""
    y = problem.inner_start
    indirect = problem.task.kind in ("bilevel", "compositional")
    return CoupledState(problem.start, y, torch.zeros_like(y) if indirect else y.new_zeros(0))


def view_coupled(s: CoupledState) -> View:
    """x is the model, y the inner variable."""
    return View(s.x, inner=s.y if len(s.y) else None)


def directions(shard: Shard, point: Triple, batch: int | str, draw: Draw) -> Triple:
    """D_x, D_y and D_v at a point."""
    d_y, d_v, d_x = works.directions(shard, *point, batch, draw)
    return d_x, d_y, d_v


def moved(point: Triple, along: Triple, steps: Iterable[float], radius: float | None) -> Triple:
    """The point after one step of each variable along its direction, with ‖v‖ ≤ radius."""
    x, y, v = (at - step * d for at, step, d in zip(point, steps, along, strict=True))
    return x, y, within_ball(v, radius)


def within_ball(v: Tensor, radius: float | None) -> Tensor:
    """The nearest point of the ball of that radius; v itself where there is none."""
    return v if radius is None or not len(v) else project_ball(v, radius)


def check_two_levels(problem: NestedProblem, name: str) -> None:
    """Refuse problems without an inner variable."""
    if problem.task.kind == "single-level":
        raise UsageError(
            f"{name} solves problems of two levels, and this one has one level only. Use fedavg, sgd-full or fednest."
        )
