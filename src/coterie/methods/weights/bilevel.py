"""Adaptively weighted nodes, Algorithm 3 (non-convex F): projected hypergradient descent on the client weights.

    θ ≈ argmin Σ w_k L_k   and   (Σ w_k ∇²L_k(θ)) h = ∇L_0(θ),   both by Local-SVRG;
    ∂F/∂w_k = −∇L_k(θ)ᵀh;   w ← Π_{Δ_b}(w − η ∂F)

Returns the last iterate (the theory returns a random one). Rounds per outer step: 2 (1 + ⌈T/τ⌉) + 1, and 2 more where
the outputs of Local-SVRG are averaged; exchanges with the target cost no round where the server holds its rows. `tie`
adds the penalty of methods/shared/ties.py to ∂F, also in the record.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import CURVATURE_AND_TARGET, Draw, Federation, Method, Problem, View, validated
from coterie.methods.baselines.local_svrg import SVRGSteps, check_cap, five_epochs, solve
from coterie.methods.shared.ties import tied
from coterie.methods.shared.works import goal_loss_and_gradient, own_rows
from coterie.numerics import project_capped_simplex, uniform
from coterie.settings import Count, NonNegative, Positive, Probability


class Hypergradient(NamedTuple):
    """∂F/∂w_k per client (0 without a reply), the model it belongs to, and the distance to the target
    Σ_k (L_0 − L_k)² at that model."""

    theta: Tensor
    gradient: Tensor
    distance: Tensor


class BilevelState(NamedTuple):
    """θ [d], w [K], the last hypergradient [K], and G: the largest statistical distance (eq. 9) met so far."""

    theta: Tensor
    w: Tensor
    gradient: Tensor
    G: Tensor


@work("bilevel/merit", update=RESULT, whole_pass=True)
def merit(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """−∇L_k(θ)ᵀh and L_k(θ), two numbers."""
    theta, h = shared
    rows = own_rows(shard)
    return -(shard.task.full_gradient(theta, rows) @ h), shard.task.full_loss(theta, rows)


def hypergradient(
    fed: Federation, theta: Tensor, w: Tensor, model: SVRGSteps, system: SVRGSteps, draw: Draw
) -> Hypergradient:
    """θ ≈ θ*(w) from the given start, then h, then −∇L_k(θ)ᵀh (eqs. 14 and 15)."""
    theta = solve(fed, "model", theta, w, model, draw.phase("model"))
    loss, goal = fed.ask_target(goal_loss_and_gradient, theta, draw=draw.phase("goal"))
    h = solve(fed, "system", goal, w, system, draw.phase("system"), constants=(theta, goal))
    (gradient, losses), ids = fed.gather(merit, (theta, h), draw=draw.phase("merit"))
    everyone = torch.zeros_like(w).index_copy(0, ids, gradient)
    return Hypergradient(theta, everyone, (losses - loss).square().sum().sqrt())


def record(gradient: Tensor, G: Tensor, w: Tensor, cap: float, step: float) -> dict[str, Any]:
    """More entries of the record: G, ∂F/∂w per client, and ‖w − Π(w − η∂F)‖/η."""
    moved = project_capped_simplex(w - step * gradient, cap)
    return {
        "statistical_distance": float(G),
        "gradient_mapping": float((w - moved).norm() / step),
        "hypergradient": [float(f"{g:.6g}") for g in gradient.tolist()],
    }


@validated
def bilevel(
    *,
    step: Positive = 0.05,
    system_step: Positive = 5e-4,
    outer_step: Positive = 0.02,
    local_steps: Count = 10,
    steps: Count | None = None,
    batch: Count = 50,
    refresh: Probability = 0.02,
    cap: Probability = 1 / 3,
    average: bool = False,
    convexity: NonNegative = 0.0,
    tie: NonNegative = 0.0,
) -> Method:
    """Learn client weights by projected descent along the hypergradient of the target's loss (Alg. 3).

    Symbols: γ = step, η = outer_step, τ = local_steps, T = steps, q = refresh, b = cap, μ = convexity.

    Cost: 2(1 + ⌈T/τ⌉) + 1 rounds per call of round (2 more with average), and 1 exchange with the target.

    Args:
        system_step: step size of Local-SVRG for the linear system that gives h
        outer_step: η, step size of the projected descent on the weights
        local_steps: τ, local steps between two averages
        steps: T, iterations of each Local-SVRG solve; five passes over the largest shard if not set
        batch: rows per corrected gradient
        refresh: q, probability per step that a client renews its anchor
        cap: b, largest weight of one client
        average: return the weighted average of Local-SVRG's iterates instead of the last one

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4)
        >>> friend, stranger = (x, x.sum(1)), (x, -x.sum(1))
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 1)
        >>> problem = coterie.Weighting.on([friend, stranger], friend, model=net, loss="squared")
        >>> method = coterie.methods.bilevel(steps=10, batch=4, cap=1.0, outer_step=0.1)
        >>> fit = coterie.fit(problem, method, rounds=2, mode="vmap")
        >>> bool(fit.weights[0] > fit.weights[1]), fit.history[-1]["communication"]["rounds"]
        (True, 10)
    """

    def init(problem: Problem, n: int) -> BilevelState:
        check_cap(cap, n)
        w = uniform(n, like=problem.start)
        return BilevelState(problem.start, w, torch.zeros_like(w), w.new_zeros(()))

    def round(fed: Federation, s: BilevelState, draw: Draw) -> BilevelState:
        T = steps or five_epochs(fed, batch)
        model = SVRGSteps(step, local_steps, refresh, T, batch, average, convexity)
        system = model._replace(step=system_step)
        found = hypergradient(fed, s.theta, s.w, model, system, draw)
        gradient = tied(found.gradient, s.w, tie)
        w = project_capped_simplex(s.w - outer_step * gradient, cap)
        return BilevelState(found.theta, w, gradient, torch.maximum(s.G, found.distance))

    def view(s: BilevelState) -> View:
        return View(s.theta, s.w, more=record(s.gradient, s.G, s.w, cap, outer_step))

    return Method("bilevel", init, round, view, needs=CURVATURE_AND_TARGET)
