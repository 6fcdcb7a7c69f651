"""The models that everybody fits: trees as arrays against scikit-learn, linear models against their equations."""

from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge

from coterie.ensemble import models
from coterie.ensemble.goal import Goal
from coterie.ensemble.models import (
    LEAST_LEAF,
    LEAVES,
    PACE,
    TREE_COLUMNS,
    Linear,
    chosen_penalty,
    filled,
    fit_linear,
    fit_trees,
    held_out,
    medians,
    rounds_of,
    trees_of,
)

Data = tuple[np.ndarray, np.ndarray]


def rows(goal: Goal, n: int = 160, seed: int = 0, *, missing: bool = True) -> Data:
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, 4)) * [1.0, 30.0, 0.01, 1.0] + [0.0, 100.0, 0.0, -3.0]
    signal = x[:, 0] + (x[:, 1] > 110) - 40.0 * x[:, 2] * (x[:, 3] > -3) + 0.5 * random.normal(size=n)
    y = np.digitize(signal, np.quantile(signal, np.arange(1, goal.classes) / goal.classes)) if goal.classes else signal
    if missing:
        x[random.random(x.shape) < 0.1] = np.nan
    return x, y


def booster(goal: Goal, n: int, leaf: int, subsample: float) -> Any:
    kind: Any = GradientBoostingClassifier if goal.classes else GradientBoostingRegressor
    return kind(
        n_estimators=rounds_of(goal),
        learning_rate=PACE / rounds_of(goal),
        max_depth=None,
        max_leaf_nodes=LEAVES,
        min_samples_leaf=leaf,
        max_features=TREE_COLUMNS,
        subsample=subsample,
        random_state=3,
    )


@pytest.mark.parametrize("subsample", [1.0, 0.5])
@pytest.mark.parametrize(
    ("goal", "present"),
    [(Goal(2), None), (Goal(3), None), (Goal(), None), (Goal(4), [0, 1, 3]), (Goal(3), [0, 2]), (Goal(3), [1, 2])],
    ids=["two", "three", "number", "three of four", "first and last of three", "last two of three"],
)
def test_trees_as_arrays_predict_what_scikit_learn_predicts(
    goal: Goal, present: list[int] | None, subsample: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "TREE_ROWS", int(160 * subsample))
    x, y = rows(goal if present is None else Goal(len(present)))
    y = np.array(present)[y] if present is not None else y
    new, _ = rows(goal, 300, 1)
    new[0] = np.nan
    fitted = fit_trees(x, y, goal, seed=3, leaf=5)
    fill = medians(x)
    wanted = booster(goal, len(x), 5, subsample).fit(filled(x, fill), y)
    found = goal.distribution(fitted.scores(new, goal))
    assert fitted.feature.shape[0] == trees_of(goal)
    if not goal.classes:
        np.testing.assert_allclose(found[:, 0], wanted.predict(filled(new, fill)), atol=1e-5)
        return
    here = wanted.classes_
    absent = np.setdiff1d(np.arange(goal.classes), here)
    assert (found[:, absent] < 0.2).all()
    among = found[:, here] / found[:, here].sum(1, keepdims=True)
    np.testing.assert_allclose(among, wanted.predict_proba(filled(new, fill)), atol=1e-5)


def test_thresholds_part_values_that_are_next_to_each_other() -> None:
    """Seconds since 1970 have the distance of neighbours as float32: a rounded threshold misleads them."""
    random = np.random.default_rng(0)
    x = (1.6e9 + 128.0 * np.arange(120))[random.permutation(120)][:, None]
    y = (x[:, 0] / 128.0 % 7 + random.normal(size=120)).round(3)
    fitted = fit_trees(x, y, Goal(), seed=3, leaf=1)
    wanted = booster(Goal(), 120, 1, 1.0).fit(x, y)
    np.testing.assert_allclose(fitted.scores(x, Goal())[:, 0], wanted.predict(x), atol=1e-5)


def test_rows_are_evaluated_in_blocks_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rows(Goal(3))
    fitted = fit_trees(x, y, Goal(3))
    whole = fitted.scores(x, Goal(3))
    monkeypatch.setattr(models, "BLOCK", 7)
    np.testing.assert_array_equal(fitted.scores(x, Goal(3)), whole)
    assert fitted.scores(x[:0], Goal(3)).shape == (0, 3)


def test_leaves_hold_as_many_rows_as_is_promised() -> None:
    x, y = rows(Goal(), missing=False)
    fitted = fit_trees(x, y, Goal())
    reached = x.astype(np.float32)
    for t in range(0, len(fitted.feature), 9):
        node = np.zeros(len(x), dtype=int)
        for _ in range(models.NODES):
            inner = fitted.feature[t, node] >= 0
            right = reached[np.arange(len(x)), fitted.feature[t, node]] > fitted.threshold[t, node]
            node = np.where(inner, np.where(right, fitted.right[t, node], fitted.left[t, node]), node)
        counts = np.bincount(node)
        assert counts[counts > 0].min() >= LEAST_LEAF


@pytest.mark.parametrize(
    ("goal", "y"),
    [(Goal(2), np.ones(60)), (Goal(3), np.full(60, 2)), (Goal(), np.full(60, 1.5))],
    ids=["one class", "one of three", "one number"],
)
def test_a_constant_label_is_predicted_and_nothing_else(goal: Goal, y: np.ndarray) -> None:
    x, _ = rows(goal, 60)
    for fitted in (fit_linear(x, y, goal), fit_trees(x, y, goal)):
        found = goal.distribution(fitted.scores(x, goal))
        assert np.isfinite(found).all()
        assert goal.losses(found, y).max() < 0.05


@pytest.mark.parametrize("goal", [Goal(2), Goal(3), Goal(), Goal(edges=(0.5, 1.0))], ids=lambda goal: repr(goal))
def test_one_row_and_columns_without_values_make_no_trouble(goal: Goal) -> None:
    x, y = rows(goal, 5)
    x[:, 2] = np.nan
    y = np.abs(y) + 0.1 if goal.edges else y
    for n in (1, 5):
        for fitted in (fit_linear(x[:n], y[:n], goal), fit_trees(x[:n], y[:n], goal)):
            if isinstance(fitted, Linear) or not goal.edges:
                assert np.isfinite(goal.distribution(fitted.scores(rows(goal)[0], goal))).all()
    assert fit_linear(x, y, goal).weights[:, 2].tolist() == [0.0] * (goal.classes or 1)


@pytest.mark.parametrize("classes", [2, 3])
def test_logistic_regression_is_scikit_learns_on_scaled_columns(classes: int) -> None:
    goal = Goal(classes)
    x, y = rows(goal)
    full = filled(x, medians(x))
    z = (full - full.mean(0)) / full.std(0)
    wanted = LogisticRegression(C=2.0, max_iter=500).fit(z, y).predict_proba(z)
    found = goal.distribution(fit_linear(x, y, goal, 2.0).scores(x, goal))
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_numbers_are_ridge_regression_on_scaled_columns() -> None:
    x, y = rows(Goal())
    full = filled(x, medians(x))
    z = (full - full.mean(0)) / full.std(0)
    wanted = Ridge(alpha=1.0 / 0.2).fit(z, y).predict(z)
    np.testing.assert_allclose(fit_linear(x, y, Goal(), 0.2).scores(x, Goal())[:, 0], wanted, atol=1e-9)


def test_absent_classes_are_unlikely_but_not_impossible() -> None:
    x, y = rows(Goal(2))
    p = Goal(3).distribution(fit_linear(x, 2 * y, Goal(3)).scores(x, Goal(3)))
    assert (p[:, 1] > 0.0).all()
    assert p[:, 1].mean() < 0.01


def survival(n: int = 40) -> Data:
    random = np.random.default_rng(2)
    x = random.normal(size=(n, 2)) * [1.0, 5.0]
    times = np.ceil(6.0 * random.exponential(size=n) / np.exp(x[:, 0]))  # many ties
    return x, np.where(random.random(n) < 0.7, times, -times)


def partial_likelihood(beta: np.ndarray, z: np.ndarray, labels: np.ndarray, penalty: float) -> float:
    """Cox's with Breslow's ties, row by row, and the penalty."""
    total = -float(beta @ beta) / 2.0 / penalty
    for i in np.flatnonzero(labels > 0):
        at_risk = np.abs(labels) >= labels[i]
        total += float(z[i] @ beta - np.log(np.exp(z[at_risk] @ beta).sum()))
    return total


@pytest.mark.parametrize("penalty", [0.02, 2.0])
def test_the_slope_of_the_partial_likelihood_is_zero_at_the_solution(penalty: float) -> None:
    x, labels = survival()
    fitted = fit_linear(x, labels, Goal(edges=(2.0, 6.0)), penalty)
    z, beta = (x - x.mean(0)) / x.std(0), fitted.weights[0] * x.std(0)
    assert np.abs(beta).max() > 0.05
    for j in range(2):
        step = 1e-5 * np.eye(2)[j]
        up, down = (partial_likelihood(beta + s * step, z, labels, penalty) for s in (1.0, -1.0))
        assert (up - down) / 2e-5 == pytest.approx(0.0, abs=1e-5)


def test_breslows_baseline_by_hand() -> None:
    """Four rows; with weights of 0, an event adds one over the number at risk; the second interval has 1/1."""
    x, labels, goal = np.array([[0.0], [1.0], [3.0], [2.0]]), np.array([1.0, 2.0, -2.0, 3.0]), Goal(edges=(2.0, 3.0))
    fitted = fit_linear(x, labels, goal, 1e-12)
    np.testing.assert_allclose(np.exp(fitted.scores(x, goal)), np.tile([1 / 4 + 1 / 3, 1.0], (4, 1)), rtol=1e-9)
    fitted = fit_linear(x, labels, goal, 2.0)
    risk = np.exp(x[:, 0] * fitted.weights[0, 0])
    wanted = [1 / risk.sum() + 1 / risk[1:].sum(), 1 / risk[3]]
    np.testing.assert_allclose(np.exp(fitted.scores(x, goal)), risk[:, None] * wanted, rtol=1e-9)


def test_the_penalty_is_that_of_the_least_held_out_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rows(Goal(), 40)
    x = np.hstack([x, np.random.default_rng(1).normal(size=(40, 30))])
    folds = np.arange(40) % 4
    losses = {}
    for penalty in models.PENALTIES:
        scores = held_out(x, y, Goal(), folds, lambda a, b, c=penalty: fit_linear(a, b, Goal(), c))
        losses[penalty] = np.square(scores[:, 0] - y).mean()
    assert chosen_penalty(x, y, Goal(), folds) == min(losses, key=losses.__getitem__)
    monkeypatch.setattr(models, "TUNED", 39)
    assert chosen_penalty(x, y, Goal(), folds) == models.USUAL


def test_held_out_scores_come_from_models_without_the_fold() -> None:
    x, folds, seen = np.arange(12.0)[:, None], np.arange(12) % 3, []

    class Memory:
        def __init__(self, known: np.ndarray) -> None:
            self.known = set(known[:, 0].tolist())

        def scores(self, inputs: np.ndarray, goal: Goal) -> np.ndarray:
            seen.append((self.known, set(inputs[:, 0].tolist())))
            return inputs

    scores = held_out(x, x[:, 0], Goal(), folds, lambda a, b: Memory(a))
    assert scores[:, 0].tolist() == x[:, 0].tolist()
    assert len(seen) == 3
    assert all(not known & judged and len(known | judged) == 12 for known, judged in seen)
