"""Primal–dual weighting ("Efficient Weighting and Optimization in Federated Learning", 2023), Algorithms 1 and 2.

    L_w(θ, λ) = L_0(θ) + λᵀ Σ_k w_k ∇L_k(θ) + Γ Σ_k w_k L_k(θ)
    at its saddle point θ = θ*(w), λ = −H⁻¹∇L_0(θ), so ∂F/∂w_k = λᵀ∇L_k(θ): no inverse, no series.

K times, with the active clients A of N:  θ ← θ − η_θ [∇L_0 + (N/|A|) Σ_A w_k (∇²L_k λ + Γ∇L_k)]
                                          λ ← Π_{‖λ‖≤D}(λ + η_λ (N/|A|) Σ_A w_k ∇L_k)
then w ← Π_Δ(w − η_w g), g_k = (N/|A|) λᵀ∇L_k on A and 0 elsewhere, with the λ and θ that the K-th answers were for.
θ and λ are kept from outer step to outer step.

Slip corrected: line 6 prints w_k before the first term of its sum only; it multiplies both. Beyond the paper: `warmup`
outer steps leave w alone until λ has settled. Keep η_w ≪ η_λ: a young λ measures the violated constraint, not the goal.
An inner step without any active client skips the outer step it belongs to. `ask = "weighted"` asks for products only
where w_k > 0 (the others are multiplied by 0): less work and traffic, but two rounds per step instead of one. `tie`
adds the penalty of methods/shared/ties.py to g, for all clients.

Defaults: η_θ = η_λ = 0.05, η_w = 0.005, K = 1, batches of 64 rows, no warm-up. Where none of these is set, the loss is
quadratic and all clients participate, they follow its curvatures L (clients) and L_0 (target), estimated in one
exchange before the first step: η_θ = 1/(L_0 + ΓL), η_λ = (L_0 + ΓL)/(2L²), K = 10, all rows, and w moves by spectral
steps (spectral.py) after five rounds of warm-up.

Nested problems: nested/primal_dual.py.

The record has the two residuals of the saddle point, at the θ and λ that the last replies were for: `primal_residual`
‖(N/|A|) Σ_A w_k ∇L_k‖ (how far θ is from θ*(w)) and `dual_residual` ‖∇L_0 + (N/|A|) Σ_A w_k ∇²L_k λ‖ (how far λ is
from −H⁻¹∇L_0), both as noisy as the batches are.
"""

from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import CURVATURE_AND_TARGET, Draw, Federation, Method, Problem, View, validated
from coterie.methods.nested.primal_dual import NestedPrimalDualState, SaddleSteps, nested_primal_dual
from coterie.methods.shared.curvature import Curvatures, constant, curvatures
from coterie.methods.shared.hessian import Ask, asked, hessian_rows
from coterie.methods.shared.kinds import either
from coterie.methods.shared.ties import tied
from coterie.methods.shared.works import goal_gradient, own_gradient, own_product
from coterie.methods.weights.spectral import Spectral, advance, spectral
from coterie.numerics import project_ball, project_simplex, uniform
from coterie.settings import BatchSize, Count, NonNegative, Positive


class PrimalDualState(NamedTuple):
    """Model, dual variable and weights; outer steps taken; Theorem 1's least Γ, where the problem knows it; the primal
    and the dual residual of the last inner step, [2]; the curvature of quadratic losses; and spectral steps."""

    theta: Tensor
    lam: Tensor
    w: Tensor
    steps: int
    bound: float | None
    residuals: Tensor
    curvature: Curvatures
    spectral: Spectral


@work("primal-dual/gradient-and-product", update=RESULT)
def gradient_and_product(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> tuple[Tensor, ...]:
    """∇L_k(θ) and ∇²L_k(θ)λ from two independent batches; with static.scalar also λᵀ∇L_k(θ) (Remark 1)."""
    theta, lam = shared
    g = own_gradient(shard, theta, static.batch, draw.phase("gradient"))
    hl = own_product(shard, theta, lam, static.batch, draw.phase("product"))
    return (g, hl, lam @ g) if static.scalar else (g, hl)


@work("primal-dual/gradient-alone", update=RESULT)
def gradient_alone(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> tuple[Tensor, ...]:
    """The same without the product."""
    theta, lam = shared
    g = own_gradient(shard, theta, static.batch, draw.phase("gradient"))
    return (g, lam @ g) if static.scalar else (g,)


@work("primal-dual/slope", update=RESULT)
def slope_alone(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """λᵀ∇L_k(θ), one number, on the same batch as the gradient."""
    theta, lam = shared
    return lam @ own_gradient(shard, theta, static.batch, draw.phase("gradient"))


class Answers(NamedTuple):
    """(N/|A|) Σ_A w_k ∇L_k(θ), Σ_A w_k ∇²L_k(θ)λ, λᵀ∇L_k(θ) per client of A (None where nobody was asked), and the ids
    of A."""

    g: Tensor
    Hl: Tensor
    dots: Tensor | None
    ids: Tensor


class Given(NamedTuple):
    """η_θ, η_λ, η_w, K, the warm-up and the rows per gradient, None where they are not set."""

    step: float | None
    dual_step: float | None
    outer_step: float | None
    local_steps: int | None
    warmup: int | None
    batch: int | str | None

    def curvature(self, fed: Federation, theta: Tensor, known: Curvatures) -> Curvatures:
        """The estimates, where nothing is set and they hold for the whole run; else zeros."""
        follows = set(self) == {None} and constant(fed)
        return curvatures(fed, theta) if follows and not known.largest else known

    def sizes(self, c: Curvatures, gamma: float) -> tuple[float, float]:
        """η_θ and η_λ."""
        if not c.largest:
            return self.step or 0.05, self.dual_step or 0.05
        stiff = c.target + gamma * c.largest
        return 1.0 / stiff, stiff / (2.0 * c.largest**2)


@validated
def primal_dual(
    *,
    step: Positive | None = None,
    dual_step: Positive | None = None,
    outer_step: Positive | None = None,
    augmentation: Positive = 1.0,
    radius: Positive = 10.0,
    local_steps: Count | None = None,
    warmup: Annotated[int, Field(ge=0)] | None = None,
    scalar: Literal["server", "client"] = "server",
    ask: Ask = "all",
    batch: BatchSize | None = None,
    target_batch: BatchSize = "all",
    tie: NonNegative = 0.0,
) -> Method:
    """Find the saddle point of an augmented Lagrangian, without inverse Hessians: client weights, or nested problems.

    Symbols: η_θ = step, η_λ = dual_step, η_w = outer_step, Γ = augmentation, D = radius, K = local_steps.

    Cost: K rounds per call of round (2K with ask="weighted"), K exchanges with the target; 2Kd numbers up per client.

    On quadratic losses with all clients, steps, K, warm-up and rows follow the curvature of the losses if none of them
    is set; the estimate takes one round more, once.

    On nested problems there are K rounds with d_x + 2 d_y numbers up per client in each; K is 10 and all rows are asked
    if not set, and steps that are not set take at most 43 exchanges more, once.

    Args:
        step: η_θ, step size of the model; 0.05 if not set
        dual_step: η_λ, step size of the dual variable; 0.05 if not set
        outer_step: η_w, step size on the weights, well below dual_step; 0.005 if not set
        augmentation: Γ, weight of the clients' loss in the Lagrangian; a warning reports where it is below the
            theorem's bound
        radius: D, largest norm of the dual variable
        local_steps: K, steps on the model and the dual variable per update of the weights; 1 if not set
        warmup: rounds that leave the weights alone until the dual variable has settled; 0 if not set
        batch: rows per gradient and product of a client; 64 if not set
        scalar: who computes λᵀ∇L_k: the server from the gradients, or the client, which then sends one number more, and
            in a secure run no gradient but in a sum

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4)
        >>> friend, stranger = (x, x.sum(1)), (x, -x.sum(1))
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 1)
        >>> problem = coterie.Weighting.on([friend, stranger], friend, model=net, loss="squared")
        >>> steps = {"step": 0.05, "dual_step": 0.05, "outer_step": 0.05, "local_steps": 1}
        >>> method = coterie.methods.primal_dual(**steps, batch="all")
        >>> fit = coterie.fit(problem, method, rounds=40, mode="vmap")
        >>> bool(fit.weights[0] > fit.weights[1]), fit.history[-1]["communication"]["rounds"]
        (True, 40)
    """

    given = Given(step, dual_step, outer_step, local_steps, warmup, batch)

    def init(problem: Problem, n: int) -> PrimalDualState:
        theta, w = problem.start, uniform(n, like=problem.start)
        bound, residuals = least_gamma(problem, radius), theta.new_zeros(2)
        return PrimalDualState(theta, torch.zeros_like(theta), w, 0, bound, residuals, Curvatures(), spectral(w))

    def hidden(
        fed: Federation, theta: Tensor, lam: Tensor, w: Tensor, at: Draw, last: bool, batch: int | str
    ) -> Answers:
        """The same from secure sums; clients compute λᵀ∇L_k(θ) themselves, where the weights are about to move."""
        g, Hl = fed.mean(gradient_and_product, (theta, lam), weights=w, draw=at, batch=batch, scalar=False)
        whole, ids, dots = w[fed.ids].sum(), fed.ids, None
        if last:
            dots, ids = fed.gather(slope_alone, (theta, lam), draw=at, batch=batch)
        return Answers(fed.n / len(ids) * whole * g, whole * Hl, dots, ids)

    def answers(
        fed: Federation, theta: Tensor, lam: Tensor, w: Tensor, at: Draw, last: bool, batch: int | str
    ) -> Answers:
        """What the clients of A answer; λᵀ∇L_k(θ) is computed here unless clients send it."""
        sent = last and scalar == "client"
        if fed.secure is not None and scalar == "client":
            return hidden(fed, theta, lam, w, at, last, batch)
        if ask == "all":
            (G, HL, *dots), ids = fed.gather(gradient_and_product, (theta, lam), draw=at, batch=batch, scalar=sent)
            return Answers(fed.n / len(ids) * w[ids] @ G, w[ids] @ HL, dots[0] if sent else G @ lam, ids)
        (G, *dots), ids = fed.gather(gradient_alone, (theta, lam), draw=at, batch=batch, scalar=sent)
        at = at.phase("product")
        Hl = hessian_rows(asked(fed, w, ask), theta, lam[None], w, draw=at, batch=batch, columns=1)[0]
        return Answers(fed.n / len(ids) * w[ids] @ G, Hl, dots[0] if sent else G @ lam, ids)

    def round(fed: Federation, s: PrimalDualState, draw: Draw) -> PrimalDualState:
        if s.steps == 0 and s.bound is not None and augmentation <= s.bound:
            _warn(fed, augmentation, s.bound)
        theta, lam, w, residuals = s.theta, s.lam, s.w, s.residuals
        curvature = given.curvature(fed, theta, s.curvature)
        eta, eta_dual = given.sizes(curvature, augmentation)
        follows = curvature.largest > 0.0
        steps, rows = (10, "all") if follows else (local_steps or 1, batch or 64)
        slope, replies = torch.zeros_like(w), 0
        for k in range(steps):
            at, last = draw.step(k), k == steps - 1
            active = fed if k == 0 else fed.sample(draw=at)
            found = answers(active, theta, lam, w, at, last, rows)
            g0 = fed.ask_target(goal_gradient, theta, draw=at.phase("target"), batch=target_batch)
            r = fed.n / len(found.ids)
            if found.dots is not None:
                slope, replies = torch.zeros_like(w).index_copy(0, found.ids, r * found.dots), len(found.ids)
            residuals = torch.stack([found.g.norm(), (g0 + r * found.Hl).norm()])
            theta = theta - eta * (g0 + r * found.Hl + augmentation * found.g)
            lam = project_ball(lam + eta_dual * found.g, radius)
        slope = tied(slope, w, tie)
        exact = follows and replies == fed.n and target_batch == "all"
        good = s.spectral if exact else spectral(w)
        if s.steps >= (5 if follows else warmup or 0):
            if exact:
                good, w, _ = advance(s.spectral, w, slope, None, project_simplex)
            else:
                w = project_simplex(w - (outer_step or 0.005) * slope)
        return PrimalDualState(theta, lam, w, s.steps + 1, s.bound, residuals, curvature, good)

    def view(s: PrimalDualState) -> View:
        primal, dual = s.residuals.tolist()
        return View(s.theta, s.w, more={"primal_residual": primal, "dual_residual": dual})

    saddle = SaddleSteps(step, dual_step, outer_step, augmentation, radius, local_steps or 10, warmup or 0)
    off: dict[str, Any] = {"scalar": (scalar, "server"), "ask": (ask, "all"), "tie": (tie, 0.0)}
    nested = nested_primal_dual(saddle, batch=batch or "all", off={**off, "target_batch": (target_batch, "all")})
    return either(Method("primal-dual", init, round, view, needs=CURVATURE_AND_TARGET), nested, NestedPrimalDualState)


def least_gamma(problem: Problem, radius: float) -> float | None:
    """Theorem 1 asks for Γ > (D L₂ + L₁)/μ; None where the problem does not know these constants."""
    curvature = problem.curvature
    return None if curvature is None else (radius * curvature.hessian_lipschitz + curvature.smooth) / curvature.convex


def _warn(fed: Federation, gamma: float, bound: float) -> None:
    reason = (
        f"method.augmentation = {gamma:g} is not above (D·L₂ + L₁)/μ = {bound:.4g}, so Theorem 1 does not promise "
        "convergence here; raise it (and lower method.step), or lower method.radius, if the run does not settle."
    )
    fed.book.events.append({"round": fed.round, "event": "warning", "reason": reason})
