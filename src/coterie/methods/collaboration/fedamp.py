"""FedAMP (Huang et al. 2021, AAAI): attentive message passing; similar models are drawn to each other.

    u_i = Σ_j ξ_ij x_j,   ξ_ij = α A′(‖x_i − x_j‖²) for j ≠ i,   ξ_ii = 1 − Σ_{j≠i} ξ_ij,   A(z) = 1 − exp(−z/σ)
    x_i ← argmin_x L_i(x) + λ/(2α) ‖x − u_i‖²,   by local steps from u_i

`attention = "cosine"` is HeurFedAMP, which the paper takes for deep networks: ξ_ii is given (`own`), and
ξ_ij = (1 − ξ_ii) exp(σ cos(x_i, x_j))/Σ_{h≠i} exp(σ cos(x_i, x_h)).

Deviations. The paper asks for an α so small that ξ_ii ≥ 0. Here the ξ_ij of a client are scaled down together where
they leave it less than an equal share 1/K; so any α does, and equal models are averaged. The proximal problem is not
solved to the end, but by a number of local steps from u_i. Absent clients are heard with the model that they uploaded
last. The server holds every client's model, as in the paper.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.federation import Each, Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.collaboration.models import NEEDS, Part
from coterie.methods.shared.works import batches, own_rows
from coterie.settings import BatchSize, Count, NonNegative, Positive


class FedAMPState(NamedTuple):
    """Personal models [K, d] as they were uploaded, and the weights ξ of the last messages, [K, K]."""

    X: Tensor
    W: Tensor


@work("fedamp/proximal-steps", update=moved_from())
def proximal_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """x_i after steps of x ← x − γ(∇L_i(x) + (λ/α)(x − u_i)) from u_i."""
    x = shared
    for batch in batches(own_rows(shard), static.batch, static.steps, draw):
        x = x - static.step * (shard.task.gradient(x, batch) + static.penalty * (x - shared))
    return x


@validated
def fedamp(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    attention: Literal["distance", "cosine"] = "distance",
    strength: Positive = 1.0,
    width: Positive = 0.1,
    penalty: NonNegative = 0.1,
    own: Part = 0.5,
) -> Method:
    """Draw the models of similar clients to each other, with weights by the distance between models.

    Symbols: γ = step, α = strength, σ = width, λ = penalty, ξ_ii = own.

    Cost: 1 round per call of round; d numbers each way per client.

    Args:
        attention: weights by the distance between models (FedAMP), or by their cosine (HeurFedAMP)
        strength: α, how much weight similar models get together
        width: σ; with attention="distance" the squared distance at which attention has fallen to a third, with
            "cosine" how sharply it rises with the cosine
        penalty: λ, pull of a client's local steps towards its message, in units of α
        own: weight of a client's own model in its message, with attention="cosine"

    Example:
        >>> import torch
        >>> from coterie.methods.collaboration.fedamp import by_distance
        >>> by_distance(torch.tensor([[0.0], [0.0], [9.0]]), strength=1.0, width=0.5).round(decimals=2)[2].tolist()
        [0.0, 0.0, 1.0]
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch, "penalty": penalty / strength}

    def init(problem: Problem, n: int) -> FedAMPState:
        X = problem.start.repeat(n, 1)
        return FedAMPState(X, weights(X))

    def weights(X: Tensor) -> Tensor:
        return by_distance(X, strength, width) if attention == "distance" else by_cosine(X, width, own)

    def round(fed: Federation, s: FedAMPState, draw: Draw) -> FedAMPState:
        W = weights(s.X)
        models, ids = fed.gather(proximal_steps, Each(W @ s.X), draw=draw.phase("walk"), **local)
        return FedAMPState(s.X.index_copy(0, ids, models), W)

    return Method("fedamp", init, round, lambda s: View(s.X, s.W), needs=NEEDS)


def by_distance(X: Tensor, strength: float, width: float) -> Tensor:
    """ξ from the distances between models [K, d]; a client keeps at least an equal share for its own."""
    n = len(X)
    squares = torch.cdist(X, X, compute_mode="donot_use_mm_for_euclid_dist").square()
    others = (strength / width * torch.exp(-squares / width)).fill_diagonal_(0.0)
    total = others.sum(1, keepdim=True)
    others = others * ((1.0 - 1.0 / n) / total.clamp(min=1.0 - 1.0 / n)) if n > 1 else others
    return others + torch.diag(1.0 - others.sum(1))


def by_cosine(X: Tensor, width: float, own: float) -> Tensor:
    """ξ from the cosines between models [K, d]."""
    n = len(X)
    eye = torch.eye(n).to(X)
    if n == 1:
        return eye
    unit = torch.nn.functional.normalize(X, dim=1)
    scores = (width * (unit @ unit.T)).masked_fill(eye.bool(), -torch.inf)
    return own * eye + (1.0 - own) * scores.softmax(1)
