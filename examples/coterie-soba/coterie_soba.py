"""SOBA (Dagréou, Ablin, Vaiter, Moreau 2022): bilevel problems in one loop, without an inner solver.

Three variables move at once, along directions at the same point:

    y ← y − ρ ∇_y g(x, y)                                the inner problem
    v ← v − ρ (∇²_yy g(x, y) v + ∇_y f(x, y))            the linear system, v → −[∇²_yy g]⁻¹ ∇_y f
    x ← x − γ (∇²_xy g(x, y) v + ∇_x f(x, y))            the outer problem

Each direction is linear in the clients' losses, so the mean of the clients' directions is that of the mean problem.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Federation, Shard, Static, work
from coterie.methods import Method, View
from coterie.methods.base import validated
from coterie.methods.shared.works import draw_batch, goal_rows, own_rows
from coterie.numerics import Draw
from coterie.problems.nested import NestedProblem
from coterie.settings import BatchSize, Positive


class SobaState(NamedTuple):
    """All that SOBA remembers."""

    x: Tensor
    y: Tensor
    v: Tensor


@work("minisoba/directions", update=RESULT)
def directions(shard: Shard, shared: SobaState, private: None, static: Static, draw: Draw) -> SobaState:
    """One client's directions for x, y and v: g on its training rows, f on its validation rows."""
    (x, y, v), task = shared, shard.task
    inner = draw_batch(own_rows(shard), static.batch, draw.phase("inner"))
    outer = draw_batch(goal_rows(shard), static.batch, draw.phase("outer"))
    return SobaState(
        task.cross(x, y, v, inner) + task.direct_gradient(x, y, outer),
        task.inner_gradient(x, y, inner),
        task.inner_hvp(x, y, v, inner) + task.outer_gradient(x, y, outer),
    )


@validated(
    paper="Dagréou et al. 2022",
    grid={"method.step": (0.05, 0.1, 0.2), "method.outer_step": (0.01, 0.02, 0.05)},
)
def minisoba(*, step: Positive = 0.1, outer_step: Positive = 0.02, batch: BatchSize = 64) -> Method:
    """Solve a bilevel problem in one loop, by simultaneous steps on both levels and on the linear system.

    Symbols: ρ = step, γ = outer_step.

    Cost: 1 round per call of round.

    Args:
        step: ρ, step size of the inner variable and of the linear system
        outer_step: γ, step size of the outer variable
        batch: rows per client for each of the two levels, or "all"

    Example:
        >>> minisoba(step=0.2).settings["step"]
        0.2
    """

    def init(problem: NestedProblem, n: int) -> SobaState:
        return SobaState(problem.start, problem.inner_start, torch.zeros_like(problem.inner_start))

    def round(fed: Federation, s: SobaState, draw: Draw) -> SobaState:
        d = fed.mean(directions, s, draw=draw.phase("directions"), batch=batch)
        return SobaState(s.x - outer_step * d.x, s.y - step * d.y, s.v - step * d.v)

    return Method("minisoba", init, round, lambda s: View(s.x, inner=s.y), needs=frozenset({"nested"}))
