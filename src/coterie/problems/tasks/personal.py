"""Models that are judged at every client, each on its own rows: where everybody is a target."""

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
    """Loss and, for classes, accuracy: the mean over clients, and the accuracy of the one worst off."""
    losses, accuracies = judge(task, models, stack).cpu().double().unbind(1)
    measures = {f"{prefix}_loss": float(losses.mean())}
    if task.classes is not None:
        measures |= {f"{prefix}_accuracy": float(accuracies.mean())}
        measures |= {f"{prefix}_accuracy_worst": float(accuracies.min())}
    return measures


def group_weights(weights: Tensor, groups: Tensor) -> dict[str, float]:
    """How much of a row of the collaboration matrix lies within the client's own group: on average, and at least."""
    inside = (weights.cpu().double() * (groups[:, None] == groups).cpu()).sum(1)
    return {"group_weight": float(inside.mean()), "group_weight_least": float(inside.min())}
