"""Scores, distributions, losses and intervals of classes, numbers and times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss

from coterie.ensemble.goal import EVENTS, LEAST, MOST_INTERVALS, Goal

TIMES = Goal(edges=(1.0, 2.5, 4.0))
GOALS = [Goal(2), Goal(4), Goal(), TIMES]
KINDS = ["two classes", "four classes", "a number", "times"]


def scores_of(goal: Goal, n: int = 30, spread: float = 1.0) -> np.ndarray:
    found = spread * np.random.default_rng(0).normal(size=(n, goal.outputs))
    return found - 1.0 if goal.edges else found


@pytest.mark.parametrize("goal", GOALS, ids=KINDS)
def test_scores_are_the_inverse_of_distributions(goal: Goal) -> None:
    scores = scores_of(goal)
    back = goal.scores(goal.distribution(scores))
    if goal.classes:  # logits are known but for a constant of each row
        scores, back = (each - each.mean(1, keepdims=True) for each in (scores, back))
    np.testing.assert_allclose(back, scores, atol=1e-9)
    np.testing.assert_allclose(goal.distribution(back), goal.distribution(scores), atol=1e-12)


@given(st.integers(0, 3), st.floats(0.0, 1e6))
@settings(max_examples=40, deadline=None)
def test_distributions_sum_to_one(which: int, spread: float) -> None:
    goal = GOALS[which]
    found = goal.distribution(scores_of(goal, spread=spread))
    assert np.isfinite(found).all()
    if goal.classes or goal.edges:
        assert (found >= 0.0).all()
        np.testing.assert_allclose(found.sum(-1), 1.0, atol=1e-9)


def test_losses_of_classes_are_scikit_learns() -> None:
    goal, y = Goal(4), np.arange(30) % 4
    p = goal.distribution(scores_of(goal))
    assert goal.losses(p, y).mean() == pytest.approx(log_loss(y, p))
    np.testing.assert_allclose(goal.losses(p, y), goal.losses_by_type(p)[np.arange(30), goal.types(y)])
    assert goal.losses(np.array([[0.0, 0.0, 0.0, 1.0]]), np.array([0])) == pytest.approx(-np.log(LEAST))


def test_losses_of_numbers_are_squares() -> None:
    assert Goal().losses(np.array([[1.0], [2.0]]), np.array([3.0, 2.0])).tolist() == [4.0, 0.0]


@pytest.mark.parametrize(
    ("label", "probability"),
    [(0.5, 0.1), (1.0, 0.1), (1.5, 0.2), (4.0, 0.3), (9.0, 0.4), (-0.5, 1.0), (-2.0, 0.9), (-3.0, 0.7), (-9.0, 0.4)],
)
def test_a_time_is_in_an_interval_and_a_censored_one_in_its_own_or_later(label: float, probability: float) -> None:
    p = np.array([[0.1, 0.2, 0.3, 0.4]])
    assert TIMES.losses(p, np.array([label])) == pytest.approx(-np.log(probability))


def test_hazards_of_intervals_are_those_of_an_exponential() -> None:
    """A hazard of 0.3 per unit of time adds up to 0.3, 0.45 and 0.45 in the intervals."""
    found = TIMES.distribution(np.log(np.array([[0.3, 0.45, 0.45]])))[0]
    later = np.exp(-0.3 * np.array([0.0, 1.0, 2.5, 4.0]))
    np.testing.assert_allclose(found, [*(later[:-1] - later[1:]), later[-1]])


def test_the_larger_risk_is_the_earlier_event() -> None:
    risks = TIMES.predictions(np.array([[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]]))
    assert risks.shape == (3, 1)
    assert risks[0] > risks[1] > risks[2]


def test_a_row_stands_once_for_each_interval_that_it_enters() -> None:
    rows, place, happened = TIMES.expanded(np.array([0.5, -0.5, 3.0, -3.0, 9.0, -9.0]))
    assert list(zip(rows.tolist(), place.tolist(), happened.tolist(), strict=True)) == [
        (0, 0, True),
        *((2, 0, False), (2, 1, False), (2, 2, True)),
        *((3, 0, False), (3, 1, False)),
        *((4, 0, False), (4, 1, False), (4, 2, False)),
        *((5, 0, False), (5, 1, False), (5, 2, False)),
    ]


def test_intervals_follow_the_events_of_ones_own() -> None:
    random = np.random.default_rng(0)
    for n in (3, 12, 40, 400):
        labels = random.exponential(size=n) * np.where(np.arange(n) % 3, 1.0, -1.0)
        goal = Goal.of(labels, None, times=True)
        events = np.sort(labels[labels > 0])
        assert goal.edges[-1] == events[-1]
        assert list(goal.edges) == sorted(set(goal.edges))
        assert goal.outputs <= MOST_INTERVALS
        counts = np.bincount(goal.types(events))
        assert counts.min() >= min(EVENTS, len(events) // 2)
    assert Goal.of(np.array([0, 2, 1]), 3, times=False) == Goal(3)
    assert Goal.of(np.array([0.5]), None, times=False) == Goal()


def test_what_another_model_can_take_of_a_row() -> None:
    assert Goal(2).columns(np.array([[1.0, 3.0]])).tolist() == [[2.0]]
    assert Goal(3).columns(np.array([[1.0, 3.0, 5.0]])).tolist() == [[-2.0, 0.0, 2.0]]
    assert Goal().columns(np.array([[7.0]])).tolist() == [[7.0]]
    assert TIMES.columns(np.array([[1.0, 2.0, 6.0]])).tolist() == [[3.0]]
