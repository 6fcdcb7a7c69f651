"""Works and settings that several methods share."""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Batch, Rows, Shard, Static, moved_from, work
from coterie.federation.tree import Tree
from coterie.numerics import Draw


class LocalSteps(NamedTuple):
    """How clients train between two exchanges.

    Args:
        step: step size γ; in FedNest the total one, which is divided by the number of steps.
        steps: the number of steps τ; in FedNest one number, or one per client.
        batch: rows per step, or "all".
    """

    step: float
    steps: int | list[int]
    batch: int | str


def own_rows(shard: Shard) -> Rows:
    """The rows that the holder of a shard trains on: its training rows, or its validation rows if it has no others."""
    rows = shard.train if shard.train is not None else shard.valid
    if rows is None:
        raise ValueError("a shard without rows")
    return rows


def goal_rows(shard: Shard) -> Rows:
    """The rows that define the target's goal."""
    rows = shard.valid if shard.valid is not None else shard.train
    if rows is None:
        raise ValueError("a shard without rows")
    return rows


def draw_batch(rows: Rows, size: int | str, draw: Draw) -> Batch:
    """One batch, drawn with replacement, or all rows."""
    if isinstance(size, str):
        return rows.all()
    return rows.take(draw.batches(rows.count, size, 1)[0])


def own_loss(shard: Shard, theta: Tensor, size: int | str, draw: Draw) -> Tensor:
    """L_k(θ) on one batch of the holder's rows, or on all of them where size is "all"."""
    rows = own_rows(shard)
    if isinstance(size, str):
        return shard.task.full_loss(theta, rows)
    return shard.task.loss(theta, draw_batch(rows, size, draw))


def own_gradient(shard: Shard, theta: Tensor, size: int | str, draw: Draw) -> Tensor:
    """∇L_k(θ) on one batch of the holder's rows, or on all of them where size is "all"."""
    rows = own_rows(shard)
    if isinstance(size, str):
        return shard.task.full_gradient(theta, rows)
    return shard.task.gradient(theta, draw_batch(rows, size, draw))


def own_product(shard: Shard, theta: Tensor, v: Tensor, size: int | str, draw: Draw) -> Tensor:
    """∇²L_k(θ) v on one batch of the holder's rows, or on all of them where size is "all"."""
    rows = own_rows(shard)
    if isinstance(size, str):
        return shard.task.full_hvp(theta, v, rows)
    return shard.task.hvp(theta, v, draw_batch(rows, size, draw))


@work("shared/gradient", update=RESULT)
def gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """g_k(x): the gradient at x on one batch, or on all rows where static.batch is "all"."""
    return own_gradient(shard, shared, static.batch, draw)


@work("shared/goal-gradient", update=RESULT)
def goal_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇L_0(x) at the target, on one batch or on all its validation rows."""
    rows = goal_rows(shard)
    if static.batch == "all":
        return shard.task.full_gradient(shared, rows)
    return shard.task.gradient(shared, draw_batch(rows, static.batch, draw))


@work("shared/local-steps", update=moved_from())
def local_sgd(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """static.steps steps of (mini-batch) gradient descent from x on the holder's own rows."""
    x, rows = shared, own_rows(shard)
    if static.batch == "all":
        for i in range(static.steps):
            x = torch.sub(x, shard.task.full_gradient(x, rows.step(i)), alpha=static.step)
        return x
    for index in draw.batches(rows.count, static.batch, static.steps):
        x = torch.sub(x, shard.task.gradient(x, rows.take(index)), alpha=static.step)
    return x


@work("shared/goal-loss-and-gradient", update=RESULT)
def goal_loss_and_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """L_0(x) and ∇L_0(x) at the target, on all its validation rows."""
    rows = goal_rows(shard)
    return shard.task.full_loss(shared, rows), shard.task.full_gradient(shared, rows)
