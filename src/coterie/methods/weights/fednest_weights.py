"""FedNest on the weighting problem: the inner variable is the model θ, the outer one the client weights w.

    T times  θ ← FedInn with weights w:   q = Σ w_k ∇L_k(θ),  θ_k ← θ_k − β_k (∇L_k(θ_k) − ∇L_k(θ) + q),  θ = Σ w_k θ_k
             p ≈ (Σ w_k ∇²L_k)⁻¹ ∇L_0(θ)                        Alg. 3 with the weighted Hessian
             w ← Π(w + α (∇L_k(θ)ᵀp)_k)                         ∂F/∂w_k = −∇L_k(θ)ᵀp, one number per client

∇f has no part that clients could evaluate alone at other w, so FedOut's local steps reduce to one projected step.
With a partial active set weight moves among the active clients only; the others keep theirs. `ask = "weighted"` asks
clients of weight 0 for their slope alone: to weighted means they add nothing. `tie` adds the penalty of
methods/shared/ties.py to the slopes of the active clients. `redraw` draws the clients of each FedInn, of each S_n of
Alg. 3 and of the slopes anew: with the same ones throughout, p and the slopes err in the same direction.
"""

from typing import NamedTuple

from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import RESULT, Shard, Static, Tree, moved_from, work
from coterie.methods.base import CURVATURE_AND_TARGET, Draw, Federation, Method, Problem, View, validated
from coterie.methods.nested.phases import Inverse, Series, StepCounts, clients_of, product_draws, solve, stepped
from coterie.methods.nested.works import step_size, within
from coterie.methods.shared.hessian import Ask, asked
from coterie.methods.shared.ties import tied
from coterie.methods.shared.works import LocalSteps, goal_gradient, gradient, own_gradient, own_product
from coterie.numerics import project_capped_simplex, uniform
from coterie.settings import BatchSize, Count, NonNegative, Positive, Probability


class FedNestWeights(NamedTuple):
    """The common model [d] and the client weights [K], on the capped simplex."""

    theta: Tensor
    w: Tensor


@validated
def fednest_weights(
    *,
    step: Positive = 0.5,
    outer_step: NonNegative = 0.1,
    inner_rounds: Count = 1,
    local_steps: StepCounts = 5,
    terms: Count = 5,
    lipschitz: Positive = 10.0,
    series: Series = "deterministic",
    batch: BatchSize = 64,
    anchor: BatchSize = "all",
    cap: Probability = 1.0,
    ask: Ask = "all",
    tie: NonNegative = 0.0,
    redraw: bool = False,
) -> Method:
    """Run FedNest with the client weights as outer variable and the model as inner variable.

    Symbols: α = outer_step, β = step, T = inner_rounds, N = terms, ℓ = lipschitz, τ = local_steps.

    Cost: 2T + N + 1 rounds per call of round, and 1 exchange with the target.

    Args:
        step: β, total step size of the corrected local steps; each has size β/τ
        outer_step: α, step size of the projected descent on the weights; 0 keeps the weights
        local_steps: τ, local steps per inner round: one number, or one per client
        anchor: rows of every global quantity: gradients, Hessian products, slopes

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4)
        >>> friend, stranger = (x, x.sum(1)), (x, -x.sum(1))
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 1)
        >>> problem = coterie.Weighting.on([friend, stranger], friend, model=net, loss="squared")
        >>> method = coterie.methods.fednest_weights(lipschitz=2.0, batch="all")
        >>> fit = coterie.fit(problem, method, rounds=2, mode="vmap")
        >>> bool(fit.weights[0] > fit.weights[1]), fit.history[-1]["communication"]["rounds"]
        (True, 16)
    """
    local, inverse = LocalSteps(step, local_steps, batch), Inverse(series, terms, lipschitz, anchor, redraw)

    def init(problem: Problem, n: int) -> FedNestWeights:
        if cap * n < 1.0:
            raise UsageError(
                f"method.cap = {cap:g} leaves no weights of {n} clients that sum to 1; give ≥ {1 / n:.3g}."
            )
        if isinstance(local.steps, list) and len(local.steps) != n:
            raise UsageError(f"method.local_steps lists {len(local.steps)} numbers for {n} clients; give {n}, or one.")
        return FedNestWeights(problem.start, uniform(n, like=problem.start))

    def round(fed: Federation, s: FedNestWeights, draw: Draw) -> FedNestWeights:
        theta = s.theta
        for t in range(inner_rounds):
            at = draw.phase("inner").step(t)
            weighted = asked(clients_of(fed, redraw, at), s.w, ask)
            q = weighted.mean(gradient, theta, weights=s.w, draw=at.phase("anchor"), batch=anchor)
            theta = stepped(weighted, corrected_steps, (theta, q), local, at, weights=s.w)
        if outer_step == 0.0:
            return FedNestWeights(theta, s.w)
        return FedNestWeights(theta, _weights_step(fed, theta, s.w, draw.phase("outer")))

    def _weights_step(fed: Federation, theta: Tensor, w: Tensor, draw: Draw) -> Tensor:
        b = fed.ask_target(goal_gradient, theta, draw=draw.phase("goal"), batch=inverse.batch)
        draws = product_draws(inverse, draw)

        def product(v: Tensor) -> Tensor:  # Σ w_k ∇²L_k(θ) v
            at = next(draws)
            weighted = asked(clients_of(fed, redraw, at), w, ask)
            return weighted.mean(own_hessian_product, (theta, v), weights=w, draw=at, batch=inverse.batch)

        p, at = solve(product, b, inverse, draw), draw.phase("slope")
        slopes, ids = clients_of(fed, redraw, at).gather(slope, (theta, p), draw=at, batch=inverse.batch)
        active = w[ids].sum()
        moved = (w[ids] - outer_step * tied(slopes, w[ids], tie)) / active
        return w.index_copy(0, ids, active * project_capped_simplex(moved, max(cap / float(active), 1.0 / len(ids))))

    return Method("fednest-weights", init, round, lambda s: View(s.theta, s.w), needs=CURVATURE_AND_TARGET)


@work("fednest-weights/corrected-steps", update=moved_from(0))
def corrected_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """θ_k ← θ_k − β_k (∇L_k(θ_k; ζ) − ∇L_k(θ; ζ) + q), the same ζ in both terms."""
    theta, q, tau = shared
    beta = step_size(static, tau, theta)
    theta_k = theta - beta * q  # at ν = 0 the two terms are the same
    for nu in range(1, static.steps):
        g_k, g_0 = (own_gradient(shard, point, static.batch, draw.step(nu)) for point in (theta_k, theta))
        theta_k = within(nu, tau, theta_k - beta * (g_k - g_0 + q), theta_k)
    return theta_k


@work("fednest-weights/hessian-product", update=RESULT)
def own_hessian_product(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇²L_k(θ) v."""
    theta, v = shared
    return own_product(shard, theta, v, static.batch, draw)


@work("fednest-weights/slope", update=RESULT)
def slope(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∂F/∂w_k = −∇L_k(θ)ᵀp, one number."""
    theta, p = shared
    return -own_gradient(shard, theta, static.batch, draw) @ p
