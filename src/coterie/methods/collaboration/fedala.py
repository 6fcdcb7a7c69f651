"""FedALA (Zhang et al. 2023, AAAI): clients mix the global model into their own, entry by entry, before local steps.

    x̂_i = x_i + A_i ⊙ (x − x_i),   A_i ← clip(A_i − η ∇L_i(x̂_i) ⊙ (x − x_i), 0, 1),   x_i = x̂_i after local steps
    x ← Σ_i n_i x_i / Σ_i n_i

A_i starts at 1 and has entries in the last `layers` parameter tensors only; below them the global model is taken as it
is. It is learned on batches of the client's training rows: `first_steps` steps in the second round (in the first, x and
x_i are equal and nothing can be learned), `weight_steps` later.

Deviations. The paper learns A_i in the second round until the loss stands still, later for one pass over a share of the
client's rows; here both are numbers of steps, on batches drawn with replacement. Judged are the clients' models after
their local steps.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.federation import Memory, Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, personal_models, validated
from coterie.methods.collaboration.models import NEEDS
from coterie.methods.shared.works import batches, local_sgd, own_rows
from coterie.settings import BatchSize, Count, NonNegative, Positive


class FedALAState(NamedTuple):
    """The global model [d], what clients keep (their model and A_i, both [d]), and rounds done."""

    x: Tensor
    kept: Memory
    rounds: int


@work("fedala/mix-and-train", update=moved_from())
def mix_and_train(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The client's model after local steps from x̂_i; it keeps that model and A_i."""
    x, (own, weights) = shared, private
    learned = torch.arange(len(x), device=x.device) >= len(x) - static.entries
    for batch in batches(own_rows(shard), static.batch, static.weight_steps, draw.phase("weights")):
        slope = shard.task.gradient(torch.lerp(own, x, weights), batch) * (x - own)
        weights = torch.where(learned, (weights - static.weight_step * slope).clamp(0.0, 1.0), weights)
    after = local_sgd(shard, torch.lerp(own, x, weights), None, static, draw)
    return after, (after, weights)


@validated
def fedala(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    layers: Count | None = 2,
    weight_step: NonNegative = 1.0,
    weight_steps: Count = 5,
    first_steps: Count = 50,
) -> Method:
    """Mix the global model into each client's own with weights per parameter, learned on the client's rows.

    Symbols: γ = step, η = weight_step.

    Cost: 1 round per call of round; d numbers each way per client.

    Args:
        layers: how many of the last parameter tensors have weights (a layer's matrix and its offset are two); all if
            not set
        weight_step: η, step size of the weights A_i
        weight_steps: steps on the weights per round
        first_steps: steps on the weights in the second round

    Example:
        >>> from coterie.methods import fedala
        >>> fedala(layers=4).settings["layers"]
        4
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch, "weight_step": weight_step}

    def init(problem: Problem, n: int) -> FedALAState:
        x = problem.start
        return FedALAState(x, Memory.start((x, torch.ones_like(x)), n), 0)

    def round(fed: Federation, s: FedALAState, draw: Draw) -> FedALAState:
        settings = {**local, "weight_steps": first_steps if s.rounds == 1 else weight_steps}
        settings |= {"entries": last_entries(fed.task.model, s.x, layers)}
        sizes, at = fed.sizes.to(s.x), draw.phase("walk")
        x, kept = fed.mean(mix_and_train, s.x, weights=sizes, memory=s.kept, draw=at, **settings)
        return FedALAState(x, kept, s.rounds + 1)

    return Method("fedala", init, round, lambda s: View(personal_models(s.kept)[0]), needs=NEEDS)


def last_entries(model: Any, x: Tensor, layers: int | None) -> int:
    """How many entries of x the last parameter tensors of a model have."""
    if layers is None:
        return len(x)
    return sum(part.numel() for part in list(model.unflatten(x).values())[-layers:])
