"""RFHO (Franceschi et al. 2017, forward mode) for the weighting problem: differentiate through the training itself.

The iteration θ ← θ − η (N/|A|) Σ_A w_k ∇L_k(θ) is followed by Z = ∂θ/∂w, one row per client, [N, d]:

    Z_j ← Z_j − η (N/|A|) (Σ_A w_k ∇²L_k(θ) Z_j + 1[j ∈ A] ∇L_j(θ)),     both sums on the batch that moved θ

After K steps ∂L_0/∂w = Z ∇L_0(θ) and w ← Π_Δ(w − η_w Z ∇L_0). With `carry` (their real-time variant) Z is kept from
outer step to outer step and tends to the exact derivative; without, it starts at 0 and covers the last K steps only.

Z is sent to the clients, which push its rows through the Hessian `columns` at a time; their replies are added up as
they arrive, so at most [chunk, N, d] numbers are kept in memory. A client of weight 0 adds nothing to the first sum and
is not asked for it (`ask = "all"` asks it all the same).

Nested problems, the paper's own setting: nested/rfho.py.

Slip: the paper on primal–dual weighting counts 2Kd numbers up; forward mode needs (N+1)d per step, as its own related
work states. (Without `carry` the first step needs d only, Z being 0.)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.methods.base import CURVATURE_AND_TARGET, Draw, Federation, Method, Problem, View, validated
from coterie.methods.nested.rfho import NestedRFHOState, nested_rfho
from coterie.methods.nested.steps import StepRule
from coterie.methods.shared.hessian import Ask, asked, hessian_rows
from coterie.methods.shared.kinds import either
from coterie.methods.shared.ties import tied
from coterie.methods.shared.works import goal_gradient, gradient
from coterie.numerics import project_simplex, uniform
from coterie.settings import BatchSize, Count, NonNegative, Positive


class RFHOState(NamedTuple):
    """Model [d], weights [N] and Z = ∂θ/∂w [N, d]."""

    theta: Tensor
    w: Tensor
    Z: Tensor


@validated
def rfho(
    *,
    step: Positive | None = None,
    outer_step: Positive | None = None,
    local_steps: Count = 1,
    carry: bool = True,
    ask: Ask = "weighted",
    columns: Count = 16,
    batch: BatchSize = 64,
    target_batch: BatchSize = "all",
    tie: NonNegative = 0.0,
) -> Method:
    """Differentiate forward through training, for client weights, or through the inner steps of a nested problem.

    Symbols: η = step, η_w = outer_step, K = local_steps.

    Cost: 2K rounds per call of round (2K − 1 without carry), 1 exchange with the target; K(N + 1)d numbers up each.

    On nested problems there are K + 1 rounds, and at most 43 exchanges more, once, for steps that are not set.

    Args:
        step: η, step size of the model or the inner variable; 0.05 if not set, by the curvature of nested problems
        local_steps: K, steps on the model per update of the weights
        outer_step: η_w, step size of the projected descent on the weights, or of the outer variable; 0.005 if not set,
            by the curvature of nested problems
        carry: keep the derivative ∂θ/∂w from round to round instead of starting at 0
        columns: rows of ∂θ/∂w that a client multiplies by its Hessian at once; bounds its memory

    Example:
        >>> from coterie.methods import rfho
        >>> rfho().name
        'rfho'
    """

    def init(problem: Problem, n: int) -> RFHOState:
        theta = problem.start
        return RFHOState(theta, uniform(n, like=theta), theta.new_zeros(n, len(theta)))

    def round(fed: Federation, s: RFHOState, draw: Draw) -> RFHOState:
        theta, w, eta, eta_w = s.theta, s.w, step or 0.05, outer_step or 0.005
        Z = s.Z if carry else torch.zeros_like(s.Z)
        for k in range(local_steps):
            at = draw.step(k)
            active = fed if k == 0 else fed.sample(draw=at)
            G, ids = active.gather(gradient, theta, draw=at, batch=batch)
            r = fed.n / len(ids)
            if carry or k > 0:
                weighted = asked(active, w, ask)
                Z = Z - eta * r * hessian_rows(weighted, theta, Z, w, draw=at, batch=batch, columns=columns)
            Z = Z.index_add(0, ids, G, alpha=-eta * r)
            theta = theta - eta * r * w[ids] @ G
        g0 = fed.ask_target(goal_gradient, theta, draw=draw.phase("target"), batch=target_batch)
        return RFHOState(theta, project_simplex(w - tied(eta_w * (Z @ g0), w, eta_w * tie)), Z)

    weights = Method("rfho", init, round, lambda s: View(s.theta, s.w), needs=CURVATURE_AND_TARGET)
    rule = StepRule(step or "auto", outer_step or "auto", inner_steps=local_steps)
    off: dict[str, Any] = {"target_batch": (target_batch, "all"), "tie": (tie, 0.0)}
    return either(weights, nested_rfho(rule, carry=carry, columns=columns, batch=batch, off=off), NestedRFHOState)
