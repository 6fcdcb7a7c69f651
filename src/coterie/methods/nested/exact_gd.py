"""GD on nested problems by the exact hypergradient, with a dense Hessian. The yardstick for small inner problems.

    H = mean ∇²_yy g_i(x, y),    x ← x − γ (∇_x f − ∇²_xy g H⁻¹∇_y f)    after K inner steps on y:
    newton  y ← y − H⁻¹∇_y g(x, y)        gradient  y ← y − ρ ∇_y g(x, y)

Newton steps bring y to y*(x), so that the hypergradient is exact. The form for client weights is in
methods/weights/exact_gd.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from coterie.errors import RunError, UsageError
from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method
from coterie.methods.nested.coupled import check_two_levels
from coterie.methods.nested.steps import Curvature, StepRule
from coterie.methods.nested.works import hypergradient
from coterie.methods.shared.kinds import refuse_weights_only
from coterie.methods.shared.works import draw_batch, goal_rows, own_rows
from coterie.problems.nested import NestedProblem


class NestedExactState(NamedTuple):
    """Outer x, inner y, the kind of problem, and the estimates for the steps."""

    x: Tensor
    y: Tensor
    kind: str
    curvature: Curvature


@work("nested-exact/gradient", update=RESULT)
def gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇_y g_i."""
    x, y = shared
    return shard.task.inner_gradient(x, y, draw_batch(own_rows(shard), static.batch, draw))


@work("nested-exact/gradient-and-hessian", update=RESULT)
def gradient_and_hessian(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """∇_y g_i, or ∇_y f_i where static.goal, and ∇²_yy g_i, static.columns of its rows at a time."""
    x, y = shared
    task, batch = shard.task, draw_batch(own_rows(shard), static.batch, draw.phase("inner"))
    basis = torch.eye(len(y), dtype=y.dtype, device=y.device)
    H = vmap(lambda e: task.inner_hvp(x, y, e, batch), chunk_size=static.columns)(basis)
    if static.goal:
        return task.outer_gradient(x, y, draw_batch(goal_rows(shard), static.batch, draw.phase("outer"))), H
    return task.inner_gradient(x, y, batch), H


def nested_exact_gd(
    rule: StepRule,
    *,
    newton: bool,
    damping: float,
    columns: int,
    batch: int | str,
    limit: int,
    target_batch: int | str = "all",
    tie: float = 0.0,
) -> Method:
    """Exact hypergradient descent on a nested problem.

    Cost: K + 2 rounds per call of round; d_y² numbers up per client for each Hessian.

    Args:
        rule: ρ and γ, and K inner steps.
        newton: whether inner steps are Newton's.
        damping: added to the diagonal of the Hessian before it is inverted.
        columns: Hessian products that a client computes at once.
        batch: rows per gradient and Hessian.
        limit: the largest d_y.
        target_batch: for client weights only.
        tie: for client weights only.
    """
    static: dict[str, Any] = {"batch": batch, "columns": columns}

    def init(problem: NestedProblem, n: int) -> NestedExactState:
        check_two_levels(problem, "exact-gd")
        refuse_weights_only("exact-gd", target_batch=(target_batch, "all"), tie=(tie, 0.0))
        if (d := len(problem.inner_start)) > limit:
            raise UsageError(
                f"exact-gd inverts a dense Hessian; the inner variable has {d:,} numbers, more than the {limit:,} it "
                "takes. Use soba, fednest or primal-dual, or a smaller inner problem."
            )
        return NestedExactState(problem.start, problem.inner_start, problem.task.kind, Curvature())

    def solved(b: Tensor, H: Tensor) -> Tensor:
        try:
            return torch.linalg.solve(H + damping * torch.eye(len(b), dtype=b.dtype, device=b.device), b)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raise RunError(
                "exact-gd met a singular Hessian: the inner loss does not fix y. Give it a ridge, or set "
                "method.damping (for example 1e-3), which adds that much to the diagonal."
            ) from None

    def round(fed: Federation, s: NestedExactState, draw: Draw) -> NestedExactState:
        curvature = rule.estimated(fed, s)
        rho, gamma = rule.sizes(curvature)
        x, y = s.x, s.y
        for k in range(rule.inner_steps):
            at = draw.phase("inner").step(k)
            if newton:
                y = y - solved(*fed.mean(gradient_and_hessian, (x, y), draw=at, goal=False, **static))
            else:
                y = y - rho * fed.mean(gradient, (x, y), draw=at, batch=batch)
        at = draw.phase("outer")
        p = solved(*fed.mean(gradient_and_hessian, (x, y), draw=at.phase("system"), goal=True, **static))
        h = fed.mean(hypergradient, (x, y, p), draw=at, batch=batch)
        return NestedExactState(x - gamma * h, y, s.kind, curvature)

    return Method("exact-gd", init, round, rule.view, needs=frozenset({"nested"}))
