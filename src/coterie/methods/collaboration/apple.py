"""APPLE (Luo and Wu 2022, IJCAI): clients download the core models of all others and learn how to combine them.

    x_i = Σ_j p_ij c_j                                          the personal model; c_j is client j's core model
    c_i ← c_i − γK p_ii g,   p_ij ← p_ij − β (⟨g, c_j⟩ + μ λ(r) (p_ij − p_j⁰)),   g = ∇L_i(x_i) on a batch

Both lines are taken at once in every local step. Client i keeps p_i to itself (the paper's directed relationship
vector) and uploads c_i only. p⁰ are the clients' shares of all rows, from which p_i starts. λ(r) = (1 + cos(πr/R))/2
for the first R rounds, then 0: the pull towards one model for all fades out.

Deviations. The step γ is multiplied by the number of clients K: p_ii starts at about 1/K, and a core model then moves
as in local training. The server sends all K core models, the client's own one too. p_i is not restricted to the
simplex, as in the paper; the weights of the record are its positive parts in proportion. The limit on downloads is left
out.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Each, Memory, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, personal_models, validated
from coterie.methods.collaboration.models import NEEDS, on_simplex, shares
from coterie.methods.shared.works import batches, own_rows
from coterie.settings import BatchSize, Count, NonNegative, Positive


class APPLEState(NamedTuple):
    """Core models [K, d], what clients keep (p_i and p⁰, both [K]), and rounds done."""

    C: Tensor
    kept: Memory
    rounds: int


@work("apple/combine-and-train", update=RESULT)
def combine_and_train(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The change of the client's core model; it keeps p_i."""
    (C, number), (p, anchor) = shared, private
    mine = torch.arange(len(C), device=C.device) == number
    start = core = C.index_select(0, number.reshape(1))[0]
    for batch in batches(own_rows(shard), static.batch, static.steps, draw):
        share = (p * mine).sum()
        g = shard.task.gradient(torch.where(mine, 0.0, p) @ C + share * core, batch)
        slope = torch.where(mine, core @ g, C @ g) + static.penalty * (p - anchor)
        core, p = core - static.step * share * g, p - static.weight_step * slope
    return core - start, (p, anchor)


@validated
def apple(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    weight_step: NonNegative = 0.01,
    penalty: NonNegative = 0.1,
    horizon: Count = 40,
) -> Method:
    """Learn, at every client, how to combine the core models of all clients into its own.

    Symbols: γ = step, β = weight_step, μ = penalty, R = horizon.

    Cost: 1 round per call of round; K d + 1 numbers down and d up per client, where K is the number of clients.

    Args:
        step: γ, step size of the core models; they move by γ K p_ii
        weight_step: β, step size of the weights p_i
        penalty: μ, pull of the weights towards the clients' shares of the rows
        horizon: R, rounds after which that pull has faded out

    Example:
        >>> from coterie.methods import apple
        >>> sorted(apple().needs)
        ['everyone', 'gradient']
    """
    local: dict[str, Any] = {"steps": local_steps, "batch": batch, "weight_step": weight_step}

    def init(problem: Problem, n: int) -> APPLEState:
        anchor = shares(problem.train.counts, problem.start)
        return APPLEState(problem.start.repeat(n, 1), Memory.start((anchor, anchor), n), 0)

    def round(fed: Federation, s: APPLEState, draw: Draw) -> APPLEState:
        fading = (1.0 + math.cos(math.pi * s.rounds / horizon)) / 2.0 if s.rounds < horizon else 0.0
        shared = (s.C, Each(torch.arange(fed.n, device=s.C.device)))
        at = draw.phase("walk")
        scaled = {"step": step * fed.n, "penalty": penalty * fading, **local}
        (moved, ids), kept = fed.gather(combine_and_train, shared, memory=s.kept, draw=at, **scaled)
        return APPLEState(s.C.index_add(0, ids, moved), kept, s.rounds + 1)

    def view(s: APPLEState) -> View:
        p = personal_models(s.kept)[0]
        return View(p @ s.C, on_simplex(p, torch.eye(len(s.C)).to(p)))

    return Method("apple", init, round, view, needs=NEEDS)
