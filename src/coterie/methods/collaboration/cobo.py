"""CoBo (Hashemi, He and Jaggi 2024, NeurIPS): bilevel; pairs of clients are linked if their gradients agree half-way.

    min over x_1 … x_K of Σ_i L_i(x_i) + (ρ/2) Σ_{i<j} w_ij ‖x_i − x_j‖²
    w_ij ∈ argmax over [0, 1] of w ⟨∇L_i(z_ij), ∇L_j(z_ij)⟩,   z_ij = (x_i + x_j)/2

    w_ij ← clip(w_ij + β ⟨∇L_i(z_ij), ∇L_j(z_ij)⟩, 0, 1)                             for the pairs of the round
    x_i ← x_i after local steps − γρ Σ_j w_ij (x_i − x_j)

All w_ij start at 1. With one local step the second line is the paper's gradient step on the outer problem.

Deviations. The pairs of a round are a random matching of its participants, so that every client takes one gradient more
per round; the paper draws each pair by itself, at a rate of about one per client. Models and gradients go through the
server, which takes the inner products. ρ is given as a share, κ = γρK (`pull`): with κ ≤ 1 the sum above is a mixture
of models with weights κ w_ij/K, whatever the number of clients. With several local steps the pull is taken once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Each, Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.collaboration.models import NEEDS, Part
from coterie.methods.shared.works import local_sgd, own_gradient
from coterie.settings import BatchSize, Count, NonNegative, Positive


class CoBoState(NamedTuple):
    """Personal models [K, d], the links w_ij [K, K], symmetric in [0, 1] with a diagonal of 0, and the weights of the
    mixtures [K, K]."""

    X: Tensor
    links: Tensor
    W: Tensor


@work("cobo/steps-and-middle-gradient", update=(moved_from(0), RESULT))
def steps_and_middle_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """x_i after local steps, and ∇L_i half-way to the partner's model."""
    x, middle = shared
    return (
        local_sgd(shard, x, None, static, draw),
        own_gradient(shard, middle, static.batch, draw.phase("middle")),
    )


@validated
def cobo(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    weight_step: NonNegative = 10.0,
    pull: Part = 1.0,
) -> Method:
    """Link pairs of clients whose gradients agree half-way between their models, and draw linked models together.

    Symbols: γ = step, β = weight_step, κ = pull.

    Cost: 1 round per call of round; 2d numbers each way per client.

    Args:
        weight_step: β, step size of the links; large values switch them on and off
        pull: κ = γρK, how far the models of linked clients move to their mean per round

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4)
        >>> friend, stranger = (x, x.sum(1)), (x, -x.sum(1))
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 1)
        >>> shards = [friend, friend, stranger]
        >>> problem = coterie.Weighting.on(shards, validation=shards, model=net, loss="squared")
        >>> coterie.fit(problem, coterie.methods.cobo(), rounds=20, mode="vmap").clusters
        [[0, 1], [2]]
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch}

    def init(problem: Problem, n: int) -> CoBoState:
        X = problem.start.repeat(n, 1)
        links = torch.ones(n, n).fill_diagonal_(0.0).to(X)
        return CoBoState(X, links, mixture(links, pull / n))

    def round(fed: Federation, s: CoBoState, draw: Draw) -> CoBoState:
        partner = matching(fed.ids, fed.n, draw.phase("pairs"))
        shared = (Each(s.X), Each((s.X + s.X[partner]) / 2.0))
        (U, G), ids = fed.gather(steps_and_middle_gradient, shared, draw=draw.phase("walk"), **local)
        gradients = torch.zeros_like(s.X).index_copy(0, ids, G)  # 0 for whoever did not reply: then no link changes
        agreement = (gradients[ids] * gradients[partner[ids]]).sum(1)
        change = torch.zeros_like(s.links).index_put((ids, partner[ids]), weight_step * agreement)
        links = (s.links + change).clamp(0.0, 1.0).fill_diagonal_(0.0)
        W = s.W.index_copy(0, ids, mixture(among(links, ids), pull / fed.n)[ids])
        X = s.X.index_copy(0, ids, U + (W[ids] @ s.X - s.X[ids]))
        return CoBoState(X, links, W)

    return Method("cobo", init, round, lambda s: View(s.X, s.W), needs=NEEDS)


def matching(ids: Tensor, n: int, draw: Draw) -> Tensor:
    """The partner of each of n clients, [n]: ids in random pairs; who is left over has itself."""
    order = ids[draw.permutation(len(ids))]
    half = len(order) // 2
    first, second = order[:half], order[half : 2 * half]
    partner = torch.arange(n, device=ids.device)
    return partner.index_copy(0, first, second).index_copy(0, second, first)


def among(links: Tensor, ids: Tensor) -> Tensor:
    """The links between these clients alone."""
    present = torch.zeros(len(links), device=links.device, dtype=links.dtype).index_fill(0, ids, 1.0)
    return links * present[:, None] * present


def mixture(links: Tensor, share: float) -> Tensor:
    """The weights of the mixtures x_i − share Σ_j w_ij (x_i − x_j), rows that sum to 1."""
    others = share * links
    return others + torch.diag(1.0 - others.sum(1))
