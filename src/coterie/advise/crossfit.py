"""Every step of the decision without each fold of my rows, which judges it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coterie.ensemble.goal import Goal
from coterie.ensemble.models import Model, fit_linear, held_out
from coterie.ensemble.stack import mean_columns
from coterie.ensemble.weights import admitted, mixed, permutation_z, recalibrated, weights_of

Fit = Callable[[np.ndarray, np.ndarray], Model]


@dataclass(frozen=True)
class Rows:
    """My rows and how my J models are fitted; what the models of K partners say of my rows, [K][J] of [n, q]."""

    goal: Goal
    inputs: np.ndarray
    labels: np.ndarray
    fits: tuple[Fit, ...]
    scores: tuple[tuple[np.ndarray, ...], ...]
    penalty: float

    def z(self, masks: np.ndarray) -> np.ndarray:
        """Of every partner's models against permuted labels, on the rows of each mask, [K, J, B]."""
        shape = (len(self.scores), len(self.fits), len(masks))
        found = [
            permutation_z(self.goal, self.goal.distribution(s), self.labels, masks)
            for models in self.scores
            for s in models
        ]
        return np.array(found).reshape(shape)


class CrossFit(NamedTuple):
    """Held-out distributions by one dealing of folds: my models and, last, their stack [J + 1, n, …]; the stack with
    the partners [n, …]; with each of them alone beside me [K, n, …]; and the model "together" [n, …]."""

    own: np.ndarray
    stack: np.ndarray
    pairs: np.ndarray
    together: np.ndarray


def cross_fitted(rows: Rows, folds: np.ndarray) -> CrossFit:
    """Gate, recalibrate, weigh and predict, without each fold.

    Args:
        rows: mine, and the partners' scores of them.
        folds: of each row.
    """
    goal, y = rows.goal, rows.labels
    masks = folds[None] != np.unique(folds)[:, None]
    own = np.stack([goal.distribution(held_out(rows.inputs, y, goal, folds, fit)) for fit in rows.fits])
    z = rows.z(masks)
    gates = [admitted(z[:, :, f]) for f in range(len(masks))]
    theirs = [rescaled(goal, models, y, masks) for models in rows.scores]
    together = _together(rows, masks, gates, own[0])

    def stacked(problems: Sequence[np.ndarray]) -> np.ndarray:
        """Members [M, n, …] of each fold's problem, weighed without the fold, on the fold."""
        result = np.zeros_like(own[0])
        for members, mask in zip(problems, masks, strict=True):
            weights = weights_of(goal, members[None], y, mask[None])[0]
            result[~mask] = mixed(weights, members[:, ~mask])
        return result

    def beside(f: int, gate: np.ndarray) -> np.ndarray:
        inside = [theirs[k][:, f] for k in np.flatnonzero(gate)]
        return np.concatenate([own, *inside, together[None]]) if inside else own

    pairs = [stacked([np.concatenate([own, one[:, f]]) for f in range(len(masks))]) for one in theirs]
    return CrossFit(
        np.concatenate([own, stacked([own] * len(masks))[None]]),
        stacked([beside(f, gate) for f, gate in enumerate(gates)]),
        np.array(pairs).reshape(len(pairs), *own[0].shape),
        together,
    )


def rescaled(goal: Goal, models: Sequence[np.ndarray], labels: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """The distributions of a partner's models, recalibrated on the rows of each mask, [J, B, n, …].

    Args:
        goal: the kind of the label.
        models: the scores of each.
        labels: mine.
        masks: which rows each recalibration sees.
    """
    found = []
    for scores in models:
        levels, slopes = recalibrated(goal, scores, labels, masks)
        found.append(goal.distribution(levels[:, None] + slopes[:, None, None] * scores))
    return np.stack(found)


def _together(rows: Rows, masks: np.ndarray, gates: Sequence[np.ndarray], alone: np.ndarray) -> np.ndarray:
    """My linear model with the admitted partners' mean scores as columns; without any, my linear model."""
    found = np.array(alone)
    for mask, gate in zip(masks, gates, strict=True):
        inside = [rows.scores[k] for k in np.flatnonzero(gate)]
        if inside:
            x = np.hstack([rows.inputs, *mean_columns(rows.goal, inside)])
            model = fit_linear(x[mask], rows.labels[mask], rows.goal, rows.penalty)
            found[~mask] = rows.goal.distribution(model.scores(x[~mask], rows.goal))
    return found
