"""Adaptively weighted nodes, Algorithm 3 (non-convex F): projected hypergradient descent on the client weights.

    θ ≈ argmin Σ w_k L_k   and   (Σ w_k ∇²L_k(θ)) h = ∇L_0(θ),   both by Local-SVRG;
    ∂F/∂w_k = −∇L_k(θ)ᵀh;   w ← Π_{Δ_b}(w − η ∂F)

Returns the last iterate, or with `output = "random"` one drawn uniformly from all of them, as the theory does. Rounds
per outer step: 2 (1 + ⌈T/τ⌉) + 1, and 2 more where the outputs of Local-SVRG are averaged; exchanges with the target
cost no round where the server holds its rows. `tie` adds the penalty of methods/shared/ties.py to ∂F, also in the
record.

Defaults: γ = 0.05 for the model and 5e-4 for the system, τ = 10, q = 0.02, T = five passes and η = 0.02 are the
paper's, for networks. Where none of them is set, the loss is quadratic and all clients participate, they follow the
curvature L and the condition κ of the clients' losses, estimated in one exchange before the first step: γ = 1/(2L) for
both solves, τ = 1 (local steps of clients that differ would leave a bias), q = 1, T = 4κ between 20 and 100, and η by
spectral steps (spectral.py).

The cap b is not set by default, so that the problem is that of the other methods, w on the whole simplex; the paper's
experiments have b = 1/3.

Theorem 4 lets the inner solves grow with the outer step s (`schedule = "theorem"`), with A for its constants:

    τ = 1:  T_s = ln(A (s+1)²/γ) / (γμ)          τ > 1:  M_s = max{1/γ, (s+1) √A},  γ_s = 1/M_s,  T_s = M_s ln(M_s³)/μ
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import CURVATURE_AND_TARGET, Draw, Federation, Method, Problem, View, validated
from coterie.methods.baselines.local_svrg import SVRGSteps, check_cap, five_epochs, solve
from coterie.methods.shared.curvature import Curvatures, constant, curvatures
from coterie.methods.shared.ties import tied
from coterie.methods.shared.works import goal_loss_and_gradient, own_rows
from coterie.methods.weights.spectral import Spectral, advance, spectral
from coterie.numerics import project_capped_simplex, uniform
from coterie.numerics.roots import square_root
from coterie.settings import Count, NonNegative, Positive, Probability

OUTER_STEP = 0.02


class Hypergradient(NamedTuple):
    """∂F/∂w_k per client (0 without a reply), the model it belongs to, the distance to the target Σ_k (L_0 − L_k)² and
    L_0 at that model, and whether every client replied."""

    theta: Tensor
    gradient: Tensor
    distance: Tensor
    loss: Tensor
    complete: bool


class BilevelState(NamedTuple):
    """θ [d], w [K], the last hypergradient [K], G: the largest statistical distance (eq. 9) met so far, the gradient
    mapping of the last step, outer steps taken, the iterate (θ, w) drawn from all of them, where one is, the curvature
    of quadratic losses, and the last good weights of spectral steps."""

    theta: Tensor
    w: Tensor
    gradient: Tensor
    G: Tensor
    mapping: Tensor
    steps: int
    kept: tuple[Tensor, ...]
    curvature: Curvatures
    spectral: Spectral


@work("bilevel/merit", update=RESULT, whole_pass=True)
def merit(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """−∇L_k(θ)ᵀh and L_k(θ), two numbers."""
    theta, h = shared
    loss, slope = shard.task.full_loss_and_gradient(theta, own_rows(shard))
    return -(slope @ h), loss


def hypergradient(
    fed: Federation, theta: Tensor, w: Tensor, model: SVRGSteps, system: SVRGSteps, draw: Draw
) -> Hypergradient:
    """θ ≈ θ*(w) from the given start, then h, then −∇L_k(θ)ᵀh (eqs. 14 and 15)."""
    theta = solve(fed, "model", theta, w, model, draw.phase("model"))
    loss, goal = fed.ask_target(goal_loss_and_gradient, theta, draw=draw.phase("goal"))
    h = solve(fed, "system", goal, w, system, draw.phase("system"), constants=(theta, goal))
    (gradient, losses), ids = fed.gather(merit, (theta, h), draw=draw.phase("merit"))
    everyone = torch.zeros_like(w).index_copy(0, ids, gradient)
    return Hypergradient(theta, everyone, square_root((losses - loss).square().sum()), loss, len(ids) == fed.n)


def record(gradient: Tensor, G: Tensor, mapping: Tensor) -> dict[str, Any]:
    """More entries of the record: G, ∂F/∂w per client, and ‖w − Π(w − η∂F)‖/η, all of the last step."""
    return {
        "statistical_distance": float(G),
        "gradient_mapping": float(mapping),
        "hypergradient": [float(f"{g:.6g}") for g in gradient.tolist()],
    }


def grown(svrg: SVRGSteps, s: int, power: int, constant: float) -> SVRGSteps:
    """Step size and number of iterations of an inner solve in outer step s, as Theorem 3 (power 4) or 4 (power 2) has
    them; `svrg.step` is γ_0."""
    mu = svrg.convexity
    if svrg.period == 1:
        steps = math.log(constant * (s + 1) ** power / svrg.step) / (svrg.step * mu)
        return svrg._replace(steps=max(1, math.ceil(steps)))
    M = max(1.0 / svrg.step, (s + 1) ** (power / 2) * math.sqrt(constant))
    return svrg._replace(step=1.0 / M, steps=max(1, math.ceil(M * math.log(M**3) / mu)))


def check_schedule(schedule: str, convexity: float) -> None:
    """The theorems divide by μ."""
    if schedule == "theorem" and convexity <= 0.0:
        raise UsageError(
            'method.schedule = "theorem" needs the strong convexity μ of the losses; set method.convexity, for example '
            "to problem.l2."
        )


class Given(NamedTuple):
    """γ of the model and of the system, η, τ, T and q, None where they are not set."""

    step: float | None
    system_step: float | None
    outer_step: float | None
    local_steps: int | None
    steps: int | None
    refresh: float | None

    def curvature(self, fed: Federation, theta: Tensor, known: Curvatures) -> Curvatures:
        """The estimates, where nothing is set and they hold for the whole run; else zeros."""
        follows = set(self) == {None} and constant(fed)
        return curvatures(fed, theta) if follows and not known.largest else known

    def solves(self, fed: Federation, c: Curvatures, batch: int) -> tuple[SVRGSteps, SVRGSteps]:
        """The settings of Local-SVRG for the model and for the system."""
        if c.largest:
            T = min(100, max(20, round(4 * c.condition)))
            model = SVRGSteps(1.0 / (2.0 * c.largest), 1, 1.0, T, batch)
            return model, model
        T = self.steps or five_epochs(fed, batch)
        model = SVRGSteps(self.step or 0.05, self.local_steps or 10, self.refresh or 0.02, T, batch)
        return model, model._replace(step=self.system_step or 5e-4)


@validated
def bilevel(
    *,
    step: Positive | None = None,
    system_step: Positive | None = None,
    outer_step: Positive | None = None,
    local_steps: Count | None = None,
    steps: Count | None = None,
    batch: Count = 50,
    refresh: Probability | None = None,
    cap: Probability = 1.0,
    average: bool = False,
    convexity: NonNegative = 0.0,
    schedule: Literal["fixed", "theorem"] = "fixed",
    constant: Positive = 1.0,
    output: Literal["last", "random"] = "last",
    tie: NonNegative = 0.0,
) -> Method:
    """Learn client weights by projected descent along the hypergradient of the target's loss (Alg. 3).

    Symbols: γ = step, η = outer_step, τ = local_steps, T = steps, q = refresh, b = cap, μ = convexity.

    On quadratic losses with all clients, steps, τ, T and q follow the curvature of the losses if none of them is set;
    the estimate takes one round more, once.

    Cost: 2(1 + ⌈T/τ⌉) + 1 rounds per call of round (2 more with average), and 1 exchange with the target.

    Args:
        step: γ, step size of the model; 0.05 if not set
        system_step: step size of Local-SVRG for the linear system that gives h; 5e-4 if not set
        outer_step: η, step size of the projected descent on the weights; 0.02 if not set
        local_steps: τ, local steps between two averages; 10 if not set
        steps: T, iterations of each Local-SVRG solve; five passes over the largest shard if not set
        batch: rows per corrected gradient
        refresh: q, probability per step that a client renews its anchor; 0.02 if not set
        cap: b, largest weight of one client; 1 leaves the weights on the whole simplex, as the other methods do
        average: return the weighted average of Local-SVRG's iterates instead of the last one
        schedule: theorem lets T and γ of the inner solves change from outer step to outer step as Theorem 4 has it
        constant: A, the constants of that theorem together
        output: the last iterate, or one drawn uniformly from all of them, which is what the theory is about

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4)
        >>> friend, stranger = (x, x.sum(1)), (x, -x.sum(1))
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 1)
        >>> problem = coterie.Weighting.on([friend, stranger], friend, model=net, loss="squared")
        >>> svrg = {"steps": 10, "local_steps": 10, "batch": 4, "step": 0.05, "system_step": 0.05}
        >>> method = coterie.methods.bilevel(**svrg, outer_step=0.1)
        >>> fit = coterie.fit(problem, method, rounds=2, mode="vmap")
        >>> bool(fit.weights[0] > fit.weights[1]), fit.history[-1]["communication"]["rounds"]
        (True, 10)
    """

    check_schedule(schedule, convexity)
    given = Given(step, system_step, outer_step, local_steps, steps, refresh)

    def init(problem: Problem, n: int) -> BilevelState:
        check_cap(cap, n)
        w, none = uniform(n, like=problem.start), problem.start.new_zeros(())
        kept = (problem.start, w) if output == "random" else ()
        return BilevelState(problem.start, w, torch.zeros_like(w), none, none, 0, kept, Curvatures(), spectral(w))

    def project(w: Tensor) -> Tensor:
        return project_capped_simplex(w, cap)

    def moved(
        fed: Federation, s: BilevelState, found: Hypergradient, gradient: Tensor, curvature: Curvatures
    ) -> tuple[Tensor, Spectral, bool]:
        """The next weights, the state of spectral steps, and whether the last weights were good."""
        if curvature.largest and found.complete:
            value = found.loss + 0.5 * tie * (s.w - 1.0 / fed.n).square().sum()
            after, w, good = advance(s.spectral, s.w, gradient, value, project)
            return w, after, good
        w = project(s.w - (outer_step or OUTER_STEP) * gradient)
        return w, spectral(w), True

    def round(fed: Federation, s: BilevelState, draw: Draw) -> BilevelState:
        curvature = given.curvature(fed, s.theta, s.curvature)
        solves = (svrg._replace(average=average, convexity=convexity) for svrg in given.solves(fed, curvature, batch))
        model, system = solves
        if schedule == "theorem":
            model, system = (grown(solver, s.steps, 2, constant) for solver in (model, system))
        found = hypergradient(fed, s.theta, s.w, model, system, draw)
        gradient = tied(found.gradient, s.w, tie)
        w, after, good = moved(fed, s, found, gradient, curvature)
        eta = outer_step or after.step or OUTER_STEP
        mapping = (s.w - project(s.w - eta * gradient)).norm() / eta
        kept = s.kept
        if kept:  # each of the iterates so far is the one that is kept with the same probability
            chosen = draw.phase("output").bernoulli(1.0 / (s.steps + 1))
            kept = tuple(torch.where(chosen, new, old) for new, old in zip((found.theta, s.w), kept, strict=True))
        G = torch.maximum(s.G, found.distance)
        theta = found.theta if good else s.theta
        return BilevelState(theta, w, gradient, G, mapping, s.steps + 1, kept, curvature, after)

    def view(s: BilevelState) -> View:
        theta, w = s.kept or (s.theta, s.spectral.w if s.spectral.points else s.w)
        return View(theta, w, more=record(s.gradient, s.G, s.mapping))

    return Method("bilevel", init, round, view, needs=CURVATURE_AND_TARGET)
