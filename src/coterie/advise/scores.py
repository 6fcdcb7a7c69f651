"""Measures people decide by, each with what one row adds to it, so that differences have standard errors.

A measure of n rows is (to first order) the mean of one number per row, its influence: the row's own error for means,
the placements of DeLong, DeLong and Clarke-Pearson (1988) for the area under the ROC curve, and the projection of
Harrell's C-index as a ratio of two U-statistics for times with events. Two models judged on the
same rows are compared by the differences of these numbers.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

from coterie.errors import UsageError, unknown
from coterie.measures import Measure

Values = Callable[[np.ndarray, np.ndarray], np.ndarray]
SCARCE = 10  # rows of a class; with fewer, ranks within the class tell little
BALANCED = 0.5  # of the share that a class would have if all were equally frequent
BINS = 10
MOST_NAMED = 5


class Score(NamedTuple):
    """A measure, and the influences [n] of predictions [n, classes] (probabilities, or numbers) and labels [n]."""

    measure: Measure
    influences: Values | None
    value: Callable[[np.ndarray, np.ndarray], float]

    @property
    def name(self) -> str:
        """Its key."""
        return self.measure.name

    def gains(self, better: np.ndarray, worse: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """By row: how much the first predictions are better than the second, whatever the measure's direction."""
        assert self.influences is not None
        sign = 1.0 if self.measure.higher else -1.0
        return sign * (self.influences(better, labels) - self.influences(worse, labels))

    def by_row(self, better: np.ndarray, worse: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The gains [R, n] of predictions [R, n, outputs] over others."""
        return np.stack([self.gains(*pair, labels) for pair in zip(better, worse, strict=True)])


def area(scores: np.ndarray, positive: np.ndarray) -> tuple[float, np.ndarray]:
    """The area under the ROC curve, and the influences of rows.

    Args:
        scores: the higher, the more positive, [n].
        positive: which rows are, [n].

    Example:
        >>> import numpy as np
        >>> area(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))[0]
        0.75
    """
    n, ones = len(scores), int(positive.sum())
    if ones in (0, n):
        return 0.5, np.full(n, 0.5)
    ranks = rankdata(scores)
    placement = np.empty(n)
    placement[positive] = (ranks[positive] - rankdata(scores[positive])) / (n - ones)
    placement[~positive] = 1.0 - (ranks[~positive] - rankdata(scores[~positive])) / ones
    value = float(placement[positive].mean())
    share = np.where(positive, n / ones, n / (n - ones))
    return value, value + (placement - value) * share


def _area_influences(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    classes = [1] if p.shape[1] == 2 else [c for c in range(p.shape[1]) if 0 < (y == c).sum() < len(y)]
    return np.mean([area(p[:, c], y == c)[1] for c in classes], axis=0) if classes else np.full(len(y), 0.5)


def _average_precision(p: np.ndarray, y: np.ndarray) -> float:
    from sklearn.metrics import average_precision_score

    rare = [int(np.bincount(y, minlength=2).argmin())] if p.shape[1] == 2 else range(p.shape[1])
    each = [average_precision_score(y == c, p[:, c]) for c in rare if (y == c).any()]
    return float(np.mean(each))


def _recalls(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Influences of the mean of the classes' shares of right answers."""
    right = (p.argmax(1) == y).astype(float)
    present = np.unique(y)
    parts = [np.where(y == c, (right - right[y == c].mean()) / (y == c).mean(), 0.0) for c in present]
    return np.mean([right[y == c].mean() for c in present]) + np.mean(parts, axis=0)


def _calibration(p: np.ndarray, y: np.ndarray) -> float:
    """Expected calibration error of the predicted class, in ten bins."""
    sure, right = p.max(1), (p.argmax(1) == y).astype(float)
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [abs((sure - right)[bins == b].sum()) for b in range(BINS)]
    return float(sum(gaps) / len(y))


def _brier(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    return 0.5 * np.square(p - np.eye(p.shape[1])[y]).sum(1)


def _log_loss(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    return -np.log(np.clip(p[np.arange(len(y)), y], 1e-12, None))


def _squared(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.square(p.reshape(len(y), -1)[:, 0] - y)


def _explained(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Influences of R²."""
    around, errors = np.square(y - y.mean()), _squared(p, y)
    spread = max(1e-12, around.mean())
    ratio = errors.mean() / spread
    return 1.0 - (errors - ratio * (around - spread)) / spread


def _absolute(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.abs(p.reshape(len(y), -1)[:, 0] - y)


def _of(measure: Measure, influences: Values) -> Score:
    return Score(measure, influences, lambda p, y: float(influences(p, y).mean()))


def concordance(risks: np.ndarray, times: np.ndarray, events: np.ndarray) -> tuple[float, np.ndarray]:
    """Harrell's C-index, and the influences of rows (of a ratio of two U-statistics).

    A pair counts if the event of one happened while the other was still at risk; it is right if that one has the higher
    risk, and half right if the risks are equal. 0.5 where no pair counts.

    Args:
        risks: the higher, the earlier the event should be, [n].
        times: of the event or of censoring, [n].
        events: whether the event happened, [n].

    Example:
        >>> import numpy as np
        >>> concordance(np.array([3.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0]), np.array([True, True, False]))[0]
        0.6666666666666666
    """
    n = len(risks)
    right, pairs = np.zeros(n), np.zeros(n)
    for i in range(n):
        if not events[i]:
            continue
        later = (times > times[i]) | ((times == times[i]) & ~events)
        won = later * (0.5 * (risks[i] >= risks) + 0.5 * (risks[i] > risks))
        right += won
        pairs += later
        right[i] += won.sum()
        pairs[i] += later.sum()
    total = pairs.sum() / 2.0
    if not total:
        return 0.5, np.full(n, 0.5)
    value = float(right.sum() / 2.0 / total)
    return value, value + n * (right - value * pairs) / total


def _concordances(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    return concordance(p.reshape(len(y), -1)[:, 0], np.abs(y), y > 0)[1]


CLASSES = (
    _of(Measure("auc", "AUC", "higher"), _area_influences),
    Score(Measure("average_precision", "average precision", "higher"), None, _average_precision),
    _of(Measure("balanced_accuracy", "balanced accuracy", "higher", "share"), _recalls),
    _of(Measure("accuracy", "accuracy", "higher", "share"), lambda p, y: (p.argmax(1) == y).astype(float)),
    _of(Measure("brier", "Brier score"), _brier),
    _of(Measure("log_loss", "log loss"), _log_loss),
    Score(Measure("calibration", "calibration error"), None, _calibration),
)
NUMBERS = (
    _of(Measure("r2", "R²", "higher"), _explained),
    _of(Measure("mae", "mean absolute error, in standard deviations of the label"), _absolute),
    _of(Measure("squared_error", "squared error, in standard deviations of the label"), _squared),
)
TIMES = (_of(Measure("c_index", "C-index", "higher"), _concordances),)
EXPLAINED = {
    "auc": "the probability that a row of the class gets a higher score than a row of another class; 0.5 is guessing",
    "average_precision": "precision averaged over recall, of the rarer class; good for rare classes",
    "balanced_accuracy": "the share of right answers, averaged over classes",
    "accuracy": "the share of right answers",
    "brier": "half the squared distance of the predicted probabilities to what happened; 0 is perfect",
    "log_loss": "minus the logarithm of the probability given to what happened; 0 is perfect",
    "calibration": "by how much predicted probabilities differ from frequencies; 0 is perfect",
    "r2": "the share of the label's variance that is predicted; 0 is predicting the mean",
    "mae": "the mean distance of predictions to the truth",
    "squared_error": "the mean squared distance of predictions to the truth",
    "c_index": "the probability that of two rows the one with the higher risk has the event first; 0.5 is guessing",
}


def scores_for(classes: int | None, *, times: bool = False) -> tuple[Score, ...]:
    """All measures of a label with so many classes, of a number (None), or of times with events."""
    return TIMES if times else NUMBERS if classes is None else CLASSES


def chosen(name: str, labels: np.ndarray, classes: int | None, *, times: bool = False) -> Score:
    """The measure to decide by.

    For "auto": the C-index of times with events, R² of a number. AUC of two classes, or the Brier score where one has
    fewer than ten rows. Of more classes accuracy, or balanced accuracy where a class is less than half as frequent as
    it would be if all were equal and yet has ten rows.

    Args:
        name: a measure's name, or "auto".
        labels: the target's labels.
        classes: how many there are; None for a number.
        times: whether labels are times with events (problems/tasks/survival.py).
    """
    known = {score.name: score for score in scores_for(classes, times=times) if score.influences is not None}
    if times and not comparable(np.abs(labels), labels > 0):
        raise UsageError(
            "no two of your rows can be compared: the event happens in none of them while another is still at risk. "
            "Give more rows, or look at the columns of problem.label and problem.event."
        )
    if name != "auto":
        if name not in known:
            for other in (*CLASSES, *NUMBERS, *TIMES):
                if other.name == name:
                    kind = "times" if times else "numbers" if classes is None else "classes"
                    why = f"is no measure of {kind}" if other.influences is not None else "has no interval"
                    raise UsageError(f"measure {name} {why}; take one of {', '.join(known)}.")
            raise unknown("measure", name, known)
        return known[name]
    if times:
        return known["c_index"]
    if classes is None:
        return known["r2"]
    counts = np.bincount(labels, minlength=classes)
    if classes == 2:
        return known["auc" if counts.min() >= SCARCE else "brier"]
    even = counts.min() * classes >= BALANCED * len(labels)
    return known["accuracy" if even or counts.min() < SCARCE else "balanced_accuracy"]


def comparable(times: np.ndarray, events: np.ndarray) -> bool:
    """Whether any event happened while another row was still at risk."""
    first = times[events].min(initial=np.inf)
    return bool(((times > first) | ((times == first) & ~events)).any())


def few_events(labels: np.ndarray, event: str) -> list[str]:
    """A warning of too few events, and one of no censored row, which may be a wrong column."""
    count, n = int((labels > 0).sum()), len(labels)
    warnings = []
    if count < SCARCE:
        warnings.append(
            f"the event {event!r} happened in only {count} of your {n} rows: what is measured on them is mostly "
            f"chance; collect at least {SCARCE}"
        )
    if count == n:
        warnings.append(f"the event {event!r} happened in all of your {n} rows: is it the right column?")
    return warnings


def scarce(labels: np.ndarray, names: tuple[str, ...]) -> list[str]:
    """A warning of classes with too few rows for ranks and shares of them to mean much; none if there are enough."""
    counts = dict(zip(names, np.bincount(labels, minlength=len(names)).tolist(), strict=True))
    few = [f"{name!r} ({count})" for name, count in counts.items() if 0 < count < SCARCE]
    if not few:
        return []
    shown = ", ".join(few[:MOST_NAMED]) + (f" and {len(few) - MOST_NAMED} more" if len(few) > MOST_NAMED else "")
    return [f"some classes have too few of your rows to judge: {shown}; aim for at least {SCARCE} per class"]
