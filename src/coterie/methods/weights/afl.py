"""AFL (Mohri et al. 2019), Stochastic-AFL: a model for the worst mixture of clients, min_θ max_{w∈Δ} Σ_k w_k L_k(θ).

    θ ← θ − γ_θ (N/|A|) Σ_A w_k ∇L_k(θ),   w ← Π_Δ(w + γ_w (N/|A|) L_k(θ) on A, 0 elsewhere)

Theory is for the averages of all iterates (`output = "average"`); practice takes the last. No target is needed: AFL
guards against an unknown mixture, so it favours the clients that are hardest to fit, noise included.
"""

from typing import Literal, NamedTuple

from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.works import own_gradient, own_loss
from coterie.numerics import project_simplex, uniform
from coterie.settings import BatchSize, Positive


class AFLState(NamedTuple):
    """Model and weights, last and averaged over the steps taken."""

    theta: Tensor
    w: Tensor
    theta_mean: Tensor
    w_mean: Tensor
    steps: int


@work("afl/loss-and-gradient", update=RESULT)
def loss_and_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> tuple[Tensor, Tensor]:
    """L_k(θ) and ∇L_k(θ) on one batch."""
    return own_loss(shard, shared, static.batch, draw), own_gradient(shard, shared, static.batch, draw)


@validated
def afl(
    *,
    step: Positive = 0.05,
    outer_step: Positive = 0.005,
    output: Literal["last", "average"] = "last",
    batch: BatchSize = 64,
) -> Method:
    """Train one model for the worst mixture of the clients: a minimax game over the client weights.

    Symbols: γ_θ = step, γ_w = outer_step.

    Cost: 1 round per call of round; d + 1 numbers up per client.

    Args:
        outer_step: γ_w, step size of the ascent on the weights
        output: the last iterate, or the average of all iterates, for which the theory holds

    Example:
        >>> from coterie.methods import afl
        >>> afl(output="average").settings["output"]
        'average'
    """

    def init(problem: Problem, n: int) -> AFLState:
        theta, w = problem.start, uniform(n, like=problem.start)
        return AFLState(theta, w, theta, w, 0)

    def round(fed: Federation, s: AFLState, draw: Draw) -> AFLState:
        (L, G), ids = fed.gather(loss_and_gradient, s.theta, draw=draw.phase("batch"), batch=batch)
        r = fed.n / len(ids)
        theta = s.theta - step * r * s.w[ids] @ G
        w = project_simplex(s.w.index_add(0, ids, L, alpha=outer_step * r))
        t = s.steps + 1
        return AFLState(theta, w, s.theta_mean + (theta - s.theta_mean) / t, s.w_mean + (w - s.w_mean) / t, t)

    def view(s: AFLState) -> View:
        return View(s.theta, s.w) if output == "last" else View(s.theta_mean, s.w_mean)

    return Method("afl", init, round, view)
