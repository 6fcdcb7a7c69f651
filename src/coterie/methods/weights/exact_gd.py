"""GD: the weighting problem by its exact hypergradient, with a dense Hessian. The yardstick for small models.

    g_k = −∇L_k(θ)ᵀ H⁻¹∇L_0(θ),   H = Σ_k w_k ∇²L_k(θ),   w ← Π_Δ(w − η_w g),   after K inner steps on θ:
    gradient  θ ← θ − η Σ_k w_k ∇L_k(θ)        newton  θ ← θ − H⁻¹ Σ_k w_k ∇L_k(θ)

Newton steps bring θ to θ*(w), so that g is exact; the paper on primal–dual weighting compares with gradient steps.
Where η_w is not set and all clients and all rows are asked, w moves by spectral steps (spectral.py), and the record has
the last good w with its θ. Sums over clients are (N/|A|) Σ_A. With noise H⁻¹ is a biased estimate, which the comparison
shows. `tie` adds the penalty of methods/shared/ties.py to g, for all clients. Nested problems: nested/exact_gd.py.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.errors import RunError, UsageError
from coterie.methods.base import CURVATURE_AND_TARGET, Draw, Federation, Method, Problem, View, validated
from coterie.methods.nested.exact_gd import NestedExactState, nested_exact_gd
from coterie.methods.nested.steps import StepRule
from coterie.methods.shared.hessian import hessian_rows
from coterie.methods.shared.kinds import either
from coterie.methods.shared.ties import tied
from coterie.methods.shared.works import goal_gradient, goal_loss_and_gradient, gradient
from coterie.methods.weights.spectral import Spectral, advance, spectral
from coterie.numerics import project_simplex, uniform
from coterie.settings import BatchSize, Count, NonNegative, Positive

OUTER_STEP = 0.005
"""η_w where it is not set and the hypergradient is noisy."""
LIMIT = 2000
"""The largest d: a Hessian of 2000² float64 numbers is 32 MB, and each client sends one."""


class ExactGDState(NamedTuple):
    """Model, weights, and the last good weights of spectral steps."""

    theta: Tensor
    w: Tensor
    spectral: Spectral


@validated
def exact_gd(
    *,
    step: Positive | None = None,
    outer_step: Positive | None = None,
    local_steps: Count = 5,
    inner: Literal["newton", "gradient"] = "newton",
    damping: NonNegative = 0.0,
    columns: Count = 64,
    batch: BatchSize = "all",
    target_batch: BatchSize = "all",
    tie: NonNegative = 0.0,
) -> Method:
    """Descend along the exact hypergradient with a dense Hessian, on client weights or a nested problem; small models.

    For models, or inner variables, of at most 2,000 numbers.

    Symbols: η = step, η_w = outer_step, K = local_steps.

    Cost: 2K + 2 rounds per call of round (K + 2 with inner="gradient", or nested); d² numbers up for each Hessian.

    Steps of nested problems that are not set take at most 43 exchanges more, once.

    Args:
        step: η, step size of the inner steps, where these are gradient steps; 0.05 if not set, by the curvature of
            nested problems
        outer_step: η_w, step size of the projected descent on the weights; spectral steps if not set, or 0.005 where
            only some clients or rows are asked, and by the curvature of nested problems
        local_steps: K, inner steps on the model per round
        inner: inner steps of Newton's method, which reach θ*(w), or of gradient descent
        damping: added to the diagonal of the Hessian before it is inverted
        columns: Hessian products that a client computes at once; bounds its memory

    Example:
        >>> from coterie.methods import exact_gd
        >>> exact_gd().name
        'exact-gd'
    """

    whole = outer_step is None and batch == target_batch == "all"

    def init(problem: Problem, n: int) -> ExactGDState:
        d = len(problem.start)
        if d > LIMIT:
            raise UsageError(
                f"exact-gd inverts a dense Hessian; the model has {d:,} parameters, more than the {LIMIT:,} it takes. "
                "Use primal-dual, sustain or rfho, or a smaller model."
            )
        w = uniform(n, like=problem.start)
        return ExactGDState(problem.start, w, spectral(w))

    def round(fed: Federation, s: ExactGDState, draw: Draw) -> ExactGDState:
        theta, w = s.theta, s.w

        def solve(active: Federation, b: Tensor, at: Draw) -> Tensor:
            """H⁻¹b; 0 where no active client has weight, so that nothing moves."""
            basis = torch.eye(len(theta), dtype=theta.dtype, device=theta.device)
            rows = hessian_rows(active, theta, basis, w, draw=at.phase("hessian"), batch=batch, columns=columns)
            weighted = w[active.ids].sum() > 0.0
            H = torch.where(weighted, fed.n / len(active.ids) * rows + damping * basis, basis)
            return torch.where(weighted, inverted(H, b), 0.0)

        for k in range(local_steps):
            at = draw.step(k)
            active = fed if k == 0 else fed.sample(draw=at)
            G, ids = active.gather(gradient, theta, draw=at.phase("inner"), batch=batch)
            g = fed.n / len(ids) * w[ids] @ G
            theta = theta - (solve(active, g, at) if inner == "newton" else (step or 0.05) * g)

        outer = draw.phase("outer")
        G, ids = fed.gather(gradient, theta, draw=outer, batch=batch)
        adaptive = whole and len(ids) == fed.n
        if adaptive:
            value, g0 = fed.ask_target(goal_loss_and_gradient, theta, draw=outer)
        else:
            g0 = fed.ask_target(goal_gradient, theta, draw=outer, batch=target_batch)
        p = solve(fed, g0, outer)
        slope = tied(torch.zeros_like(w).index_copy(0, ids, -fed.n / len(ids) * G @ p), w, tie)
        if not adaptive:
            w = project_simplex(w - (outer_step or OUTER_STEP) * slope)
            return ExactGDState(theta, w, spectral(w))
        value = value + 0.5 * tie * (w - 1.0 / fed.n).square().sum()
        found, after, good = advance(s.spectral, w, slope, value, project_simplex)
        return ExactGDState(theta if good else s.theta, after, found)

    def view(s: ExactGDState) -> View:
        return View(s.theta, s.spectral.w if s.spectral.points else s.w)

    rule = StepRule(step or "auto", outer_step or "auto", inner_steps=local_steps)
    options: dict[str, Any] = {"newton": inner == "newton", "damping": damping, "columns": columns, "batch": batch}
    nested = nested_exact_gd(rule, **options, limit=LIMIT, target_batch=target_batch, tie=tie)
    return either(Method("exact-gd", init, round, view, needs=CURVATURE_AND_TARGET), nested, NestedExactState)


def inverted(H: Tensor, b: Tensor) -> Tensor:
    """H⁻¹b; a singular Hessian is explained."""
    try:
        return torch.linalg.solve(H, b)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        raise RunError(
            "exact-gd met a singular Hessian: the clients' losses do not fix θ. Give the loss a ridge, or set "
            "method.damping (for example 1e-3), which adds that much to the diagonal."
        ) from None
