"""Gate, recalibration and weights, each against enumeration or a general optimiser."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import norm

from coterie.ensemble import weights
from coterie.ensemble.goal import Goal
from coterie.ensemble.weights import PRIOR, admitted, mixed, permutation_z, recalibrated, weights_of

TIMES = Goal(edges=(1.0, 2.0))
EVERY = np.ones((1, 6), dtype=bool)


def labels_of(goal: Goal, n: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    if goal.classes:
        return random.permutation(np.arange(n) % goal.classes)
    return random.normal(size=n) if not goal.edges else random.uniform(0.2, 3.0, n) * np.where(np.arange(n) % 3, 1, -1)


GOALS = pytest.mark.parametrize("goal", [Goal(2), Goal(3), Goal(), TIMES], ids=["two", "three", "number", "times"])


@GOALS
def test_the_exact_z_is_that_of_all_permutations(goal: Goal) -> None:
    random = np.random.default_rng(1)
    p, y = goal.distribution(random.normal(size=(6, goal.outputs))), labels_of(goal, 6)
    every = [goal.losses(p, y[list(order)]).sum() for order in permutations(range(6))]
    wanted = (goal.losses(p, y).sum() - np.mean(every)) / np.std(every)
    assert permutation_z(goal, p, y, EVERY)[0] == pytest.approx(wanted, rel=1e-9)
    assert abs(wanted) > 0.05


@GOALS
def test_a_mask_is_a_smaller_table(goal: Goal) -> None:
    p, y = goal.distribution(np.random.default_rng(1).normal(size=(12, goal.outputs))), labels_of(goal, 12)
    mask = np.arange(12) % 3 > 0
    alone = permutation_z(goal, p[mask], y[mask], np.ones((1, 8), dtype=bool))
    assert permutation_z(goal, p, y, np.array([mask])) == pytest.approx(alone)
    scores = np.random.default_rng(2).normal(size=(12, goal.outputs))
    both = recalibrated(goal, scores, y, np.array([mask, ~mask]))
    for found, wanted in zip(both, recalibrated(goal, scores[mask], y[mask], np.ones((1, 8), dtype=bool)), strict=True):
        if not goal.edges:  # the prior of times stands at the mean of all scores
            np.testing.assert_allclose(found[0], wanted[0], atol=1e-9)


@pytest.mark.parametrize("value", [0.3, 0.0])
@GOALS
def test_a_constant_prediction_tells_nothing(goal: Goal, value: float) -> None:
    p = goal.distribution(np.full((6, goal.outputs), value))
    assert permutation_z(goal, p, labels_of(goal, 6), EVERY)[0] == pytest.approx(0.0, abs=1e-6)


def test_who_is_better_than_chance_is_controlled_over_all_partners() -> None:
    z = np.array([[-5.0, 1.0], [0.0, -3.2], [-1.7, -1.6], [3.0, 4.0]])
    p = np.minimum(1.0, 2 * norm.cdf(z.min(1)))
    order = np.sort(p)
    limit = max((q for i, q in enumerate(order, 1) if q <= 0.05 * i / len(p)), default=-1.0)
    assert admitted(z).tolist() == (p <= limit).tolist() == [True, True, False, False]
    assert admitted(np.array([[-1.9, 0.0]])).tolist() == [False], "the better of two is chance twice"
    assert admitted(np.array([[np.nan, -4.0]])).tolist() == [True]
    assert admitted(np.zeros((0, 2))).tolist() == []
    twenty = norm.ppf((np.arange(20) + 0.5) / 20)
    assert not admitted(np.stack([twenty, twenty[::-1]], axis=1)).any()


@pytest.mark.parametrize("classes", [2, 3])
def test_recalibration_of_classes_is_the_penalised_maximum(classes: int) -> None:
    goal, random = Goal(classes), np.random.default_rng(3)
    y = labels_of(goal, 60)
    scores = 0.7 * random.normal(size=(60, classes)) + np.eye(classes)[y] + 2.0
    scores[:, 0] += 1.0
    mask = np.arange(60) % 5 > 0

    def objective(theta: np.ndarray) -> float:
        p = goal.distribution(np.append(0.0, theta[:-1]) + theta[-1] * scores)
        start = np.append(np.zeros(classes - 1), 1.0)
        return float(-np.log(p[np.arange(60), y])[mask].sum() + PRIOR / 2 * np.square(theta - start).sum())

    wanted = minimize(objective, np.append(np.zeros(classes - 1), 1.0), tol=1e-10).x
    levels, slopes = recalibrated(goal, scores, y, mask[None])
    np.testing.assert_allclose(np.append(levels[0, 1:], slopes[0]), wanted, atol=1e-4)
    assert levels[0, 0] == 0.0


def test_recalibration_of_numbers_is_a_line() -> None:
    random = np.random.default_rng(4)
    values = random.normal(size=40)
    y = 3.0 + 0.5 * values + 0.1 * random.normal(size=40)
    (level,), (slope,) = recalibrated(Goal(), values[:, None], y, np.ones((1, 40), dtype=bool))
    centred = values - values.mean()
    prior = PRIOR * values.var()
    assert slope == pytest.approx((centred @ y + prior) / (centred @ centred + prior))
    assert level[0] == pytest.approx((y - slope * values).mean())


def test_recalibration_of_times_is_the_penalised_maximum_of_hazards() -> None:
    random = np.random.default_rng(5)
    y = labels_of(TIMES, 50)
    scores = random.normal(size=(50, 2)) - 1.0 + (y[:, None] > 0)
    rows, place, happened = TIMES.expanded(y)
    each, centre = scores[rows, place], scores[rows, place].mean()

    def objective(theta: np.ndarray) -> float:
        eta = theta[0] + theta[1] * (each - centre) + centre
        return float((np.exp(eta) - happened * eta).sum() + PRIOR / 2 * (theta[0] ** 2 + (theta[1] - 1.0) ** 2))

    level, slope = minimize(objective, np.array([0.0, 1.0]), tol=1e-10).x
    levels, slopes = recalibrated(TIMES, scores, y, np.ones((1, 50), dtype=bool))
    assert slopes[0] == pytest.approx(slope, abs=1e-4)
    np.testing.assert_allclose(levels[0], level + (1.0 - slope) * centre, atol=1e-4)


@GOALS
def test_a_model_that_says_the_opposite_is_not_turned_round(goal: Goal) -> None:
    y = labels_of(goal, 60)
    right = np.eye(goal.classes)[y] if goal.classes else (-np.abs(y) if goal.edges else y)[:, None]
    scores = np.repeat(-3.0 * right, goal.outputs if goal.edges else 1, axis=1)
    levels, slopes = recalibrated(goal, scores, y, np.ones((1, 60), dtype=bool))
    assert slopes[0] == 0.0
    assert np.isfinite(levels).all()


def members_of(goal: Goal, n: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    random, y = np.random.default_rng(7), labels_of(goal, n)
    scores = random.normal(size=(count, n, goal.outputs))
    if goal.classes:
        scores[:2] += 1.5 * np.eye(goal.classes)[y]
    elif goal.edges:
        scores[0] -= np.abs(y)[:, None]
    else:
        scores[:2] += 1.5 * y[:, None]
    return np.stack([goal.distribution(one) for one in scores]), y


@GOALS
def test_weights_are_the_optimum_on_the_simplex(goal: Goal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "EM_STEPS", 20_000)
    members, y = members_of(goal, 40, 4)
    mask = np.arange(40) % 4 > 0

    def loss(w: np.ndarray) -> float:
        return float(goal.losses(mixed(w, members), y)[mask].mean())

    simplex = {"type": "eq", "fun": lambda w: w.sum() - 1.0}
    wanted = minimize(loss, np.full(4, 0.25), bounds=[(0, 1)] * 4, constraints=simplex, method="SLSQP", tol=1e-12).x
    (found,) = weights_of(goal, members[None], y, mask[None])
    assert found.min() >= 0.0
    assert found.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(found, wanted, atol=2e-3)
    assert loss(found) <= loss(wanted) + 1e-6


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_weights_lie_on_the_simplex_whatever_is_predicted(seed: int) -> None:
    random = np.random.default_rng(seed)
    goal = [Goal(2), Goal(3), Goal(), TIMES][seed % 4]
    scores = random.normal(size=(2, 3, 9, goal.outputs)) * 10.0 ** random.uniform(-3, 4)
    found = weights_of(goal, goal.distribution(scores), labels_of(goal, 9), random.random((2, 9)) < 0.7)
    assert found.shape == (2, 3)
    assert (found >= 0).all()
    np.testing.assert_allclose(found.sum(1), 1.0)


def test_more_steps_never_lose_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    goal = Goal(3)
    members, y = members_of(goal, 40, 4)
    losses = []
    for steps in (0, 1, 5, 30):
        monkeypatch.setattr(weights, "EM_STEPS", steps)
        (w,) = weights_of(goal, members[None], y, np.ones((1, 40), dtype=bool))
        losses.append(goal.losses(mixed(w, members), y).mean())
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]
