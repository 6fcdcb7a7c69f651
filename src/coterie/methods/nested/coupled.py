"""What the single-loop federated methods share: the point (x, y, v), local steps on it, and a federated start.

v follows the linear system ∇²_yy g v = −∇_y f of the hypergradient. Its direction D_v (works.directions) is a gradient
of clients' own quadratic functions of v, so the mean of local directions is the direction of the mean problem, which a
mean of local inverses is not. Papers that write u = −v mean the same: all signs of the system change with it.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Shard
from coterie.methods.base import Draw, Federation
from coterie.methods.nested import works
from coterie.methods.nested.steps import Curvature, StepRule, indirect
from coterie.numerics import project_ball
from coterie.problems.nested import NestedProblem

Triple = tuple[Tensor, Tensor, Tensor]
"""x, y and v, or something of each: a direction, a momentum."""


SHARE = 0.5
"""The part of the steps of one common step that local steps take: a client's own curvature may be above the mean's."""


class CoupledState(NamedTuple):
    """Outer x, inner y and v of the linear system, the kind of problem, and the estimates for the steps.

    v is empty where there is no indirect term, y on one level.
    """

    x: Tensor
    y: Tensor
    v: Tensor
    kind: str
    curvature: Curvature

    @property
    def point(self) -> Triple:
        """(x, y, v)."""
        return self.x, self.y, self.v

    def at(self, point: Triple, curvature: Curvature) -> "CoupledState":
        """The state at another point."""
        return CoupledState(*point, self.kind, curvature)


def start_coupled(problem: NestedProblem) -> CoupledState:
    """The start of a nested problem, with v = 0."""
    y, kind = problem.inner_start, problem.task.kind
    return CoupledState(problem.start, y, indirect(kind, y), kind, Curvature())


class CoupledRule(NamedTuple):
    """The steps of x, y and v: given, or by the curvatures of steps.py.

    Args:
        rule: η and γ; inner_steps is 1, because y and v move as often as x.
        system_step: τ; γ if it is not given.
    """

    rule: StepRule
    system_step: float | None

    @staticmethod
    def of(step: float | str, outer_step: float | str, system_step: float | None) -> "CoupledRule":
        """Steps for local updates."""
        return CoupledRule(StepRule(step, outer_step, share=SHARE), system_step)

    def sizes(self, fed: Federation, s: CoupledState) -> tuple[tuple[float, float, float], Curvature]:
        """The steps of x, y and v, and the estimates that they follow."""
        curvature = self.rule.estimated(fed, s)
        rho, gamma = self.rule.sizes(curvature)
        return (gamma, rho, self.system_step or rho), curvature


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
