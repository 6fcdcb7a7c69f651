"""The primal–dual method on nested problems: the saddle point of an augmented Lagrangian, without inverse Hessians.

    L_x(y, λ) = f(x, y) + λᵀ∇_y g(x, y) + Γ g(x, y)

At its saddle point ∇_y g = 0 and λ = −[∇²_yy g]⁻¹∇_y f, so ∇_x f + ∇²_xy g λ is the hypergradient. K times

    y ← y − η_y (∇_y f + ∇²_yy g λ + Γ ∇_y g)        λ ← Π_{‖λ‖≤D}(λ + η_λ ∇_y g)

then x ← x − γ (∇_x f + ∇²_xy g λ), with the y and λ that the K-th replies were for. One exchange per step brings all
three. This is the method of methods/weights/primal_dual.py with Σ_k w_k L_k as g and w as x; the paper has that case.
The record has both residuals: `primal_residual` ‖∇_y g‖ and `dual_residual` ‖∇_y f + ∇²_yy g λ‖.

Steps that are not set follow the curvatures of steps.py: η_y = 1/(L_f + ΓL), η_λ = (L_f + ΓL)/(2L²), with which λ
settles within about 2κ²(L_f + Γμ)/(L_f + ΓL) steps, by which γ is divided.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.methods.base import Draw, Federation, Method, View
from coterie.methods.nested.coupled import check_two_levels
from coterie.methods.nested.steps import Curvature, StepRule, indirect
from coterie.methods.nested.works import joint_directions
from coterie.methods.shared.kinds import refuse_weights_only
from coterie.numerics import project_ball
from coterie.problems.nested import NestedProblem


class NestedPrimalDualState(NamedTuple):
    """Outer x, inner y, λ, the kind of problem, the estimates for the steps, outer steps taken, and both residuals."""

    x: Tensor
    y: Tensor
    lam: Tensor
    kind: str
    curvature: Curvature
    steps: int
    residuals: Tensor


class SaddleSteps(NamedTuple):
    """η_y, η_λ and γ where they are given, Γ, D, K and the number of rounds that leave x alone."""

    step: float | None
    dual_step: float | None
    outer_step: float | None
    augmentation: float
    radius: float
    local_steps: int
    warmup: int

    def sizes(self, c: Curvature) -> tuple[float, float, float]:
        """η_y, η_λ and γ."""
        if self.step and self.dual_step and self.outer_step:
            return self.step, self.dual_step, self.outer_step
        stiff = c.goal + self.augmentation * c.inner
        settling = 2.0 * c.condition**2 * (c.goal + self.augmentation * c.inner / c.condition) / stiff
        step, dual = self.step or 1.0 / stiff, self.dual_step or stiff / (2.0 * c.inner**2)
        return step, dual, self.outer_step or 1.0 / ((1.0 + settling / self.local_steps) * c.outer)


def nested_primal_dual(
    saddle: SaddleSteps, *, batch: int | str, off: Mapping[str, tuple[Any, Any]] = MappingProxyType({})
) -> Method:
    """The saddle-point method on a nested problem.

    Cost: K rounds per call of round; 2 d_y + d_x numbers up per client in each.

    Args:
        saddle: steps and constants.
        batch: rows per direction and level.
        off: settings for client weights only, with the values that leave them off.
    """
    given = (saddle.step, saddle.dual_step, saddle.outer_step)
    rule = StepRule("auto" if None in given else 1.0, 1.0)

    def init(problem: NestedProblem, n: int) -> NestedPrimalDualState:
        check_two_levels(problem, "primal-dual")
        refuse_weights_only("primal-dual", **off)
        x, y = problem.start, problem.inner_start
        kind, none = problem.task.kind, x.new_zeros(2)
        return NestedPrimalDualState(x, y, indirect(kind, y), kind, Curvature(), 0, none)

    def round(fed: Federation, s: NestedPrimalDualState, draw: Draw) -> NestedPrimalDualState:
        curvature = rule.estimated(fed, s)
        step, dual, gamma = saddle.sizes(curvature)
        x, y, lam, residuals = s.x, s.y, s.lam, s.residuals
        h = torch.zeros_like(x)
        for k in range(saddle.local_steps):
            d_y, d_v, h = fed.mean(joint_directions, (x, y, lam), draw=draw.step(k), batch=batch)
            residuals = torch.stack([d_y.norm(), d_v.norm()])
            if len(lam):
                y = y - step * (d_v + saddle.augmentation * d_y)
                lam = project_ball(lam + dual * d_y, saddle.radius)
            else:  # a minimax problem: the constraint has no multiplier
                y = y - step * saddle.augmentation * d_y
        if s.steps >= saddle.warmup:
            x = x - gamma * h
        return NestedPrimalDualState(x, y, lam, s.kind, curvature, s.steps + 1, residuals)

    def view(s: NestedPrimalDualState) -> View:
        primal, dual = s.residuals.tolist()
        return View(s.x, inner=s.y, more={"primal_residual": primal, "dual_residual": dual})

    return Method("primal-dual", init, round, view, needs=frozenset({"nested"}))
