"""Models by scikit-learn that the references are made of: linear ones and boosted trees of classes, numbers and times.

A prediction is one row of probabilities per row, of classes or of intervals of time (the last one: later than all), or
one number per row. Times have a linear model only, of Cox: at a few hundred rows trees lose to it.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.stats import rankdata
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import KFold, StratifiedKFold

from benchmarks.tables.sources import Columns, Table, is_number

STRENGTHS = (0.03, 0.3, 3.0)  # inverse penalties
TREES = {"max_iter": 80, "max_leaf_nodes": 15, "learning_rate": 0.08, "min_samples_leaf": 20, "early_stopping": False}
INTERVALS = 10
LEAST = 1e-6  # a probability; then the logarithm of a wrong certainty is finite
REPEATS, FOLDS = 2, 5
Predict = Callable[[np.ndarray], np.ndarray]
Fit = Callable[["Task", np.ndarray, np.ndarray], Predict]


class Encoder:
    """Rows as numbers by what some rows have: standardised, words one-hot.

    Args:
        rows: the rows that decide.
        names: the columns.
        fill: missing numbers become the mean; else they stay NaN.
    """

    def __init__(self, rows: Columns, names: list[str], *, fill: bool = True) -> None:
        self.names, self.fill = names, fill
        self.known: dict[str, Any] = {}
        for name in names:
            values = rows[name]
            if is_number(values):
                found = values[np.isfinite(values)]
                spread = float(found.std()) if len(found) else 0.0
                self.known[name] = (float(found.mean()) if len(found) else 0.0, spread or 1.0)
            else:
                self.known[name] = np.unique(values)

    def __call__(self, rows: Columns) -> np.ndarray:
        """[n, columns]."""
        parts = []
        for name in self.names:
            values, known = rows[name], self.known[name]
            if is_number(values):
                scaled = ((values - known[0]) / known[1])[:, None]
                parts.append(np.nan_to_num(scaled) if self.fill else scaled)
            else:
                parts.append((values[:, None] == known[None]).astype(float))
        return np.concatenate(parts, 1)


class Task(NamedTuple):
    """What is predicted: codes of classes, numbers, or times as [n, 3]: interval, 1 with the event, and time."""

    kind: str
    label: str
    classes: tuple[str, ...] = ()
    event: str = ""
    edges: tuple[float, ...] = ()

    def targets(self, rows: Columns) -> np.ndarray:
        """The labels in the form that models are fitted to."""
        found = rows[self.label]
        if self.kind == "times":
            return np.stack([np.searchsorted(self.edges, found), rows[self.event], found], 1)
        return found if self.kind == "numbers" else np.searchsorted(self.classes, found.astype(str))

    def losses(self, predicted: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The loss of every row: squared error, or minus the logarithm of what was said of what came."""
        return (predicted - y) ** 2 if self.kind == "numbers" else -np.log(self.likelihood(predicted, y))

    def likelihood(self, predicted: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The probability that a prediction gives to what came; of a row without its event, to all that can follow."""
        rows = np.arange(len(y))
        if self.kind == "classes":
            return predicted[rows, y].clip(LEAST)
        after, interval = predicted[:, ::-1].cumsum(1)[:, ::-1], y[:, 0].astype(int)
        return np.where(y[:, 1] == 1, predicted[rows, interval], after[rows, interval]).clip(LEAST)


def task_of(table: Table, own: Columns) -> Task:
    """The task; intervals end at quantiles of my own times with an event."""
    if table.kind != "times":
        return Task(table.kind, table.label, tuple(table.classes))
    times = own[table.label][own[table.event] == 1]
    edges = np.unique(np.quantile(times, np.arange(1, INTERVALS + 1) / INTERVALS)) if len(times) else np.ones(1)
    return Task(table.kind, table.label, (), table.event, tuple(edges))


def linear(task: Task, x: np.ndarray, y: np.ndarray, strength: float = STRENGTHS[1]) -> Predict:
    """Logistic or ridge regression, or Cox's model, with one penalty."""
    if task.kind == "times":
        return cox(task, x, y, strength)
    if task.kind == "numbers":
        return Ridge(alpha=3.0 / strength).fit(x, y).predict
    return _shares(LogisticRegression(C=strength, max_iter=200), x, y, len(task.classes))


def trees(task: Task, x: np.ndarray, y: np.ndarray) -> Predict:
    """Boosted trees, of classes or numbers."""
    if task.kind == "numbers":
        return HistGradientBoostingRegressor(random_state=0, **TREES).fit(x, y).predict
    return _shares(HistGradientBoostingClassifier(random_state=0, **TREES), x, y, len(task.classes))


def _shares(model: Any, x: np.ndarray, y: np.ndarray, width: int) -> Predict:
    """Probabilities of all classes, also of those that have no row."""
    known = np.unique(y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = model.fit(x, y) if len(known) > 1 else None

    def predict(rows: np.ndarray) -> np.ndarray:
        shares = np.full((len(rows), width), LEAST)
        shares[:, known] = fitted.predict_proba(rows) if fitted else 1.0
        return shares / shares.sum(1, keepdims=True)

    return predict


def cox(task: Task, x: np.ndarray, y: np.ndarray, strength: float) -> Predict:
    """Relative risks by the partial likelihood with a ridge, and Breslow's baseline; ties as Breslow."""
    order = np.argsort(-y[:, 2], kind="stable")
    x, event, time = x[order], y[order, 1], y[order, 2]
    last = np.searchsorted(-time, -time, side="right") - 1  # who is at risk: all rows up to here

    def loss(slope: np.ndarray) -> tuple[float, np.ndarray]:
        score = x @ slope
        risk = np.exp(score - score.max())
        total, weighted = risk.cumsum()[last], (risk[:, None] * x).cumsum(0)[last]
        value = event @ (np.log(total) + score.max() - score) + slope @ slope / (2 * strength)
        return value, event @ (weighted / total[:, None] - x) + slope / strength

    slope = minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x
    jumps = event / np.exp(x @ slope).cumsum()[last]
    baseline = np.array([jumps[time <= edge].sum() for edge in task.edges])

    def predict(rows: np.ndarray) -> np.ndarray:
        left = np.exp(-np.exp((rows @ slope).clip(-20, 20))[:, None] * baseline)
        return -np.diff(left, axis=1, prepend=1.0, append=0.0)

    return predict


def folds(task: Task, y: np.ndarray, repeats: int = REPEATS) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows to fit and rows held out, with the same share of every class or of events where there are enough."""
    codes = y[:, 1] if task.kind == "times" else y
    even = task.kind != "numbers" and np.unique(codes, return_counts=True)[1].min() >= FOLDS
    for seed in range(repeats):
        yield from (StratifiedKFold if even else KFold)(FOLDS, shuffle=True, random_state=seed).split(codes, codes)


def tuned(task: Task, x: np.ndarray, y: np.ndarray) -> Fit:
    """The linear model with the penalty that is best held out."""
    losses = np.zeros(len(STRENGTHS))
    for fit, held in folds(task, y, 1):
        for k, strength in enumerate(STRENGTHS):
            losses[k] += task.losses(linear(task, x[fit], y[fit], strength)(x[held]), y[held]).sum()
    best = STRENGTHS[int(losses.argmin())]
    return lambda task, x, y: linear(task, x, y, best)


def measure(task: Task, predicted: np.ndarray, y: np.ndarray) -> float:
    """AUC, the mean over classes of each against the rest; R²; or Harrell's C, of numbers that are larger the later."""
    if task.kind == "numbers":
        return float(1.0 - ((predicted - y) ** 2).mean() / y.var())
    if task.kind == "times":
        return concordance(predicted if predicted.ndim == 1 else predicted @ np.arange(predicted.shape[1]), y)
    return float(np.mean([auc(predicted[:, k], y == k) for k in np.unique(y)]))


def auc(score: np.ndarray, positive: np.ndarray) -> float:
    """The area under the curve; one half where there is one class."""
    count, ranks = int(positive.sum()), rankdata(score)[positive].sum()
    others = len(positive) - count
    return float((ranks - count * (count + 1) / 2) / (count * others)) if count and others else 0.5


def concordance(later: np.ndarray, y: np.ndarray) -> float:
    """Of all pairs whose order is known, the share in the right order; ties are a half."""
    right, pairs = 0.0, 0
    for i in np.flatnonzero(y[:, 1] == 1):
        gap = later[(y[:, 2] > y[i, 2]) | ((y[:, 2] == y[i, 2]) & (y[:, 1] == 0))] - later[i]
        right, pairs = right + ((gap > 0) + (gap == 0) / 2).sum(), pairs + len(gap)
    return float(right / pairs) if pairs else 0.5
