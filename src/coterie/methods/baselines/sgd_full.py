"""SGD-Full: parallel SGD over all clients, x ← x − γ/|A| Σ_A g_k(x). The baseline that learned weights must beat."""

from typing import NamedTuple

from torch import Tensor

from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.works import gradient
from coterie.numerics import uniform
from coterie.settings import BatchSize, Positive


class SGDFullState(NamedTuple):
    """The common model; the weights, which are equal."""

    x: Tensor
    w: Tensor


@validated
def sgd_full(*, step: Positive = 0.1, batch: BatchSize = "all") -> Method:
    """Take gradient steps along the plain mean of all clients' gradients.

    Symbols: γ = step.

    Cost: 1 round per call of round.

    Example:
        >>> from coterie.methods import sgd_full
        >>> sgd_full().name
        'sgd-full'
    """

    def init(problem: Problem, n: int) -> SGDFullState:
        return SGDFullState(problem.start, uniform(n, like=problem.start))

    def round(fed: Federation, s: SGDFullState, draw: Draw) -> SGDFullState:
        return SGDFullState(s.x - step * fed.mean(gradient, s.x, draw=draw.phase("gradient"), batch=batch), s.w)

    return Method("sgd-full", init, round, lambda s: View(s.x, s.w))
