"""What a user could do by hand, by scikit-learn on the same rows, and the measures on test rows.

The preparation is the usual one: numbers standardised with the mean for missing ones, words one-hot.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import KFold, StratifiedKFold

from benchmarks.tables.sources import Table

STRENGTHS = tuple(10.0**k for k in range(-3, 3))  # inverse penalties that cross-validation tries
RESAMPLES = 100
HIGHER = {"auc": True, "accuracy": True, "brier": False, "r2": True, "mae": False, "mse": False}


class Encoder:
    """Rows as numbers, by what the training rows have.

    Args:
        rows: the training rows.
        fill: missing numbers become the mean; else they stay NaN.
    """

    def __init__(self, rows: Table, *, fill: bool = True) -> None:
        known = np.isfinite(rows.numbers)
        counts = known.sum(0).clip(min=1)
        self.mean = np.where(known, rows.numbers, 0.0).sum(0) / counts
        spread = np.sqrt((np.where(known, rows.numbers - self.mean, 0.0) ** 2).sum(0) / counts)
        self.scale, self.fill = np.where(spread > 0, spread, 1.0), fill
        self.words = [sorted(set(column)) for column in rows.words.T]

    def __call__(self, rows: Table) -> np.ndarray:
        """[n, columns]."""
        numbers = (rows.numbers - self.mean) / self.scale
        parts = [np.nan_to_num(numbers) if self.fill else numbers]
        for column, known in zip(rows.words.T, self.words, strict=True):
            parts.append((column[:, None] == np.array(known, dtype=object)[None]).astype(float))
        return np.concatenate(parts, 1)


class Chosen(NamedTuple):
    """Predictions for the test rows, and the penalty that was chosen."""

    predicted: np.ndarray
    strength: float


def pooled(tables: Sequence[Table]) -> Table:
    """All their rows."""
    first = tables[0]
    return first._replace(
        numbers=np.concatenate([one.numbers for one in tables]),
        words=np.concatenate([one.words for one in tables]),
        labels=np.concatenate([one.labels for one in tables]),
    )


def linear(train: Table, test: Table, classes: Sequence[str], strength: float | None = None) -> Chosen:
    """Logistic or ridge regression; the penalty is chosen by cross-validation unless it is given."""
    encode = Encoder(train)
    x, unseen = encode(train), encode(test)
    if train.kind == "regression":
        penalties = [1.0 / one for one in STRENGTHS] if strength is None else [1.0 / strength]
        ridge = RidgeCV(alphas=penalties).fit(x, train.labels)
        return Chosen(ridge.predict(unseen), 1.0 / float(ridge.alpha_))
    chosen = _strength(x, train.labels, classes) if strength is None else strength
    return Chosen(_logistic(x, train.labels, unseen, classes, chosen), chosen)


def _logistic(x: np.ndarray, y: np.ndarray, unseen: np.ndarray, classes: Sequence[str], strength: float) -> np.ndarray:
    if len(set(y)) == 1:
        return aligned(np.ones((len(unseen), 1)), [y[0]], classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = LogisticRegression(C=strength, max_iter=300).fit(x, y.astype(str))
    return aligned(model.predict_proba(unseen), model.classes_, classes)


def _strength(x: np.ndarray, y: np.ndarray, classes: Sequence[str]) -> float:
    rarest = np.unique(y, return_counts=True)[1].min()
    folds = StratifiedKFold(5, shuffle=True, random_state=0) if rarest >= 5 else KFold(5, shuffle=True, random_state=0)
    code = {name: k for k, name in enumerate(classes)}
    truth = np.array([code[one] for one in y])
    losses = np.zeros(len(STRENGTHS))
    for train, held in folds.split(x, y):
        for k, strength in enumerate(STRENGTHS):
            share = _logistic(x[train], y[train], x[held], classes, strength)
            losses[k] -= np.log(share[np.arange(len(held)), truth[held]].clip(min=1e-6)).sum()
    return STRENGTHS[int(losses.argmin())]


def boosted(train: Table, test: Table, classes: Sequence[str]) -> np.ndarray:
    """Histogram gradient boosting with scikit-learn's defaults."""
    encode = Encoder(train, fill=False)
    if train.kind == "regression":
        model = HistGradientBoostingRegressor(random_state=0).fit(encode(train), train.labels)
        return np.asarray(model.predict(encode(test)))
    if len(set(train.labels)) == 1:
        return aligned(np.ones((test.rows, 1)), [train.labels[0]], classes)
    classifier = HistGradientBoostingClassifier(random_state=0, early_stopping=False)
    classifier.fit(encode(train), train.labels.astype(str))
    return aligned(classifier.predict_proba(encode(test)), classifier.classes_, classes)


def aligned(shares: np.ndarray, found: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Probabilities [n, classes] in a common order; classes that a model does not know have none."""
    table = np.zeros((len(shares), len(classes)))
    place = {name: k for k, name in enumerate(classes)}
    for j, name in enumerate(found):
        if str(name) in place:
            table[:, place[str(name)]] = shares[:, j]
    return table


def codes_of(labels: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """The number of each label's class; regression has no classes, and numbers stay as they are."""
    place = {name: k for k, name in enumerate(classes)}
    return np.array([place[one] for one in labels]) if classes else labels.astype(float)


def measures(predicted: np.ndarray, truth: np.ndarray, deviation: float = 1.0) -> dict[str, float]:
    """AUC, accuracy and Brier (half the squared distance), or R², MAE and squared error in units of a deviation."""
    if predicted.ndim == 1:
        error = predicted - truth
        return {
            "r2": float(1.0 - (error**2).mean() / truth.var()),
            "mae": float(np.abs(error).mean()),
            "mse": float((error**2).mean() / deviation**2),
        }
    right = np.eye(predicted.shape[1])[truth]
    return {
        "auc": auc(predicted, truth),
        "accuracy": float((predicted.argmax(1) == truth).mean()),
        "brier": float(0.5 * ((predicted - right) ** 2).sum(1).mean()),
    }


def auc(shares: np.ndarray, truth: np.ndarray) -> float:
    """Area under the ROC curve by ranks; of more than two classes, the mean over one class against the rest."""
    from scipy.stats import rankdata

    every = range(shares.shape[1]) if shares.shape[1] > 2 else [1]
    areas = []
    for k in every:
        is_k = truth == k
        positive, negative = int(is_k.sum()), int((~is_k).sum())
        if positive and negative:
            ranks = rankdata(shares[:, k])
            areas.append((ranks[is_k].sum() - positive * (positive + 1) / 2) / (positive * negative))
    return float(np.mean(areas)) if areas else float("nan")


def better(name: str, one: float, other: float) -> float:
    """How much better one is than the other, positive where it is better."""
    return one - other if HIGHER[name] else other - one


def spread_of_difference(one: np.ndarray, other: np.ndarray, truth: np.ndarray, deviation: float) -> dict[str, float]:
    """The standard error of each measure's difference on the test rows, by the bootstrap."""
    draw, found = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        rows = draw.integers(0, len(truth), len(truth))
        a, b = (measures(predicted[rows], truth[rows], deviation) for predicted in (one, other))
        found.append([a[name] - b[name] for name in a])
    return dict(zip(measures(one, truth, deviation), np.nanstd(found, axis=0).tolist(), strict=True))


def single_threaded(work: Callable[[], Any]) -> Any:
    """Run it with one thread in scikit-learn and numpy."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    with threadpool_limits(1):
        return work()
