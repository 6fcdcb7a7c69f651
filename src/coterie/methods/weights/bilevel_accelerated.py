"""Adaptively weighted nodes, Algorithm 2 (convex F): accelerated bilevel approximation (Ghadimi and Wang 2018).

    w_md = 2/(s+2) w + s/(s+2) w_ag;   ∂F at w_md as in Algorithm 3;
    w ← Π(w − η(s+1)/4 ∂F);   w_ag ← Π(w_md − η ∂F)

The step η(s+1)/4 is what line 13's proximal term 2/(η(s+1))‖w − w_s‖² gives. Returns w_ag. Rounds as in Algorithm 3.

Theorem 3's inner solves (`schedule = "theorem"`) are Theorem 4's of `bilevel`, with (s+1)⁴ and (s+1)² for (s+1)² and
s+1.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coterie.methods.base import CURVATURE_AND_TARGET, Draw, Federation, Method, Problem, View, validated
from coterie.methods.baselines.local_svrg import SVRGSteps, check_cap, five_epochs
from coterie.methods.shared.ties import tied
from coterie.methods.weights.bilevel import check_schedule, grown, hypergradient, record
from coterie.numerics import project_capped_simplex, uniform
from coterie.settings import Count, NonNegative, Positive, Probability


class AcceleratedState(NamedTuple):
    """θ [d], the two weight sequences [K], the outer step s, the last hypergradient [K], G (eq. 9), and the gradient
    mapping at w_md of the last step."""

    theta: Tensor
    w: Tensor
    w_ag: Tensor
    s: int
    gradient: Tensor
    G: Tensor
    mapping: Tensor = torch.zeros(())


@validated
def bilevel_accelerated(
    *,
    step: Positive = 0.05,
    system_step: Positive = 5e-4,
    outer_step: Positive = 0.02,
    local_steps: Count = 10,
    steps: Count | None = None,
    batch: Count = 50,
    refresh: Probability = 0.02,
    cap: Probability = 1.0,
    average: bool = False,
    convexity: NonNegative = 0.0,
    schedule: Literal["fixed", "theorem"] = "fixed",
    constant: Positive = 1.0,
    tie: NonNegative = 0.0,
) -> Method:
    """Learn client weights by accelerated hypergradient descent, for objectives convex in the weights (Alg. 2).

    Symbols: γ = step, η = outer_step, τ = local_steps, T = steps, q = refresh, b = cap, μ = convexity.

    Cost: 2(1 + ⌈T/τ⌉) + 1 rounds per call of round (2 more with average), and 1 exchange with the target.

    Args:
        system_step: step size of Local-SVRG for the linear system that gives h
        outer_step: η, step size on the weights; the second sequence moves by η(s + 1)/4 in outer step s
        local_steps: τ, local steps between two averages
        steps: T, iterations of each Local-SVRG solve; five passes over the largest shard if not set
        batch: rows per corrected gradient
        refresh: q, probability per step that a client renews its anchor
        cap: b, largest weight of one client; 1 leaves the weights on the whole simplex, as the other methods do
        average: return the weighted average of Local-SVRG's iterates instead of the last one
        schedule: theorem lets T and γ of the inner solves change from outer step to outer step as Theorem 3 has it
        constant: A, the constants of that theorem together

    Example:
        >>> from coterie.methods import bilevel_accelerated
        >>> bilevel_accelerated().name
        'bilevel-accelerated'
    """

    check_schedule(schedule, convexity)

    def init(problem: Problem, n: int) -> AcceleratedState:
        check_cap(cap, n)
        w, none = uniform(n, like=problem.start), problem.start.new_zeros(())
        return AcceleratedState(problem.start, w, w, 0, torch.zeros_like(w), none, none)

    def round(fed: Federation, state: AcceleratedState, draw: Draw) -> AcceleratedState:
        s = state.s
        T = steps or five_epochs(fed, batch)
        model = SVRGSteps(step, local_steps, refresh, T, batch, average, convexity)
        system = model._replace(step=system_step)
        if schedule == "theorem":
            model, system = (grown(solver, s, 4, constant) for solver in (model, system))
        w_md = 2 / (s + 2) * state.w + s / (s + 2) * state.w_ag
        found = hypergradient(fed, state.theta, w_md, model, system, draw)
        gradient = tied(found.gradient, w_md, tie)
        w = project_capped_simplex(state.w - outer_step * (s + 1) / 4 * gradient, cap)
        w_ag = project_capped_simplex(w_md - outer_step * gradient, cap)
        G = torch.maximum(state.G, found.distance)
        mapping = (w_md - w_ag).norm() / outer_step
        return AcceleratedState(found.theta, w, w_ag, s + 1, gradient, G, mapping)

    def view(state: AcceleratedState) -> View:
        return View(state.theta, state.w_ag, more=record(state.gradient, state.G, state.mapping))

    return Method("bilevel-accelerated", init, round, view, needs=CURVATURE_AND_TARGET)
