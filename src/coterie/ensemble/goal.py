"""What is predicted: classes, a number, or a time with an event; and how predictions are judged and mixed.

A model gives *scores* [n, q]: logits of classes, a number, or logarithms of the hazard that each of T intervals of time
adds up to. Of scores follows a *distribution*: probabilities of classes [n, C], the number [n, 1], or probabilities
[n, T + 1] that the event falls into an interval or later. Distributions of several models are mixed by weights on the
simplex.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import softmax

LEAST = 1e-4  # a probability is never taken for smaller: one confident error would decide everything
MOST_INTERVALS, EVENTS = 8, 5  # of time, and events of one's own that each of them has at least
WIDEST = 30.0  # logits beyond these are rounding


class Goal(NamedTuple):
    """The kind of a label.

    Args:
        classes: how many there are; 0 for a number or a time.
        edges: the ends of the intervals of a time; none for classes and numbers.

    Example:
        >>> Goal(classes=2).outputs, Goal().outputs, Goal(edges=(1.0, 5.0)).outputs
        (2, 1, 2)
    """

    classes: int = 0
    edges: tuple[float, ...] = ()

    @staticmethod
    def of(labels: np.ndarray, classes: int | None, *, times: bool) -> "Goal":
        """The goal of one's own labels.

        Args:
            labels: classes, numbers, or times with a minus where the row was censored.
            classes: how many there are; None for numbers and times.
            times: whether labels are times.
        """
        if not times:
            return Goal(classes or 0)
        events = labels[labels > 0]
        count = min(MOST_INTERVALS, max(2, len(events) // EVENTS))
        return Goal(0, tuple(np.unique(np.quantile(events, np.linspace(0.0, 1.0, count + 1)[1:])).tolist()))

    @property
    def outputs(self) -> int:
        """How many scores a row has."""
        return self.classes or len(self.edges) or 1

    def distribution(self, scores: np.ndarray) -> np.ndarray:
        """Probabilities (or the number) of scores [..., n, q]."""
        if self.classes:
            return np.asarray(softmax(np.clip(scores, -WIDEST, WIDEST), axis=-1))
        if not self.edges:
            return scores
        survival = np.exp(-np.cumsum(np.exp(np.clip(scores, -WIDEST, WIDEST)), axis=-1))
        before = np.concatenate([np.ones_like(survival[..., :1]), survival[..., :-1]], axis=-1)
        return np.concatenate([before - survival, survival[..., -1:]], axis=-1)

    def scores(self, distribution: np.ndarray) -> np.ndarray:
        """The inverse of `distribution`."""
        if self.classes:
            return np.log(np.clip(distribution, LEAST, None))
        if not self.edges:
            return distribution
        at_risk = np.cumsum(distribution[..., ::-1], axis=-1)[..., ::-1]
        hazard = np.clip(distribution[..., :-1] / np.clip(at_risk[..., :-1], LEAST, None), LEAST, 1.0 - LEAST)
        return np.log(-np.log1p(-hazard))

    def types(self, labels: np.ndarray) -> np.ndarray:
        """By row, the column of `losses_by_type` that is its loss."""
        if self.classes:
            return labels.astype(int)
        interval = np.searchsorted(self.edges, np.abs(labels))
        return np.where(labels > 0, interval, len(self.edges) + 1 + interval)

    def losses_by_type(self, distribution: np.ndarray) -> np.ndarray:
        """What the loss of each row would be with each type of label, [n, types]; for classes and times."""
        if not self.edges:
            return -np.log(np.clip(distribution, LEAST, None))
        later = np.cumsum(distribution[:, ::-1], axis=1)[:, ::-1]
        return -np.log(np.clip(np.concatenate([distribution, later], axis=1), LEAST, None))

    def losses(self, distribution: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The loss of each row [n]: minus the logarithm of the likelihood, or the squared error."""
        if not self.classes and not self.edges:
            return np.square(distribution[:, 0] - labels)
        return self.losses_by_type(distribution)[np.arange(len(labels)), self.types(labels)]

    def predictions(self, distribution: np.ndarray) -> np.ndarray:
        """What measures take (scores.py): probabilities, the number, or a risk [..., n, 1] for times."""
        if not self.edges:
            return distribution
        return -np.cumsum(distribution[..., ::-1], axis=-1)[..., ::-1][..., 1:].sum(-1, keepdims=True)

    def columns(self, scores: np.ndarray) -> np.ndarray:
        """What a model says of each row, as columns that another model can take, [n, e]."""
        if self.classes == 2:
            return scores[:, 1:] - scores[:, :1]
        if self.classes:
            return scores - scores.mean(1, keepdims=True)
        return scores.mean(1, keepdims=True)

    def expanded(self, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of times: a row for each interval that a row enters, its interval, and whether the event happened in it."""
        interval, T = np.searchsorted(self.edges, np.abs(labels)), len(self.edges)
        entered = np.where(labels > 0, np.minimum(interval + 1, T), np.minimum(interval, T))
        rows = np.repeat(np.arange(len(labels)), entered)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(entered) - entered, entered)
        return rows, place, (labels[rows] > 0) & (place == interval[rows])
