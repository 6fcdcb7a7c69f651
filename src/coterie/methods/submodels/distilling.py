"""Shared by methods that distil on public rows: networks of every level, ensembles of clients, and soft labels.

A network of each level is a row of one tensor [levels, d], within the whole model, where its other kernels are 0. The
public rows have no labels; the server and the clients know them (`problem.public`), so they are never sent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.methods.base import Draw, Federation
from coterie.methods.shared.optimisers import UpdateRule
from coterie.methods.submodels.carving import NEEDS as TRAINS
from coterie.methods.submodels.carving import Local, alone, asked, by_level, learn
from coterie.numerics.derivatives import gradient
from coterie.problems.tasks.supervised import Supervised

NEEDS = TRAINS | {"public"}
Loss = Callable[..., Tensor]


class Trained(NamedTuple):
    """The networks that clients of one level send back, [c, k]."""

    level: int
    models: Tensor


def networks(task: Any, start: Tensor) -> Tensor:
    """A fresh network of each level, [levels, d]."""
    return torch.stack([alone(task, level, start) for level in range(len(task.shares))])


def index_of(task: Any, level: int) -> Tensor:
    """Where the network of a level lies in the whole one."""
    share = task.shares[level]
    return task.anatomy.index(task.anatomy.first(share), share)


def trained_by_level(fed: Federation, models: Tensor, levels: Tensor, draw: Draw, local: Local) -> list[Trained]:
    """One round: every client trains the network of its level."""
    task = fed.task

    def ask(level: int, group: Federation) -> Trained:
        theta = models[level, index_of(task, level)]
        change, _ = group.gather(learn, theta, draw=draw, level=level, scaled=False, **local._asdict())
        return Trained(level, theta + change)

    return asked(fed, by_level(levels), ask)


def averaged(task: Any, models: Tensor, found: list[Trained]) -> Tensor:
    """The networks of all levels, those that clients trained replaced by the mean of these."""
    for level, theirs in found:
        row = models[level].index_copy(0, index_of(task, level), theirs.mean(0))
        models = models.index_copy(0, torch.tensor([level], device=models.device), row[None])
    return models


def ensemble(task: Any, found: list[Trained], inputs: Tensor) -> Tensor:
    """The logits of every client's network, [c, rows, classes]."""
    models = [(task.at(level, scaled=False).model, theirs) for level, theirs in found]
    # one after the other: under vmap convolutions are grouped ones, several times as slow
    return torch.stack([model(theta, inputs) for model, theirs in models for theta in theirs])


def distilled(
    task: Supervised, theta: Tensor, inputs: Tensor, targets: list[Any], loss: Loss, settings: Local
) -> Tensor:
    """θ after one step per batch of inputs [steps, batch, …], with the teachers' labels of it."""

    def slope(x: Tensor, batch: tuple[Tensor, Any]) -> Tensor:
        rows, labels = batch
        return gradient(lambda at: loss(task.model(at, rows), labels), x)

    return UpdateRule(settings.rule, settings.step).along(theta, zip(inputs, targets, strict=True), slope)


def soft_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """−Σ_c q_c log softmax(outputs)_c, the mean over rows: KL(q ‖ p) but for a constant."""
    return -(labels * outputs.log_softmax(-1)).sum(-1).mean()


def public_batches(task: Any, settings: Local, draw: Draw) -> Tensor:
    """Batches of public rows with replacement, [steps, batch, …]."""
    return task.public[draw.batches(len(task.public), int(settings.batch), settings.steps)]
