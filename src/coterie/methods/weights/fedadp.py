"""FedAdp (Wu and Wang 2021): weights by the angle between a client's gradient and the global one.

    θ_k = arccos cos(g_k, Σ_j n_j g_j / Σ_j n_j),   smoothed over the rounds in which k participated, θ̃_k = mean of θ_k
    f(θ̃) = α (1 − exp(−exp(−α (θ̃ − 1)))),   w_k = n_k e^{f(θ̃_k)} / Z,   x ← x − γ Σ_k w_k g_k(x)

The steep fall of f between angles of ½ and 1½ separates clients that help from those that do not. `angle = "client"`
with `smooth = false` is the baseline of MeritFed's authors: the angle to the gradient that the target itself sends as
a client, on a batch of its training rows, and of this round alone (in a round without it all angles stay).
`angle = "target"` takes the gradient on the target's validation rows instead. A gradient of 0 stands at a right angle.
Clients send one gradient, not several local steps.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.works import goal_gradient, gradient, target_row
from coterie.settings import BatchSize, Positive

STEEPNESS = 5.0  # the paper's α: how sharply the weight falls with the angle


class FedAdpState(NamedTuple):
    """The common model [d], the weights [K], the smoothed angles [K], and the number of rounds of each client [K]."""

    x: Tensor
    w: Tensor
    angles: Tensor
    times: Tensor


@validated
def fedadp(
    *,
    step: Positive = 0.1,
    angle: Literal["global", "target", "client"] = "global",
    smooth: bool = True,
    batch: BatchSize = "all",
    target_batch: BatchSize = "all",
) -> Method:
    """Weight clients by the angle between their gradient and the global one, smoothed over rounds.

    Symbols: γ = step.

    Cost: 1 round per call of round, and 1 exchange with the target with angle="target".

    Args:
        angle: the angle to the mean gradient of all clients, to the gradient on the target's validation rows, or to the
            one that the target sends as a client (federation.target, or client 0)
        smooth: use the mean angle of the rounds in which a client participated, not the angle of this round alone
        target_batch: rows of the target's gradient, with angle="target"

    Example:
        >>> from coterie.methods import fedadp
        >>> fedadp().name
        'fedadp'
    """

    def weights(sizes: Tensor, angles: Tensor) -> Tensor:
        return torch.softmax(sizes.to(angles).log() + gompertz(angles, STEEPNESS), dim=0)

    def reference(fed: Federation, x: Tensor, G: Tensor, ids: Tensor, draw: Draw) -> Tensor | None:
        """The gradient that angles are measured to."""
        if angle == "client":
            return target_row(fed, G, ids)
        if angle == "target":
            return fed.ask_target(goal_gradient, x, draw=draw.phase("target"), batch=target_batch)
        sizes = fed.sizes[ids].to(G)
        return sizes / sizes.sum() @ G

    def init(problem: Problem, n: int) -> FedAdpState:
        nothing = torch.zeros(n, dtype=problem.start.dtype, device=problem.start.device)
        return FedAdpState(problem.start, weights(problem.train.counts, nothing), nothing, nothing)

    def round(fed: Federation, s: FedAdpState, draw: Draw) -> FedAdpState:
        G, ids = fed.gather(gradient, s.x, draw=draw.phase("gradient"), batch=batch)
        direction = reference(fed, s.x, G, ids, draw)
        if direction is None:
            return s._replace(x=s.x - step * weights(fed.sizes[ids], s.angles[ids]) @ G)
        now = cosine_similarity(G, direction[None]).clamp(-1.0, 1.0).arccos()
        times = s.times.index_add(0, ids, torch.ones_like(now))
        share = 1.0 / times[ids] if smooth else 1.0
        angles = s.angles.index_add(0, ids, share * (now - s.angles[ids]))
        x = s.x - step * weights(fed.sizes[ids], angles[ids]) @ G
        return FedAdpState(x, weights(fed.sizes, angles), angles, times)

    needs = frozenset({"gradient", "target"} if angle == "target" else {"gradient"})
    return Method("fedadp", init, round, lambda s: View(s.x, s.w), needs=needs)


def gompertz(angles: Tensor, steepness: float) -> Tensor:
    """α (1 − exp(−exp(−α (θ − 1)))), between 0 and α."""
    return steepness * (1.0 - torch.exp(-torch.exp(-steepness * (angles - 1.0))))
