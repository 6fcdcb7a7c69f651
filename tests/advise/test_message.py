"""What a partner sends: enough to be used, and nothing that can do harm."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from planted import NAMES, message, rows

from coterie.ensemble.goal import Goal
from coterie.ensemble.message import LARGEST, QUANTILES, BadMessage, Message, dealt, received, summary_of
from coterie.ensemble.models import NODES, Trees, trees_of

GOAL = Goal(2)
Tensors = list[torch.Tensor]


def sent(goal: Goal = GOAL, **world: Any) -> Tensors:
    found = message(goal, *rows(120, 1, **world))
    numbers = np.array([found.held_out, found.blind, found.rows])
    return [torch.from_numpy(np.array(a)) for a in (*found.linear, *found.trees, numbers, *found.summary)]


@pytest.mark.parametrize(
    ("goal", "world"),
    [(GOAL, {}), (Goal(3), {"classes": 3}), (Goal(), {"number": True})],
    ids=["two", "three", "number"],
)
def test_what_was_sent_arrives(goal: Goal, world: dict[str, Any]) -> None:
    wanted, x = message(goal, *rows(120, 1, **world)), rows(50, 2)[0]
    found = received(tuple(sent(goal, **world)), goal, len(NAMES))
    assert (found.held_out, found.blind, found.rows) == (wanted.held_out, wanted.blind, 120)
    for one, other in zip(found.models(goal), wanted.models(goal), strict=True):
        np.testing.assert_array_equal(one.scores(x, goal), other.scores(x, goal))
    np.testing.assert_array_equal(found.summary.correlations, wanted.summary.correlations)


def test_of_times_only_the_linear_model_takes_part() -> None:
    x, y = rows(60, 1, number=True)
    goal = Goal(edges=(1.0, 2.0))
    assert len(message(goal, x, np.abs(y) + 0.1).models(goal)) == 1


def test_its_loss_is_of_rows_that_its_trees_had_not_seen() -> None:
    """Labels without a pattern: trees know their own rows, and lose more than a constant on others."""
    x, y = rows(200, 1, "shuffled")
    found = message(GOAL, x, y)
    known = GOAL.losses(GOAL.distribution(found.trees.scores(x, GOAL)), y).mean()
    assert known < 0.8 * found.blind
    assert found.held_out > found.blind > 0.65
    assert message(GOAL, *rows(200, 1)).held_out < 0.9 * message(GOAL, *rows(200, 1)).blind


def test_no_row_can_be_read_off_a_message() -> None:
    """Numbers of single rows occur at most as quantiles, thresholds are between two rows."""
    x, _ = rows(120, 1)
    flat = np.concatenate([t.numpy().astype(float).ravel() for t in sent()])
    values = x[:, 0]
    assert np.isin(values, flat).sum() <= len(QUANTILES) + 2
    assert np.isin(values.astype(np.float32).astype(float), flat).sum() <= len(QUANTILES) + 2


def spoil(part: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def spoilt(tensors: Tensors) -> None:
        tensors[part] = change(tensors[part].clone())

    return spoilt


def put(place: tuple[int, ...], value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return changed


FEATURE, THRESHOLD, LEFT, RIGHT, VALUE, BASE, FILL, NUMBERS = range(3, 11)
HOSTILE: dict[str, Callable[[Tensors], None]] = {
    "nothing": lambda t: t.clear(),
    "a part less": lambda t: t.__delitem__(-1),
    "a part more": lambda t: t.append(torch.zeros(1)),
    "a million columns": spoil(0, lambda t: torch.zeros(1).expand(2, 1_000_000)),
    "one class less": spoil(0, lambda t: t[:1]),
    "a tree more": spoil(FEATURE, lambda t: torch.cat([t, t[:1]])),
    "a number for a table": spoil(0, lambda t: t.sum()),
    "not a number": spoil(0, put((0, 0), float("nan"))),
    "infinite": spoil(VALUE, put((0, 0), float("inf"))),
    "1e300": spoil(0, put((0, 0), 1e300)),
    "just too large": spoil(1, put((0,), 1.1 * LARGEST)),
    "a quantile without a value": spoil(11, put((0, 0), float("nan"))),
    "a cycle": spoil(LEFT, put((0, 0), 0)),
    "a way back": spoil(RIGHT, put((0, 0), -1)),
    "beyond the tree": spoil(RIGHT, put((0, 0), NODES)),
    "an unknown column": spoil(FEATURE, put((0, 0), len(NAMES))),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_message_is_refused_before_anything_in_it_is_used(change: Callable[[Tensors], None]) -> None:
    tensors = sent()
    assert tensors[FEATURE][0, 0] >= 0, "the first node of the first tree leads on"
    change(tensors)
    with pytest.raises(BadMessage, match="its message"):
        received(tuple(tensors), GOAL, len(NAMES))


@pytest.mark.parametrize("part", [FEATURE, LEFT])
def test_nodes_that_are_no_whole_numbers_are_refused(part: int) -> None:
    tensors = sent()
    tensors[part] = tensors[part].double()
    tensors[part][0, 0] += 0.5
    with pytest.raises(BadMessage, match="its message"):
        received(tuple(tensors), GOAL, len(NAMES))


def test_words_for_numbers_are_refused() -> None:
    tensors = sent()
    tensors[0] = torch.zeros(tensors[0].shape, dtype=torch.complex128)
    with pytest.raises(BadMessage, match="its message"):
        received(tuple(tensors), GOAL, len(NAMES))


def test_trees_end_however_they_are_made() -> None:
    """A chain through all nodes is walked to its end."""
    place = np.arange(NODES)
    chain = np.tile(np.where(place < NODES - 1, 0, -1), (trees_of(GOAL), 1))
    following = np.tile(np.minimum(place + 1, NODES - 1), (trees_of(GOAL), 1))
    value = np.zeros(chain.shape)
    value[:, -1] = 0.01
    trees = Trees(chain, np.zeros(chain.shape), following, following, value, np.zeros(1), np.zeros(1))
    np.testing.assert_allclose(trees.scores(np.zeros((4, 1)), GOAL)[:, 1], 0.01 * trees_of(GOAL))


def test_a_summary_by_hand() -> None:
    x = np.array([[1.0, 5.0], [2.0, np.nan], [3.0, 5.0], [4.0, 1.0]])
    found = summary_of(x, np.array([0.0, 0.0, 1.0, 1.0]))
    np.testing.assert_allclose(found.quantiles[0], np.quantile([1, 2, 3, 4], QUANTILES))
    assert found.missing.tolist() == [0.0, 0.25]
    assert found.frequent[1].tolist() == [5.0, 0.5]
    np.testing.assert_allclose(found.correlations, found.correlations.T)
    np.testing.assert_allclose(np.diag(found.correlations), 1.0)
    assert found.correlations[0, 2] == pytest.approx(np.corrcoef([1, 2, 3, 4], [1.5, 1.5, 3.5, 3.5])[0, 1])


def test_a_summary_of_nothing_is_finite() -> None:
    found = summary_of(np.full((3, 2), np.nan), np.ones(3))
    assert all(np.isfinite(part).all() for part in found)
    assert found.missing.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("labels", [np.arange(20) % 2, np.arange(21) % 3, np.random.default_rng(0).normal(size=23)])
def test_every_fold_has_its_share_of_each_class(labels: np.ndarray) -> None:
    folds = dealt(labels, 5, 0)
    sizes = np.bincount(folds)
    assert len(sizes) == 5
    assert sizes.max() - sizes.min() <= 1
    if labels.dtype.kind == "i":
        for label in np.unique(labels):
            counts = np.bincount(folds[labels == label], minlength=5)
            assert counts.max() - counts.min() <= 1
    assert not np.array_equal(folds, dealt(labels, 5, 1))


def test_a_message_of_one_row_and_of_one_class_can_be_made() -> None:
    x, y = rows(60, 1)
    for part in (x[:1], y[:1]), (x[:4], y[:4]), (x, np.ones(60)):
        found: Message = message(GOAL, *part)
        numbers = np.array([found.held_out, found.blind, found.rows])
        tensors = [torch.from_numpy(np.array(a)) for a in (*found.linear, *found.trees, numbers, *found.summary)]
        assert received(tuple(tensors), GOAL, len(NAMES)).rows == len(part[0])
