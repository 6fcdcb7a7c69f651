"""What a partner sends, once: its two models and a summary of its columns, all of it bounded arrays of numbers.

The work below runs where the rows are. What comes back is data: shapes, sizes and nodes are checked before anything is
evaluated, and nothing in it is run.
"""

from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata

from coterie.ensemble.goal import Goal
from coterie.ensemble.models import (
    LEAST_LEAF,
    NODES,
    Linear,
    Model,
    Trees,
    chosen_penalty,
    fit_linear,
    fit_trees,
    trees_of,
)
from coterie.errors import CoterieError
from coterie.federation import Shard, Static, work
from coterie.federation.tree import Tree
from coterie.numerics import Draw

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
KEPT_OUT = 4  # one row in so many judges the partner's own trees
PENALTY_FOLDS = 3
LARGEST = 1e30  # of any number in a message; inputs are cut to it, too (prepare.py)
DTYPES = (torch.float64, torch.float32, torch.int16, torch.int32, torch.int64)
SAMPLED = 20_000  # rows that a summary and held-out losses are taken of


class Summary(NamedTuple):
    """Of a partner's columns: quantiles [p, 5], shares of missing values [p], rank correlations [p + 1, p + 1], the
    label's last, and the most frequent value of each column with its share, [p, 2]."""

    quantiles: np.ndarray
    missing: np.ndarray
    correlations: np.ndarray
    frequent: np.ndarray


class Message(NamedTuple):
    """A partner's models, the mean held-out loss of its trees (of times: its linear model) on its own rows, that of
    knowing no column, how many rows there are, and the summary."""

    linear: Linear
    trees: Trees
    held_out: float
    blind: float
    rows: int
    summary: Summary

    def models(self, goal: Goal) -> tuple[Model, ...]:
        """Those that take part: of times there are no trees."""
        return (self.linear,) if goal.edges else (self.linear, self.trees)


class BadMessage(CoterieError):
    """A message that is not what was asked for."""


def dealt(labels: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """The fold of each row, at random, so that every fold has its share of each class (of small and large numbers).

    Args:
        labels: [n].
        folds: how many.
        seed: of the order.
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    alike = labels
    if 2 * len(np.unique(labels)) > len(labels):  # numbers: neighbours are alike, or their order would leave no chance
        alike = np.argsort(np.argsort(labels, kind="stable")) // folds
    order = order[np.argsort(alike[order], kind="stable")]
    found = np.empty(len(labels), dtype=int)
    found[order] = np.arange(len(labels)) % folds
    return found


def summary_of(inputs: np.ndarray, labels: np.ndarray) -> Summary:
    """The summary of some rows.

    Args:
        inputs: [n, p], NaN where missing.
        labels: [n].
    """
    n, p = inputs.shape
    quantiles, frequent, ranks = np.zeros((p, len(QUANTILES))), np.zeros((p, 2)), np.zeros((n, p + 1))
    for j, column in enumerate(inputs.T):
        known = column[~np.isnan(column)]
        if len(known):
            quantiles[j] = np.quantile(known, QUANTILES)
            values, counts = np.unique(known, return_counts=True)
            frequent[j] = values[counts.argmax()], counts.max() / n
            ranks[:, j] = rankdata(np.where(np.isnan(column), quantiles[j, 2], column))
    ranks[:, p] = rankdata(labels)
    ranks -= ranks.mean(0)
    norm = np.sqrt(np.square(ranks).sum(0))
    scaled = ranks / np.where(norm > 0, norm, 1.0)
    return Summary(quantiles, np.isnan(inputs).mean(0), scaled.T @ scaled, frequent)


def message_of(inputs: np.ndarray, labels: np.ndarray, goal: Goal, leaf: int) -> Message:
    """What a partner with these rows sends.

    Args:
        inputs: [n, p], NaN where missing.
        labels: [n], in the target's classes or units.
        goal: the target's kind of label.
        leaf: fewest rows of a leaf.
    """
    folds = dealt(labels, PENALTY_FOLDS, 0)
    linear = fit_linear(inputs, labels, goal, chosen_penalty(inputs, labels, goal, folds))
    trees = fit_trees(inputs, labels, goal, leaf=leaf)
    some = np.linspace(0, len(labels) - 1, min(len(labels), SAMPLED)).astype(int)
    x, y = inputs[some], labels[some]
    out = dealt(y, KEPT_OUT, 1) == 0
    kept = ~out if len(y) > 1 else out
    judged = fit_linear(x[kept], y[kept], goal) if goal.edges else fit_trees(x[kept], y[kept], goal, leaf=leaf)
    scores = judged.scores(x[out], goal)
    blind = fit_linear(np.zeros((int(kept.sum()), 1)), y[kept], goal).scores(np.zeros((int(out.sum()), 1)), goal)
    loss, least = (float(goal.losses(goal.distribution(each), y[out]).mean()) for each in (scores, blind))
    return Message(linear, trees, loss, least, len(labels), summary_of(x, y))


@work("advise/message", update=None, mode="sequential")
def message(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """A partner's message as tensors; settings are the classes and the fewest rows of a leaf, shared are the edges.

    Whoever asks may want larger leaves, never smaller ones: a leaf of one row is that row.
    """
    assert shard.train is not None
    batch = shard.train.all()
    goal, leaf = Goal(static.classes, tuple(shared.tolist())), max(LEAST_LEAF, static.leaf)
    with np.errstate(all="ignore"):
        sent = message_of(batch.inputs.double().numpy(), batch.labels.double().numpy(), goal, leaf)
    numbers = np.array([sent.held_out, sent.blind, sent.rows])
    return tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in (*sent.linear, *sent.trees, numbers, *sent.summary))


def received(tensors: Tree, goal: Goal, columns: int) -> Message:
    """A message that came from elsewhere, or `BadMessage`.

    Args:
        tensors: as the work returns them.
        goal: the target's kind of label.
        columns: how many inputs there are.
    """
    if not all(isinstance(t, torch.Tensor) and t.dtype in DTYPES for t in tensors):
        raise BadMessage("its message holds something that is no table of numbers")
    arrays = [np.asarray(t.numpy()) for t in tensors]
    outputs = goal.classes or 1
    count = trees_of(goal)
    wanted: tuple[tuple[int, ...], ...] = ((outputs, columns), (goal.outputs,), (columns,), *5 * ((count, NODES),))
    wanted += ((goal.classes if goal.classes > 2 else 1,), (columns,), (3,))
    wanted += ((columns, len(QUANTILES)), (columns,), (columns + 1, columns + 1), (columns, 2))
    shapes = tuple(array.shape for array in arrays)
    if shapes != wanted:
        odd = next(
            (pair for pair in zip(shapes, wanted, strict=False) if pair[0] != pair[1]), (len(shapes), len(wanted))
        )
        raise BadMessage(f"its message has a part of shape {odd[0]} where {odd[1]} was asked for")
    if not all(np.isfinite(array).all() and (np.abs(array) <= LARGEST).all() for array in arrays):
        raise BadMessage("its message holds numbers that are not finite or too large")
    linear, trees = Linear(*arrays[:3]), Trees(*arrays[3:10])
    try:
        check_trees(trees, columns)
    except ValueError as error:
        raise BadMessage(f"its message: {error}") from None
    held_out, blind, rows = arrays[10].tolist()
    return Message(linear, trees, held_out, blind, int(max(1, rows)), Summary(*arrays[11:]))


def check_trees(trees: Trees, columns: int) -> None:
    """Raise `ValueError` unless every node is a number that leads to later ones only and looks at columns that exist.

    Args:
        trees: arrays that came from elsewhere.
        columns: how many columns there are.
    """
    nodes = trees.feature.shape[1]
    if any(array.dtype.kind != "i" for array in (trees.feature, trees.left, trees.right)):
        raise ValueError("a tree has nodes that are no whole numbers")
    inner, place = trees.feature >= 0, np.arange(nodes)
    follows = (trees.left > place) & (trees.right > place) & (trees.left < nodes) & (trees.right < nodes)
    if (inner & ~follows).any() or (trees.feature >= columns).any():
        raise ValueError("a tree has nodes that do not follow each other, or columns that do not exist")
