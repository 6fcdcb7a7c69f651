"""SUSTAIN (Khanduri et al. 2021), Algorithm 1, on nested problems: one loop, recursive momentum on both levels.

    v ← ∇_y g(x, y; ζ) + (1 − η_g)(v − ∇_y g(x', y'; ζ)),     y⁺ = y − β v
    u ← ∇̄f(x, y; ξ)   + (1 − η_f)(u − ∇̄f(x', y'; ξ)),        x⁺ = x − α u,     ∇̄f = ∇_x f − ∇²_xy g p
    p = s Σ_{n≤k} (I − s∇²_yy g)ⁿ ∇_y f,   one batch ξ_n per product; x', y' are the previous iterate, on the same rows

This is the paper's own setting; methods/weights/sustain.py is its form for client weights. Federated: every quantity is
a mean over the clients, the Hessian of each product too. Deviations: the series is summed, not cut at a random length;
steps and momenta are constant.
"""

from collections.abc import Mapping
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method
from coterie.methods.nested.coupled import check_two_levels
from coterie.methods.nested.steps import Curvature, StepRule
from coterie.methods.shared.kinds import refuse_weights_only
from coterie.methods.shared.works import draw_batch, goal_rows, own_rows
from coterie.numerics import neumann
from coterie.problems.nested import NestedProblem


class NestedSustainState(NamedTuple):
    """x and y, now and one step before; both momenta; steps taken; the kind of problem and the estimates for steps."""

    x: Tensor
    y: Tensor
    x_before: Tensor
    y_before: Tensor
    v: Tensor
    u: Tensor
    steps: int
    kind: str
    curvature: Curvature


@work("nested-sustain/gradients", update=RESULT)
def gradients(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """Σ_i c_i ∇_y g_i at the points, and ∇_y f_i at each of them, [points, d_y]; each on one batch."""
    X, Y = shared
    inner = draw_batch(own_rows(shard), static.batch, draw.phase("inner"))
    outer = draw_batch(goal_rows(shard), static.batch, draw.phase("outer"))
    g = sum(c * shard.task.inner_gradient(X[i], Y[i], inner) for i, c in enumerate(static.inner_factors))
    b = [shard.task.outer_gradient(X[i], Y[i], outer) for i in range(static.points)]
    return g, torch.stack(b)


@work("nested-sustain/products", update=RESULT)
def products(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇²_yy g_i v at each point, on one batch: [points, d_y]."""
    X, Y, V = shared
    batch = draw_batch(own_rows(shard), static.batch, draw)
    return torch.stack([shard.task.inner_hvp(X[i], Y[i], V[i], batch) for i in range(len(V))])


@work("nested-sustain/hypergradients", update=RESULT)
def hypergradients(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """Σ_i c_i (∇_x f_i − ∇²_xy g_i p) at the points, each term on one batch."""
    X, Y, P = shared
    outer = draw_batch(goal_rows(shard), static.batch, draw.phase("outer"))
    inner = draw_batch(own_rows(shard), static.batch, draw.phase("inner"))
    task = shard.task
    return sum(
        c * (task.direct_gradient(X[i], Y[i], outer) - task.cross(X[i], Y[i], P[i], inner))
        for i, c in enumerate(static.factors)
    )


def nested_sustain(
    rule: StepRule,
    *,
    series_step: float | None,
    products_per_series: int,
    momentum: float,
    outer_momentum: float,
    batch: int | str,
    off: Mapping[str, tuple[Any, Any]] = MappingProxyType({}),
) -> Method:
    """SUSTAIN on a nested problem.

    Cost: k + 2 rounds per call of round.

    Args:
        rule: β and α.
        series_step: s; β if it is not given.
        products_per_series: k.
        momentum: 1 − η_g.
        outer_momentum: 1 − η_f.
        batch: rows per gradient, product and level.
        off: settings for client weights only, with the values that leave them off.
    """

    def init(problem: NestedProblem, n: int) -> NestedSustainState:
        check_two_levels(problem, "sustain")
        refuse_weights_only("sustain", **off)
        x, y = problem.start, problem.inner_start
        none = (torch.zeros_like(y), torch.zeros_like(x))
        return NestedSustainState(x, y, x, y, *none, 0, problem.task.kind, Curvature())

    def round(fed: Federation, s: NestedSustainState, draw: Draw) -> NestedSustainState:
        curvature = rule.estimated(fed, s)
        beta, alpha = rule.sizes(curvature)
        # the first iterate has no predecessor: its estimates are plain gradients
        keep, keep_x = (momentum, outer_momentum) if s.steps else (0.0, 0.0)
        two = keep > 0.0 or keep_x > 0.0
        X = torch.stack([s.x, s.x_before]) if two else s.x[None]
        Y = torch.stack([s.y, s.y_before]) if two else s.y[None]
        points = 2 if keep_x > 0.0 else 1
        inner: dict[str, Any] = {"inner_factors": (1.0, -keep)[: len(X)], "points": points}
        g, b = fed.mean(gradients, (X, Y), draw=draw.phase("inner"), batch=batch, **inner)
        draws = map(draw.phase("series").step, count())
        X, Y = X[:points], Y[:points]

        def matvec(V: Tensor) -> Tensor:
            found: Tensor = fed.mean(products, (X, Y, V), draw=next(draws), batch=batch)
            return found

        P = neumann(matvec, b, scale=1.0 / (series_step or beta), terms=products_per_series + 1)
        factors = (1.0, -keep_x)[:points]
        h = fed.mean(hypergradients, (X, Y, P), draw=draw.phase("cross"), batch=batch, factors=factors)
        v, u = g + keep * s.v, h + keep_x * s.u
        after = (s.x - alpha * u, s.y - beta * v)
        return NestedSustainState(*after, s.x, s.y, v, u, s.steps + 1, s.kind, curvature)

    return Method("sustain", init, round, rule.view, needs=frozenset({"nested"}))
