"""RFHO (Franceschi et al. 2017, forward mode) on nested problems: differentiate through the inner steps themselves.

The iteration y ← y − ρ ∇_y g(x, y) is followed by Z = ∂y/∂x, one row per coordinate of x, [d_x, d_y]:

    Z_j ← Z_j − ρ (∇²_yy g(x, y) Z_j + ∂_{x_j} ∇_y g(x, y)),     both on the rows that moved y

After K steps x ← x − γ (∇_x f + Z ∇_y f). With `carry` (the real-time variant) Z is kept from outer step to outer step
and tends to the exact derivative; without, it starts at 0 and covers the last K steps only. Everything is a mean over
the clients. This is the paper's own setting; methods/weights/rfho.py is its form for client weights.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from coterie.errors import UsageError
from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method
from coterie.methods.nested.coupled import check_two_levels
from coterie.methods.nested.steps import Curvature, StepRule
from coterie.methods.shared.kinds import refuse_weights_only
from coterie.methods.shared.works import draw_batch, goal_rows, own_rows
from coterie.problems.nested import NestedProblem

LIMIT = 4_000_000
"""The largest d_x d_y: Z is moved up and down in every inner step."""


class NestedRFHOState(NamedTuple):
    """Outer x, inner y, Z = ∂y/∂x [d_x, d_y], the kind of problem, and the estimates for the steps."""

    x: Tensor
    y: Tensor
    Z: Tensor
    kind: str
    curvature: Curvature


@work("nested-rfho/gradient-and-derivatives", update=RESULT)
def gradient_and_derivatives(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """∇_y g_i, and ∇²_yy g_i Z_j + ∂_{x_j} ∇_y g_i for every row j, all on one batch."""
    x, y, Z = shared
    task, batch = shard.task, draw_batch(own_rows(shard), static.batch, draw)
    basis = torch.eye(len(y), dtype=y.dtype, device=y.device)
    mixed = vmap(lambda e: task.cross(x, y, e, batch), chunk_size=static.columns)(basis).T
    pushed = vmap(lambda z: task.inner_hvp(x, y, z, batch), chunk_size=static.columns)(Z)
    return task.inner_gradient(x, y, batch), pushed + mixed


@work("nested-rfho/goal-gradients", update=RESULT)
def goal_gradients(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """∇_x f_i and ∇_y f_i."""
    x, y = shared
    batch = draw_batch(goal_rows(shard), static.batch, draw)
    return shard.task.direct_gradient(x, y, batch), shard.task.outer_gradient(x, y, batch)


def nested_rfho(
    rule: StepRule,
    *,
    carry: bool,
    columns: int,
    batch: int | str,
    off: Mapping[str, tuple[Any, Any]] = MappingProxyType({}),
) -> Method:
    """Forward-mode hypergradient descent on a nested problem.

    Cost: K + 1 rounds per call of round; K (d_x + 1) d_y + d_x + d_y numbers up per client.

    Args:
        rule: ρ and γ, and K inner steps.
        carry: whether Z is kept from round to round.
        columns: products that a client computes at once.
        batch: rows per gradient, product and level.
        off: settings for client weights only, with the values that leave them off.
    """
    static: dict[str, Any] = {"batch": batch, "columns": columns}

    def init(problem: NestedProblem, n: int) -> NestedRFHOState:
        check_two_levels(problem, "rfho")
        refuse_weights_only("rfho", **off)
        x, y = problem.start, problem.inner_start
        if (size := len(x) * len(y)) > LIMIT:
            raise UsageError(
                f"rfho moves ∂y/∂x in every step; {len(x):,} × {len(y):,} = {size:,} numbers are more than the "
                f"{LIMIT:,} it takes. Use soba, fednest or primal-dual, or smaller variables."
            )
        return NestedRFHOState(x, y, x.new_zeros(len(x), len(y)), problem.task.kind, Curvature())

    def round(fed: Federation, s: NestedRFHOState, draw: Draw) -> NestedRFHOState:
        curvature = rule.estimated(fed, s)
        rho, gamma = rule.sizes(curvature)
        x, y = s.x, s.y
        Z = s.Z if carry else torch.zeros_like(s.Z)
        for k in range(rule.inner_steps):
            at = draw.phase("inner").step(k)
            g, change = fed.mean(gradient_and_derivatives, (x, y, Z), draw=at, **static)
            y, Z = y - rho * g, Z - rho * change
        f_x, f_y = fed.mean(goal_gradients, (x, y), draw=draw.phase("goal"), batch=batch)
        return NestedRFHOState(x - gamma * (f_x + Z @ f_y), y, Z, s.kind, curvature)

    return Method("rfho", init, round, rule.view, needs=frozenset({"nested"}))
