"""Gradient descent with weights that are given, not learned: θ ← θ − η (N/|A|) Σ_A w_k ∇L_k(θ).

avg    1/N for each client
opt    the best weights, where the problem knows them
val    the target's own few rows instead of the clients' (no client is asked)
[...]  your own, as proportions
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.methods.base import Draw, Federation, Method, Problem, View, known, validated
from coterie.methods.shared.works import goal_gradient, gradient
from coterie.numerics import uniform
from coterie.settings import BatchSize, NonNegative, Positive

NEEDS = {"val": {"gradient", "target"}, "opt": {"gradient", "optimal-weights"}}


class FixedWeightsState(NamedTuple):
    """Model and weights; the weights never change. None where only the target's rows count."""

    theta: Tensor
    w: Tensor | None


@validated
def fixed_weights(
    *, step: Positive = 0.05, weights: Literal["avg", "val", "opt"] | list[NonNegative] = "avg", batch: BatchSize = 64
) -> Method:
    """Run gradient descent on the clients' losses with weights that are given, not learned.

    Symbols: η = step.

    Cost: 1 round per call of round; with weights="val" no client is asked, only the target.

    Args:
        weights: avg (equal), val (the target's own rows instead of the clients'), opt (the best ones, where the problem
            knows them), or a list of proportions, one per client

    Example:
        >>> from coterie.methods import fixed_weights
        >>> fixed_weights(weights=[1, 1, 0]).name
        'fixed-weights'
    """

    def init(problem: Problem, n: int) -> FixedWeightsState:
        if weights == "val":
            return FixedWeightsState(problem.start, None)
        if weights == "avg":
            return FixedWeightsState(problem.start, uniform(n, like=problem.start))
        if weights == "opt":
            return FixedWeightsState(problem.start, known(problem.best_weights, "optimal weights").to(problem.start))
        return FixedWeightsState(problem.start, _proportions(weights, n).to(problem.start))

    def round(fed: Federation, s: FixedWeightsState, draw: Draw) -> FixedWeightsState:
        at = draw.phase("gradient")
        if s.w is None:
            return FixedWeightsState(
                s.theta - step * fed.ask_target(goal_gradient, s.theta, draw=at, batch=batch), None
            )
        G, ids = fed.gather(gradient, s.theta, draw=at, batch=batch)
        return FixedWeightsState(s.theta - step * fed.n / len(ids) * s.w[ids] @ G, s.w)

    needs = NEEDS.get(weights, {"gradient"}) if isinstance(weights, str) else {"gradient"}
    return Method("fixed-weights", init, round, lambda s: View(s.theta, s.w), needs=frozenset(needs))


def _proportions(weights: Any, n: int) -> Tensor:
    w = torch.tensor(weights, dtype=torch.float64)
    if len(w) != n:
        raise UsageError(f"method.weights has {len(w)} numbers, but there are {n} clients; give one per client.")
    if float(w.sum()) <= 0.0:
        raise UsageError("method.weights sums to 0; at least one client needs a positive weight.")
    return w / w.sum()
