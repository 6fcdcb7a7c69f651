"""SUSTAIN (Khanduri et al. 2021), Algorithm 1, for the weighting problem: one loop, recursive momentum on both levels.

    v ← ∇_θ g(θ, w; ζ) + (1 − η_g)(v − ∇_θ g(θ', w'; ζ)),   θ⁺ = θ − β v,          g = Σ_k w_k L_k
    u ← ∇̄F(θ, w; ξ)  + (1 − η_f)(u − ∇̄F(θ', w'; ξ)),       w⁺ = Π_Δ(w − α u),     ∇̄F_k = −∇L_k(θ)ᵀp
    p = s Σ_{n≤k} (I − sH)ⁿ ∇L_0(θ),   one batch ξ_n per product; θ', w' are the previous iterate, on the same batches.

Nested problems, the paper's own setting: nested/sustain.py.

Deviations: the series is summed, not cut at a random length; steps and momenta are constant; w is projected, because
the weighting problem is constrained. Sums over clients are (N/|A|) Σ_A, so that absent clients leave no bias; clients
of weight 0, which would add nothing, are asked for their slope only (`ask = "all"` asks them all the same).

Traffic: the paper on primal–dual weighting counts (k+1)d numbers up, which is exact (and one scalar more) with
`weight_momentum = 0`. Recursive momentum on w needs the series at the previous point too: (2k+1)d.
"""

from itertools import count
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.federation import RESULT, Each, Shard, Static, Tree, Work, work
from coterie.methods.base import CURVATURE_AND_TARGET, Draw, Federation, Method, Problem, View, validated
from coterie.methods.nested.steps import StepRule
from coterie.methods.nested.sustain import NestedSustainState, nested_sustain
from coterie.methods.shared.hessian import Ask, asked
from coterie.methods.shared.kinds import either
from coterie.methods.shared.ties import tied
from coterie.methods.shared.works import goal_gradient, own_gradient, own_product
from coterie.numerics import neumann, project_simplex, uniform
from coterie.settings import BatchSize, Count, NonNegative, Positive

Momentum = Annotated[float, Field(ge=0.0, lt=1.0)]


class SustainState(NamedTuple):
    """Model and weights, now and one step before; the momentum estimates of both gradients; steps taken."""

    theta: Tensor
    w: Tensor
    theta_before: Tensor
    w_before: Tensor
    v: Tensor
    u: Tensor
    steps: int


@work("sustain/combined-gradient", update=RESULT)
def combined_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """Σ_i c_i ∇L_k(θ_i), all on one batch."""
    points, c = shared
    return sum(c[i] * own_gradient(shard, points[i], static.batch, draw) for i in range(len(points)))


@work("sustain/weighted-products", update=RESULT)
def weighted_products(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """w_i ∇²L_k(θ_i) v_i for each point i, all on one batch: [points, d]."""
    points, V, w = shared
    hv = [own_product(shard, points[i], V[i], static.batch, draw) for i in range(len(points))]
    return w[:, None] * torch.stack(hv)


@work("sustain/slope", update=RESULT)
def slope(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """Σ_i ∇L_k(θ_i)ᵀ q_i, all on one batch: one number."""
    points, Q = shared
    return sum(own_gradient(shard, points[i], static.batch, draw) @ Q[i] for i in range(len(points)))


@validated
def sustain(
    *,
    step: Positive | None = None,
    outer_step: Positive | None = None,
    series_step: Positive | None = None,
    local_steps: Count = 1,
    momentum: Momentum = 0.5,
    weight_momentum: Momentum = 0.5,
    ask: Ask = "weighted",
    batch: BatchSize = 64,
    target_batch: BatchSize = "all",
    tie: NonNegative = 0.0,
) -> Method:
    """Move model and weights, or both levels of a nested problem, in one loop with recursive momentum on both.

    Symbols: β = step, α = outer_step, s = series_step, k = local_steps, 1 − η_g = momentum, 1 − η_f = weight_momentum.

    Cost: k + 2 rounds per call of round, and 2 exchanges with the target (1 without weight_momentum).

    Steps of nested problems that are not set take at most 43 exchanges more, once.

    Args:
        step: β, step size of the model or the inner variable; 0.05 if not set, by the curvature of nested problems
        outer_step: α, step size of the weights or the outer variable; 0.005 if not set, by the curvature of nested
            problems
        series_step: s, step size of the series for the inverse Hessian, at most 1/ℓ; 0.05 if not set, that of the inner
            variable on nested problems
        local_steps: k, Hessian products in the series
        momentum: 1 − η_g, momentum of the model's gradient; 0 is plain SGD
        weight_momentum: 1 − η_f, momentum of the hypergradient; 0 halves the exchanges

    Example:
        >>> from coterie.methods import sustain
        >>> sustain().name
        'sustain'
    """

    def init(problem: Problem, n: int) -> SustainState:
        theta, w = problem.start, uniform(n, like=problem.start)
        return SustainState(theta, w, theta, w, torch.zeros_like(theta), torch.zeros_like(w), 0)

    def round(fed: Federation, s: SustainState, draw: Draw) -> SustainState:
        # the first iterate has no predecessor: its estimates are plain gradients
        keep, keep_w = (momentum, weight_momentum) if s.steps else (0.0, 0.0)
        weighted = asked(fed, s.w + s.w_before, ask)

        def total(work: Work, shared: Tree, like: Tensor, at: Draw) -> Tensor:
            """(N/|A|) Σ_A of a work's results, which have weights as factors."""
            if not len(weighted.ids):
                return torch.zeros_like(like)
            return fed.n / len(fed.ids) * len(weighted.ids) * weighted.mean(work, shared, draw=at, batch=batch)

        points, weights = _points(s, keep)
        c = weights * weights.new_tensor([1.0, -keep])[: len(points), None]
        v = keep * s.v + total(combined_gradient, (points, Each(c.T)), s.v, draw.phase("inner"))

        points, weights = _points(s, keep_w)
        goal = draw.phase("target")
        b = torch.stack([fed.ask_target(goal_gradient, theta, draw=goal, batch=target_batch) for theta in points])
        draws = map(draw.phase("series").step, count())

        def matvec(V: Tensor) -> Tensor:
            return total(weighted_products, (points, V, Each(weights.T)), V, next(draws))

        p = neumann(matvec, b, scale=1.0 / (series_step or 0.05), terms=local_steps + 1)
        q = p * p.new_tensor([-1.0, keep_w])[: len(points), None]
        g, ids = fed.gather(slope, (points, q), draw=draw.phase("cross"), batch=batch)
        u = (keep_w * s.u).index_add(0, ids, g, alpha=fed.n / len(ids))
        w = project_simplex(s.w - (outer_step or 0.005) * tied(u, s.w, tie))
        return SustainState(s.theta - (step or 0.05) * v, w, s.theta, s.w, v, u, s.steps + 1)

    weights = Method("sustain", init, round, lambda s: View(s.theta, s.w), needs=CURVATURE_AND_TARGET)
    nested = nested_sustain(
        StepRule(step or "auto", outer_step or "auto", averaging=1.0 - weight_momentum),
        series_step=series_step,
        products_per_series=local_steps,
        momentum=momentum,
        outer_momentum=weight_momentum,
        batch=batch,
        off={"target_batch": (target_batch, "all"), "tie": (tie, 0.0)},
    )
    return either(weights, nested, NestedSustainState)


def _points(s: SustainState, keep: float) -> tuple[Tensor, Tensor]:
    """The iterates to evaluate, [points, d] and [points, N]: the current one, and the previous one for momentum."""
    if keep == 0.0:
        return s.theta[None], s.w[None]
    return torch.stack([s.theta, s.theta_before]), torch.stack([s.w, s.w_before])
