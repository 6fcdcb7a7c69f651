"""SGD-Ideal: parallel SGD over the target's true friends, x ← x − γ/|G| Σ_{k∈G} g_k(x). No other client is asked.

Only where the problem knows the friends. Averaging G of them has variance σ²/G: the rate that MeritFed's theory
promises without knowing who they are.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.methods.base import Draw, Federation, Method, Problem, View, known, validated
from coterie.methods.shared.works import gradient
from coterie.settings import BatchSize, Positive


class SGDIdealState(NamedTuple):
    """The common model; the weights: equal for friends, 0 for the others; the number of friends."""

    x: Tensor
    w: Tensor
    friends: int


@validated
def sgd_ideal(*, step: Positive = 0.1, batch: BatchSize = "all") -> Method:
    """Take gradient steps along the mean gradient of the target's true friends, where the problem knows them.

    Symbols: γ = step.

    Cost: 1 round per call of round, of the friends among the active clients; without any it is skipped.

    Example:
        >>> from coterie.methods import sgd_ideal
        >>> sgd_ideal().name
        'sgd-ideal'
    """

    def init(problem: Problem, n: int) -> SGDIdealState:
        friends = known(problem.friends, "friends")
        is_friend = torch.arange(n, device=problem.start.device) < friends
        return SGDIdealState(problem.start, is_friend.to(problem.start) / friends, friends)

    def round(fed: Federation, s: SGDIdealState, draw: Draw) -> SGDIdealState:
        friends = replace(fed, ids=fed.ids[fed.ids < s.friends])  # known friends come first
        g = friends.mean(gradient, s.x, draw=draw.phase("gradient"), batch=batch)
        return s._replace(x=s.x - step * g)

    needs = frozenset({"gradient", "friends"})
    return Method("sgd-ideal", init, round, lambda s: View(s.x, s.w), needs=needs)
