"""FedNest (Tarzanagh et al. 2022, Alg. 1): federated bilevel, minimax, compositional and single-level problems.

    T times  y ← FedInn(x, y)      Alg. 4: corrected local walks on g
             x ← FedOut(x, y)      Alg. 2: corrected local walks on f along the global hypergradient (Alg. 3)

FedNest_SGD walks plainly in FedInn (Alg. 6). On a weighting problem the outer variable is w on the capped simplex:
`fednest_weights`.

Deviations: the deterministic series is the default, Alg. 3's random truncation an option (series = "random"), and
conjugate gradients another. The clients of a round are the same in all its phases (S_0 … S_N' = S). Global quantities
(q, ∇_y f, products, h) use all rows unless `anchor` says otherwise. outer_step = 0 keeps x: no tuning.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from coterie.federation import Federation
from coterie.methods.base import Method, validated
from coterie.methods.nested.phases import (
    Inverse,
    NestedState,
    Outer,
    Series,
    Walk,
    alternating,
    fedinn,
    fedout,
    lfedinn,
)
from coterie.methods.shared.hessian import Ask
from coterie.methods.weights.fednest_weights import fednest_weights
from coterie.numerics import Draw
from coterie.problems.base import Problem, View
from coterie.settings import BatchSize, Count, NonNegative, Positive, Probability

LocalSteps = Count | list[Count]


@validated
def fednest(
    *,
    step: Positive = 0.5,
    outer_step: NonNegative = 0.1,
    inner_rounds: Count = 1,
    local_steps: LocalSteps = 5,
    outer_steps: LocalSteps = 1,
    terms: Count = 5,
    lipschitz: Positive = 10.0,
    series: Series = "deterministic",
    batch: BatchSize = 64,
    anchor: BatchSize = "all",
    cap: Probability = 1.0,
    ask: Ask = "all",
) -> Method:
    """α = outer_step, β = step, T = inner_rounds, N = terms, ℓ = lipschitz. 2T + N + 3 rounds.

    τ of FedInn is local_steps, of FedOut outer_steps: one number, or one a client. cap is the largest client weight
    of a weighting problem, whose rounds are 2T + N + 1 with the target at the server; ask is whom it asks there.
    """
    walk, inverse = Walk(step, local_steps, batch), Inverse(series, terms, lipschitz, anchor)

    def inner(fed: Federation, x: Tensor, y: Tensor, draw: Draw) -> Tensor:
        return fedinn(fed, x, y, walk, anchor, draw)

    outer = _outer(Walk(outer_step, outer_steps, batch), inverse)
    nested = alternating("fednest", inner, outer, inner_rounds, local_steps, outer_steps)
    weights = fednest_weights(walk, inverse, outer_step, inner_rounds, cap, ask)

    def init(problem: Problem, n: int) -> Any:
        return (nested if "nested" in problem.offers else weights).init(problem, n)

    def round(fed: Federation, s: Any, draw: Draw) -> Any:
        return (nested if isinstance(s, NestedState) else weights).round(fed, s, draw)

    def view(s: Any) -> View:
        return (nested if isinstance(s, NestedState) else weights).view(s)

    return replace(nested, init=init, round=round, view=view, alternatives=(weights.needs,))


@validated
def fednest_sgd(
    *,
    step: Positive = 0.5,
    outer_step: NonNegative = 0.1,
    inner_rounds: Count = 1,
    local_steps: LocalSteps = 5,
    outer_steps: LocalSteps = 1,
    terms: Count = 5,
    lipschitz: Positive = 10.0,
    series: Series = "deterministic",
    batch: BatchSize = 64,
    anchor: BatchSize = "all",
) -> Method:
    """FedNest with plain local walks inside: Alg. 6 and Alg. 2. T + N + 3 rounds."""
    walk = Walk(step, local_steps, batch)

    def inner(fed: Federation, x: Tensor, y: Tensor, draw: Draw) -> Tensor:
        return lfedinn(fed, x, y, walk, draw)

    outer = _outer(Walk(outer_step, outer_steps, batch), Inverse(series, terms, lipschitz, anchor))
    return alternating("fednest-sgd", inner, outer, inner_rounds, local_steps, outer_steps)


def _outer(walk: Walk, inverse: Inverse) -> Outer:
    """FedOut, or nothing where its step is 0."""

    def outer(fed: Federation, s: NestedState, draw: Draw) -> Tensor:
        return fedout(fed, s, walk, inverse, draw) if walk.step > 0.0 else s.x

    return outer
