"""Models that are judged at every client, each on its own rows: where everybody is a target."""

import math
from typing import Any

import torch
from torch import Tensor

from coterie.federation import Call, Each, LocalEngine, Shard, Stack, Static, work
from coterie.federation.tree import Tree
from coterie.numerics import Draw

MEMORY = 1 << 28  # bytes that the clients which are judged at once may take


@work("measures/judged", update=None)
def judged(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """Loss and accuracy of a client's model on its rows."""
    return shard.task.judge(shared, shard.train)


def judge(task: Any, models: Tensor, stack: Stack) -> Tensor:
    """Losses and accuracies, [K, 2], of the clients' models [K, d] (or of one for all, [d]), each on its own rows."""
    chunk = max(1, MEMORY // max(1, task.footprint(stack.client(0), stack.capacity)))
    engine = LocalEngine(task, stack, None, None, chunk=chunk)
    shared = Each(models) if models.dim() == 2 else models
    call = Call(judged, shared, None, Static(), Draw.of(0, device=models.device))
    everyone = torch.arange(len(stack), device=models.device)
    with torch.no_grad():
        return torch.cat([replies.values for replies in engine.execute(call, everyone)])


def personal_measures(task: Any, models: Tensor, stack: Stack, prefix: str) -> dict[str, float]:
    """Loss and, for classes, accuracy: mean, median and worst tenth over the clients, and the worst accuracy."""
    losses, accuracies = judge(task, models, stack).cpu().double().unbind(1)
    measures = over_clients(f"{prefix}_loss", losses, worst_first=True)
    if task.classes is not None:
        measures |= over_clients(f"{prefix}_accuracy", accuracies, worst_first=False)
        measures |= {f"{prefix}_accuracy_worst": float(accuracies.min())}
    return measures


def over_clients(name: str, values: Tensor, *, worst_first: bool) -> dict[str, float]:
    """The mean over clients, the median, and the mean of the worst 10 % of them (at least one client).

    Args:
        name: of the mean; the others are `name_median` and `name_tenth`.
        values: one per client.
        worst_first: whether the largest value is the worst one.

    Example:
        >>> over_clients("loss", torch.arange(20.0), worst_first=True)
        {'loss': 9.5, 'loss_median': 9.5, 'loss_tenth': 18.5}
    """
    ordered = values.sort(descending=worst_first).values
    tenth = ordered[: max(1, math.ceil(len(values) / 10))]
    figures = {"": values.mean(), "_median": values.quantile(0.5), "_tenth": tenth.mean()}
    return {f"{name}{which}": float(value) for which, value in figures.items()}


def group_weights(weights: Tensor, groups: Tensor) -> dict[str, float]:
    """How much of a row of the collaboration matrix lies within the client's own group: on average, and at least."""
    inside = (weights.cpu().double() * (groups[:, None] == groups).cpu()).sum(1)
    return {"group_weight": float(inside.mean()), "group_weight_least": float(inside.min())}
