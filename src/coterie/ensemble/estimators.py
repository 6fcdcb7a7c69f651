"""Any estimator with `fit` and `predict_proba` (or `predict`) as one more model of everybody, in one process."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from coterie.ensemble.goal import Goal
from coterie.ensemble.models import filled, medians
from coterie.errors import UsageError


class Estimator(Protocol):
    """As scikit-learn has them."""

    def fit(self, inputs: Any, labels: Any) -> Any:
        """Learn from rows."""


class Fitted(NamedTuple):
    """A fitted estimator; it lives in this process only."""

    estimator: Any
    fill: np.ndarray

    def scores(self, inputs: np.ndarray, goal: Goal) -> np.ndarray:
        """Of rows [n, p]: [n, q]."""
        x = filled(inputs, self.fill)
        if not goal.classes:
            return np.asarray(self.estimator.predict(x), dtype=float).reshape(-1, 1)
        found = np.zeros((len(x), goal.classes))
        found[:, np.asarray(self.estimator.classes_, dtype=int)] = self.estimator.predict_proba(x)
        return goal.scores(found)


def fit_estimator(estimator: Estimator, inputs: np.ndarray, labels: np.ndarray, goal: Goal) -> Fitted:
    """A copy of the estimator, fitted on some rows.

    Args:
        estimator: not changed.
        inputs: [n, p], NaN where missing; medians are filled in.
        labels: [n].
        goal: the kind of the label.
    """
    from sklearn.base import clone

    if goal.edges:
        raise UsageError("models of your own cannot take part for a time with an event; leave models out.")
    fill = medians(inputs)
    return Fitted(clone(estimator).fit(filled(inputs, fill), labels.astype(int) if goal.classes else labels), fill)
