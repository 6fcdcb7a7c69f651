"""Has a partner a copy of my rows? Then its linear model is mine, up to much less than a fold of my rows changes it."""

from typing import NamedTuple

import numpy as np

from coterie.ensemble.goal import Goal
from coterie.ensemble.message import dealt
from coterie.ensemble.models import PENALTIES, Linear, fit_linear

FOLDS = 5
NEAR = 0.05  # of the distance by which my model moves without a fold; other people's models are at 1 and more
TINY = 1e-12


class OwnLines(NamedTuple):
    """Scores of my rows by my linear models with each penalty, and how far they move without a fold of my rows."""

    scores: list[np.ndarray]
    moved: list[float]

    @staticmethod
    def of(goal: Goal, inputs: np.ndarray, labels: np.ndarray) -> "OwnLines":
        """Those of my rows.

        Args:
            goal: the kind of the label.
            inputs: my rows.
            labels: mine.
        """
        folds, scores, moved = dealt(labels, FOLDS, 0), [], []
        for penalty in PENALTIES:
            whole = fit_linear(inputs, labels, goal, penalty).scores(inputs, goal)
            kept = (folds != f for f in range(FOLDS))
            parts = [fit_linear(inputs[k], labels[k], goal, penalty).scores(inputs, goal) for k in kept]
            scores.append(whole)
            moved.append(float(np.mean([apart(part, whole) for part in parts])))
        return OwnLines(scores, moved)

    def are(self, goal: Goal, linear: Linear, inputs: np.ndarray) -> bool:
        """Whether a partner's linear model is one of them, so that it was fitted on my rows.

        Args:
            goal: the kind of the label.
            linear: the partner's.
            inputs: my rows.
        """
        theirs = linear.scores(inputs, goal)
        pairs = zip(self.scores, self.moved, strict=True)
        return any(moved > TINY and apart(theirs, mine) < NEAR * moved for mine, moved in pairs)


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """1 minus the squared correlation of two models' scores, whatever their level and slope.

    Args:
        one: scores [n, q].
        other: the same.
    """
    a, b = one - one.mean(0), other - other.mean(0)
    size = float((a * a).sum() * (b * b).sum())
    return 1.0 - float((a * b).sum()) ** 2 / size if size > TINY else 1.0
