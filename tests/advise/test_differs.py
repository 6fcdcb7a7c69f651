"""Planted differences are found, undone exactly where they can be, and nobody else is accused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from planted import NAMES, message, rows

from coterie.advise.differs import Difference, differences, rewritten
from coterie.ensemble.goal import Goal
from coterie.ensemble.message import summary_of

KINDS = [
    pytest.param(Goal(2), {}, id="two classes"),
    pytest.param(Goal(3), {"classes": 3}, id="three classes"),
    pytest.param(Goal(), {"number": True}, id="a number"),
]
Change = Callable[[np.ndarray], np.ndarray]


def found_in(goal: Goal, x: np.ndarray, y: np.ndarray, own: int = 150, **world: Any) -> list[Difference]:
    mine, labels = rows(own, 1, **world)
    classes = tuple(f"c{k}" for k in range(goal.classes))
    return differences(goal, summary_of(mine, labels), mine, labels, message(goal, x, y), NAMES, classes)


def changed(x: np.ndarray, j: int, change: Change) -> np.ndarray:
    found = x.copy()
    found[:, j] = change(found[:, j])
    return found


@pytest.mark.parametrize(("goal", "world"), KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_friends_are_never_accused(goal: Goal, world: dict[str, Any], seed: int) -> None:
    assert found_in(goal, *rows(300, 20 + seed, **world), **world) == []


UNITS = [
    pytest.param(1, lambda v: 1000.0 * v, 1e-3, 0.0, "thousands", id="a thousand times larger"),
    pytest.param(0, lambda v: v / 12.0, 12.0, 0.0, "months and years", id="twelve times smaller"),
    pytest.param(3, lambda v: (v - 32.0) / 1.8, 1.8, 32.0, "°F and °C", id="Celsius"),
    pytest.param(3, lambda v: 1.8 * v + 32.0, 5.0 / 9.0, -160.0 / 9.0, "another unit", id="Fahrenheit"),
]


@pytest.mark.parametrize(("goal", "world"), KINDS[::2])
@pytest.mark.parametrize(("j", "change", "ratio", "offset", "word"), UNITS)
def test_another_unit_is_named(
    goal: Goal, world: dict[str, Any], j: int, change: Change, ratio: float, offset: float, word: str
) -> None:
    x, y = rows(300, 20, **world)
    (one,) = found_in(goal, changed(x, j, change), y, **world)
    assert (one.kind, one.column, one.can_be_undone) == ("unit", NAMES[j], True)
    middle = np.median(x[:, j])
    assert one.ratio * change(np.array(middle)) + one.offset == pytest.approx(middle, rel=0.06)
    assert word in one.text


@pytest.mark.parametrize(("goal", "world"), KINDS)
@pytest.mark.parametrize(
    ("ratio", "offset"), [(1e-3, 0.0), (1.8, 32.0), (-1.0, 140.0)], ids=["ratio", "offset", "reversed"]
)
def test_a_model_rewritten_for_my_columns_is_that_of_a_partner_without_the_fault(
    goal: Goal, world: dict[str, Any], ratio: float, offset: float
) -> None:
    """Theirs is the same model of the column (mine − offset) / ratio."""
    theirs, (new, _) = message(goal, *rows(200, 20, **world)), rows(80, 5, **world)
    new[0, 1] = np.nan
    one = Difference("unit", NAMES[1], ratio, offset)
    seen = changed(new, 1, lambda v: ratio * v + offset)
    for model, before in zip(rewritten(theirs, [one], NAMES, goal), theirs.models(goal), strict=True):
        found, wanted = model.scores(seen, goal), before.scores(new, goal)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("goal", "world"), KINDS)
def test_equal_values_go_the_same_way_in_a_reversed_column(goal: Goal, world: dict[str, Any]) -> None:
    """Whole numbers that a threshold meets exactly: what was at most it is now at least it."""
    x, y = rows(200, 20, **world)
    x = x.round()
    theirs = message(goal, x, y)
    trees = theirs.trees._replace(threshold=np.round(theirs.trees.threshold))
    one = Difference("reversed", NAMES[0], -1.0, 100.0)
    found = rewritten(theirs._replace(trees=trees), [one], NAMES, goal)[1]
    np.testing.assert_allclose(found.scores(changed(x, 0, lambda v: 100.0 - v), goal), trees.scores(x, goal), atol=1e-9)


@pytest.mark.parametrize(("goal", "pair"), [(Goal(2), (0, 1)), (Goal(3), (0, 2))], ids=["two", "three"])
def test_exchanged_classes_are_found_and_undone(goal: Goal, pair: tuple[int, int]) -> None:
    x, y = rows(400, 20, classes=goal.classes)
    order = np.arange(goal.classes)
    order[list(pair)] = order[list(pair[::-1])]
    wrong = order[y.astype(int)].astype(float)
    (one,) = found_in(goal, x, wrong, classes=goal.classes)
    assert (one.kind, one.classes) == ("classes", pair)
    assert f"'c{pair[0]}' and 'c{pair[1]}' of 'the label' seem exchanged" in one.text
    theirs, new = message(goal, x, wrong), rows(80, 5)[0]
    for model, before in zip(rewritten(theirs, [one], NAMES, goal), theirs.models(goal), strict=True):
        p, q = goal.distribution(model.scores(new, goal)), goal.distribution(before.scores(new, goal))
        np.testing.assert_allclose(p, q[:, order], atol=1e-9)


@pytest.mark.parametrize(("goal", "world"), KINDS)
def test_a_reversed_scale_is_found(goal: Goal, world: dict[str, Any]) -> None:
    x, y = rows(400, 20, **world)
    (one,) = found_in(goal, changed(x, 0, lambda v: 120.0 - v), y, own=300, **world)
    assert (one.kind, one.column) == ("reversed", "age")
    assert one.ratio == pytest.approx(-1.0, abs=0.15)
    assert one.offset == pytest.approx(120.0, rel=0.1)


@pytest.mark.parametrize(("goal", "world"), KINDS)
def test_a_code_for_no_value_is_found_and_left_as_it_is(goal: Goal, world: dict[str, Any]) -> None:
    x, y = rows(300, 20, **world)
    x[::15, 3] = 999.0
    (one,) = found_in(goal, x, y, **world)
    assert (one.kind, one.column, one.can_be_undone) == ("missing code", "pulse", False)
    assert "holds 999 in 7% of its rows" in one.text


def test_a_region_of_wrong_labels_is_found() -> None:
    goal, (x, y) = Goal(2), rows(600, 20)
    wrong = np.where(x[:, 0] > 60.0, 1 - y, y)
    (one,) = found_in(goal, x, wrong, own=300)
    assert one.kind == "region"
    assert "'age' is above" in one.text
    assert not one.can_be_undone


def test_a_column_without_values_accuses_nobody() -> None:
    x, y = rows(300, 20)
    x[:, 3] = np.nan
    assert found_in(Goal(2), x, y) == []
    mine, labels = rows(150, 1)
    mine[:, 3] = np.nan
    theirs = message(Goal(2), *rows(300, 20))
    assert differences(Goal(2), summary_of(mine, labels), mine, labels, theirs, NAMES, ("c0", "c1")) == []
