"""Measures against scikit-learn's, and standard errors of their differences against resampling."""

import numpy as np
import pytest
from sklearn import metrics

from coterie.advise.scores import CLASSES, NUMBERS, SCARCE, TIMES, Score, area, chosen, scarce
from coterie.errors import CoterieError


def predictions(n: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    y = np.r_[np.arange(classes), random.integers(0, classes, n - classes)]
    z = random.normal(size=(n, classes)) + 1.2 * np.eye(classes)[y]
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    return p, y


def by_name(scores: tuple, name: str):  # type: ignore[no-untyped-def, type-arg]
    return next(score for score in scores if score.name == name)


@pytest.mark.parametrize("classes", [2, 4])
def test_values_are_scikit_learns(classes: int) -> None:
    p, y = predictions(150, classes)
    one = np.eye(classes)[y]
    auc = metrics.roc_auc_score(y, p[:, 1]) if classes == 2 else metrics.roc_auc_score(y, p, multi_class="ovr")
    wanted = {
        "auc": auc,
        "accuracy": metrics.accuracy_score(y, p.argmax(1)),
        "balanced_accuracy": metrics.balanced_accuracy_score(y, p.argmax(1)),
        "log_loss": metrics.log_loss(y, p),
        "brier": 0.5 * np.square(p - one).sum(1).mean(),
    }
    for name, value in wanted.items():
        score = by_name(CLASSES, name)
        assert score.value(p, y) == pytest.approx(value), name
        assert score.influences(p, y).mean() == pytest.approx(value), name
    rare = int(np.bincount(y).argmin())
    precision = by_name(CLASSES, "average_precision").value(p, y)
    if classes == 2:
        assert precision == pytest.approx(metrics.average_precision_score(y == rare, p[:, rare]))
    else:
        assert precision == pytest.approx(metrics.average_precision_score(one, p, average="macro"))
    sure = np.full((4, 2), [0.75, 0.25])
    assert by_name(CLASSES, "calibration").value(sure, np.array([0, 0, 0, 1])) == pytest.approx(0.0)
    assert by_name(CLASSES, "calibration").value(sure, np.array([0, 0, 1, 1])) == pytest.approx(0.25)


def test_values_of_numbers_are_scikit_learns() -> None:
    random = np.random.default_rng(0)
    y = random.normal(size=80)
    p = (y + random.normal(size=80))[:, None]
    wanted = {
        "r2": metrics.r2_score(y, p[:, 0]),
        "mae": metrics.mean_absolute_error(y, p[:, 0]),
        "squared_error": metrics.mean_squared_error(y, p[:, 0]),
    }
    for name, value in wanted.items():
        assert by_name(NUMBERS, name).value(p, y) == pytest.approx(value)


@pytest.mark.parametrize("name", ["auc", "balanced_accuracy", "r2"])
def test_the_influences_give_the_spread_that_new_rows_would_show(name: str) -> None:
    """Against 300 fresh samples: the standard error from one sample is right to a quarter."""
    number = name == "r2"
    scores = NUMBERS if number else CLASSES

    def sample(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        if number:
            y = random.normal(size=200)
            noise = random.normal(size=200)
            return (y + noise)[:, None], (y + 0.7 * noise + 0.3 * random.normal(size=200))[:, None], y
        y = (random.random(200) < 0.3).astype(int)
        z, extra = random.normal(size=200) + y, 0.5 * random.normal(size=200)
        both = [1 / (1 + np.exp(-v)) for v in (z - 0.5, z - 0.5 + extra)]
        return np.c_[1 - both[0], both[0]], np.c_[1 - both[1], both[1]], y

    score = by_name(scores, name)
    seen = [float(score.gains(*sample(seed)).mean()) for seed in range(300)]
    errors = [float(score.gains(*sample(seed)).std(ddof=1)) / 200**0.5 for seed in range(20)]
    assert np.mean(errors) == pytest.approx(np.std(seen), rel=0.25)


@pytest.mark.parametrize("score", [*CLASSES, *NUMBERS, *TIMES], ids=lambda score: score.name)
def test_the_better_predictions_gain(score: Score) -> None:
    """In every measure, lower or higher is better: what is nearer to the truth has a positive gain."""
    random = np.random.default_rng(0)
    if score.influences is None:
        return
    if score in CLASSES:
        y = np.arange(60) % 2
        good, bad = (np.clip(0.5 + size * (y - 0.5) + 0.2 * random.normal(size=60), 0.01, 0.99) for size in (0.8, 0.1))
        better, worse = (np.stack([1 - p, p], axis=1) for p in (good, bad))
    else:
        y = random.normal(size=60)
        y = np.abs(y) * np.where(np.arange(60) % 4, 1.0, -1.0) if score in TIMES else y
        better, worse = (
            (np.abs(y) * -1 if score in TIMES else y)[:, None] + s * random.normal(size=(60, 1)) for s in (0.2, 2.0)
        )
    assert score.gains(better, worse, y).mean() > 0.02
    assert score.gains(worse, better, y).mean() < -0.02
    two = score.by_row(np.stack([better, worse]), np.stack([worse, better]), y)
    assert two.shape == (2, 60)
    np.testing.assert_allclose(two[0], -two[1])


def test_ties_and_single_classes() -> None:
    assert area(np.ones(4), np.array([True, False, True, False]))[0] == 0.5
    assert area(np.ones(3), np.ones(3, bool))[0] == 0.5


def test_the_measure_follows_the_label() -> None:
    even, uneven = np.array([0, 1] * 50), np.array([0] * 97 + [1] * 3)
    assert chosen("auto", even, 2).name == "auc"
    assert chosen("auto", uneven, 2).name == "brier"
    assert chosen("auto", np.arange(100) % 4, 4).name == "accuracy"
    assert chosen("auto", np.array([0] * 70 + [1] * 20 + [2] * 10), 3).name == "balanced_accuracy"
    assert chosen("auto", np.array([0] * 70 + [1] * 28 + [2] * 2), 3).name == "accuracy"
    assert chosen("auto", even.astype(float), None).name == "r2"
    assert chosen("mae", even.astype(float), None).name == "mae"
    for name, classes, word in (
        ("r2", 2, "is no measure of classes"),
        ("calibration", 2, "has no interval"),
        ("acc", 2, "accuracy"),
    ):
        with pytest.raises(CoterieError, match=word):
            chosen(name, even, classes)
    (warning,) = scarce(uneven, ("no", "yes"))
    assert warning.startswith("some classes have too few of your rows to judge: 'yes' (3); ")
    assert str(SCARCE) in warning
    assert scarce(even, ("no", "yes")) == []
    (warning,) = scarce(np.arange(20) % 10, tuple("abcdefghij"))
    assert "'e' (2) and 5 more; " in warning
