"""The decision on plain arrays: nothing that judges has seen, what is delivered is not worse, and mine is mine."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from planted import message, rows

from coterie.advise import crossfit, decide
from coterie.advise.copies import OwnLines
from coterie.advise.crossfit import Rows, cross_fitted, rescaled
from coterie.advise.decide import Decision, Evidence
from coterie.advise.paired import paired
from coterie.advise.scores import chosen
from coterie.ensemble.goal import Goal
from coterie.ensemble.message import dealt, message_of
from coterie.ensemble.models import Linear, Model, fit_linear, fit_trees
from coterie.ensemble.stack import Stack, write_stack

Partners = list[tuple[str, tuple[Model, ...]]]
KINDS = [
    pytest.param(Goal(2), {}, id="two classes"),
    pytest.param(Goal(3), {"classes": 3}, id="three classes"),
    pytest.param(Goal(), {"number": True}, id="a number"),
]


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about how good trees are."""
    from coterie.ensemble import models

    monkeypatch.setattr(models, "TREES", 16)
    monkeypatch.setattr(models, "PACE", 1.6)
    monkeypatch.setattr(models, "FEWEST_ROUNDS", 4)


def partners_of(goal: Goal, kinds: dict[str, str], size: int = 200, **world: Any) -> Partners:
    each = enumerate(kinds.items())
    return [(name, message(goal, *rows(size, 10 + k, kind, **world)).models(goal)) for k, (name, kind) in each]


def decided(goal: Goal, partners: Partners, n: int = 60, own: str = "friend", **given: Any) -> Decision:
    world = {key: given.pop(key) for key in ("classes", "number") if key in given}
    x, y = rows(n, 1, own, **world)
    score = chosen("auto", y.astype(int) if goal.classes else y, goal.classes or None)
    return decide.decide(goal, score, x, y, partners, **given)


def bytes_of(stack: Stack) -> dict[str, bytes]:
    return write_stack(stack, {})


@pytest.mark.parametrize(("goal", "world"), KINDS)
def test_friends_are_used_and_their_gain_is_seen(goal: Goal, world: dict[str, Any]) -> None:
    n, kinds = 40 if goal.classes else 25, {"north": "friend", "east": "friend", "west": "opposite"}
    found = decided(goal, partners_of(goal, kinds, **world), n=n, **world)
    assert [one.admitted for one in found.judged] == [True, True, False]
    assert found.judged[0].z < -3 < found.judged[2].z
    assert found.gain.interval.value > 0
    assert found.judged[2].weight == 0.0
    assert sum(one.weight for one in found.judged) > 0.05
    x, y = rows(1500, 99, **world)
    ours, alone = (goal.losses(one.distribution(x), y).mean() for one in (found.delivered, found.alone))
    assert ours < alone
    assert [point.rows for point in found.curve] == [n, 2 * n, 5 * n]


@pytest.mark.parametrize(("goal", "world"), KINDS)
def test_without_anybody_of_use_mine_is_delivered(goal: Goal, world: dict[str, Any]) -> None:
    kinds = {f"site {k}": "friend" for k in range(6)}
    found = decided(goal, partners_of(goal, kinds, 60, **world), n=60 if goal.classes else 50, own="shuffled", **world)
    assert not any(one.admitted for one in found.judged)
    assert bytes_of(found.delivered) == bytes_of(found.alone)
    assert (found.answer, found.vetoed, found.curve) == ("no", False, ())
    assert found.gain.interval.value == found.gain_over_own_stack.interval.value == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_of_twenty_partners_who_know_nothing_of_my_labels_none_is_admitted(seed: int) -> None:
    goal = Goal(2)
    partners = [(f"s{k}", message(goal, *rows(50, 50 * seed + k)).models(goal)) for k in range(20)]
    x, y = rows(60, 1000 + seed, "shuffled")
    masks = np.ones((1, 60), dtype=bool)
    fits = (partial(fit_linear, goal=goal), partial(fit_trees, goal=goal))
    mine = Rows(goal, x, y, fits, tuple(tuple(m.scores(x, goal) for m in models) for _, models in partners), 0.2)
    assert not decide.admitted(mine.z(masks)[:, :, 0]).any()


@pytest.mark.parametrize(
    "change",
    [
        {"north": lambda x, y: (x * 1e6, y)},
        {"north": lambda x, y: (np.random.default_rng(0).normal(size=x.shape), y)},
        {"north": lambda x, y: (x[:, ::-1], y)},
        {"north": lambda x, y: (np.tile(x, (20, 1)), np.tile(y, 20))},
        {"north": lambda x, y: (x[:30], y[:30])},
        {"north": lambda x, y: (np.full_like(x, np.nan), y)},
        {"east": lambda x, y: (x, 1 - y)},
    ],
    ids=["units", "noise", "shuffled columns", "rows", "fewer rows", "nothing known", "opposite"],
)
@pytest.mark.parametrize(("goal", "world"), KINDS[::2])
def test_my_own_model_is_mine(goal: Goal, world: dict[str, Any], change: dict[str, Any]) -> None:
    def alone(change: dict[str, Any]) -> tuple[dict[str, bytes], str, list[bytes]]:
        partners: Partners = []
        for k, name in enumerate(("north", "east")):
            x, y = change.get(name, lambda x, y: (x, y))(*rows(120, 10 + k, **world))
            partners.append((name, message(goal, x, y).models(goal)))
        found = decided(goal, partners, **world)
        held = [found.predictions[kind][0].tobytes() for kind in ("linear", "trees", "stack")]
        return bytes_of(found.alone), found.own_choice, held

    assert alone(change) == alone({})


def own_rows(goal: Goal, partners: Partners, **world: Any) -> Rows:
    x, y = rows(60, 1, **world)
    fits = (partial(fit_linear, goal=goal), partial(fit_trees, goal=goal))
    scores = tuple(tuple(m.scores(x, goal) for m in models) for _, models in partners)
    return Rows(goal, x, y, fits, scores, 0.2)


@pytest.mark.parametrize("names", [("own", "pairs", "together"), ("own", "pairs", "stack")])
@pytest.mark.parametrize(("goal", "world"), KINDS)
def test_no_label_of_a_fold_has_a_part_in_what_is_said_of_it(
    goal: Goal, world: dict[str, Any], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other labels of a fold change gate, recalibration, weights and the model "together" of other folds only.

    What my own models say is held fixed, and for the stack what "together" says: those that predict the other folds
    have seen this one, as in any stack that is learnt from held-out predictions.
    """
    mine = own_rows(
        goal, partners_of(goal, {"north": "friend", "east": "friend", "west": "opposite"}, **world), **world
    )
    folds = dealt(mine.labels, 5, 0)
    fold = folds == 2
    fixed = [goal.distribution(fit(mine.inputs, mine.labels).scores(mine.inputs, goal)) for fit in mine.fits]

    class Fixed:
        def __init__(self, inputs: np.ndarray, labels: np.ndarray, j: int) -> None:
            self.j = j

        def scores(self, inputs: np.ndarray, goal: Goal) -> np.ndarray:
            place = [int(np.flatnonzero((mine.inputs == row).all(1))[0]) for row in inputs]
            return goal.scores(fixed[self.j][place])

    changed = mine.labels.copy()
    changed[fold] = mine.labels[fold][::-1] if not goal.classes else (mine.labels[fold] + 1) % goal.classes
    assert (changed != mine.labels).any()
    fits = tuple(partial(Fixed, j=j) for j in range(2))
    if "stack" in names:
        monkeypatch.setattr(crossfit, "_together", lambda *given: fixed[0][::-1])
    found, other = (
        cross_fitted(Rows(goal, mine.inputs, labels, fits, mine.scores, 0.2), folds)
        for labels in (mine.labels, changed)
    )
    for name in names:
        one, two = (getattr(each, name).reshape(-1, 60, *fixed[0].shape[1:]) for each in (found, other))
        np.testing.assert_array_equal(one[:, fold], two[:, fold], err_msg=name)
        assert name == "own" or not np.allclose(one[:, ~fold], two[:, ~fold]), name


def test_no_model_that_judges_a_row_has_seen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are known by their first column; every fit and every evaluation is written down."""
    goal, pairs = Goal(2), []

    class Watched:
        def __init__(self, inner: Model, known: np.ndarray) -> None:
            self.inner, self.known = inner, known

        def scores(self, inputs: np.ndarray, goal: Goal) -> np.ndarray:
            pairs.append((set(self.known), set(inputs[:, 0])))
            return self.inner.scores(inputs, goal)

    def watched(inputs: np.ndarray, labels: np.ndarray, *rest: Any) -> Watched:
        return Watched(fit_linear(inputs, labels, goal), inputs[:, 0])

    mine = own_rows(goal, partners_of(goal, {"north": "friend"}))
    monkeypatch.setattr(crossfit, "fit_linear", watched)
    folds = dealt(mine.labels, 5, 0)
    cross_fitted(Rows(goal, mine.inputs, mine.labels, (watched, watched), mine.scores, 0.2), folds)
    assert len(pairs) == 3 * 5  # two models of mine and "together", each without each fold
    for known, judged in pairs:
        assert not known & judged
        assert len(known | judged) == 60


def test_recalibration_sees_its_mask_only() -> None:
    mine = own_rows(Goal(2), partners_of(Goal(2), {"north": "friend"}))
    masks = dealt(mine.labels, 5, 0)[None] != np.arange(5)[:, None]
    found = rescaled(mine.goal, mine.scores[0], mine.labels, masks)
    changed = np.where(masks[3], mine.labels, 1 - mine.labels)
    other = rescaled(mine.goal, mine.scores[0], changed, masks)
    np.testing.assert_array_equal(found[:, 3], other[:, 3])
    assert not np.allclose(found[:, 2], other[:, 2])


def evidence(own: list[np.ndarray], stack: np.ndarray, y: np.ndarray, *, cautious: bool = False) -> Evidence:
    """What two equal dealings would have shown: probabilities of class 1 by my models and by the stack."""
    both = np.stack([np.stack([1 - p, p], axis=1) for p in [*own, stack]])
    one = crossfit.CrossFit(both[:-1], both[-1], both[-1:], both[0])
    mine = Rows(Goal(2), np.zeros((len(y), 1)), y, (), (), 0.2)
    return Evidence(mine, chosen("log_loss", y.astype(int), 2), cautious, (one, one))


Y = np.arange(40) % 2
RANDOM = np.random.default_rng(0)
WEAK = np.clip(0.5 + 0.2 * (Y - 0.5) + 0.1 * RANDOM.normal(size=40), 0.05, 0.95)
STRONG = np.clip(WEAK + 0.25 * (Y - 0.5), 0.02, 0.98)
HARDLY = np.clip(WEAK + 0.3 * RANDOM.permutation(Y - Y.mean()) + 0.02 * (Y - 0.5), 0.02, 0.98)


def test_the_least_held_out_loss_is_mine() -> None:
    for own, choice in (([WEAK, STRONG, WEAK], 1), ([STRONG, WEAK, WEAK], 0), ([WEAK, WEAK, STRONG], 2)):
        assert evidence(own, WEAK, Y).choice == choice


def test_a_worse_stack_is_vetoed() -> None:
    assert evidence([WEAK, WEAK, STRONG], WEAK, Y).vetoed
    assert not evidence([WEAK, WEAK, WEAK], STRONG, Y).vetoed
    assert evidence([WEAK, WEAK, WEAK], 1.0 - STRONG, Y).vetoed


def test_the_cautious_need_a_clear_gain() -> None:
    slight = np.clip(WEAK + 0.3 * RANDOM.normal(size=40) * 0.3, 0.02, 0.98)
    better = min(
        ((evidence([WEAK] * 3, p, Y).gain(0), p) for p in (slight, HARDLY, 2 * WEAK - slight)),
        key=lambda g: abs(g[0].z - 0.5),
    )[1]
    assert not evidence([WEAK] * 3, better, Y).vetoed
    assert evidence([WEAK] * 3, better, Y, cautious=True).vetoed
    assert not evidence([WEAK] * 3, STRONG, Y, cautious=True).vetoed


def test_a_loss_that_is_clearly_larger_is_vetoed_whatever_the_measure() -> None:
    """The ranks are the same, or better; the probabilities are not."""
    sure = np.where(Y > 0.5, 0.9, 0.1)
    wild = np.where(np.arange(40) < 3, 1.0 - Y, sure)
    found = evidence([WEAK, WEAK, sure], wild, Y)
    found = Evidence(found.rows, chosen("accuracy", Y.astype(int), 2), False, found.dealings)
    assert found.vetoed


def test_the_answer_follows_the_honest_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    d = np.random.default_rng(0).normal(size=(2, 50))
    d -= d.mean()
    assert decide._answer(paired(d + 2.0, 5)) == "yes"
    assert decide._answer(paired(d + 0.02, 5)) == "not yet"
    assert decide._answer(paired(d - 0.02, 5)) == "no"
    assert decide._answer(paired(np.zeros((2, 50)), 5)) == "no"


@pytest.mark.parametrize(("goal", "world"), KINDS)
def test_copies_of_my_rows_are_found_whatever_was_shaken(goal: Goal, world: dict[str, Any]) -> None:
    x, y = rows(150, 1, **world)
    lines = OwnLines.of(goal, x, y)

    def line(x: np.ndarray, y: np.ndarray) -> Linear:
        return message_of(x, y, goal, 20).linear

    assert lines.are(goal, line(x, y), x)
    shaken = x + 0.01 * np.random.default_rng(0).normal(size=x.shape) * np.nanstd(x, axis=0)
    assert lines.are(goal, line(shaken, y), x)
    assert not lines.are(goal, line(*rows(150, 3, **world)), x)
    assert not lines.are(goal, line(*rows(3000, 3, **world)), x)
    assert not lines.are(goal, line(*rows(150, 3, "shuffled", **world)), x)


def test_many_own_rows_judge_in_part_and_all_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "MOST_ROWS", 50)
    goal = Goal(2)
    found = decided(goal, partners_of(goal, {"north": "friend"}), n=90)
    assert found.rows.shape == (50,)
    assert len(np.unique(found.rows)) == 50
    assert found.rows.max() < 90
    assert all(each.shape[1:] == (50, 2) for each in found.predictions.values())
    x, y = rows(90, 1)
    linear = next(m.model for m in found.alone.members if m.kind == "linear") if found.own_choice != "trees" else None
    if linear is not None:
        assert any(np.array_equal(linear.weights, fit_linear(x, y, goal, c).weights) for c in (0.02, 0.2, 2.0)), (
            "the delivered model is fitted on all rows"
        )


def test_dealings_differ_and_end() -> None:
    goal = Goal()
    found = decided(goal, partners_of(goal, {"north": "friend"}, number=True), number=True)
    assert decide.FEWEST_DEALINGS <= found.dealings <= decide.MOST_DEALINGS
    held = found.predictions["linear"]
    assert not np.array_equal(held[0], held[1])


def test_a_few_lines_of_a_gain_with_its_interval() -> None:
    d = np.random.default_rng(0).normal(0.2, 1.0, 50)
    plain = paired(d[None], 5)
    assert plain.z == pytest.approx(d.mean() / d.std(ddof=1) * 50**0.5 / (1 + 2 / 4) ** 0.5)
    assert paired(np.stack([d, d + 0.5]), 5).error > plain.error, "dealings that differ widen the interval"
    assert plain.probability > 0.5 > paired(-d[None], 5).probability


@pytest.mark.parametrize("size", [1e3, 1e30, 1e300])
def test_scores_of_any_size_are_never_delivered_to_my_harm(size: float) -> None:
    """A model that is confident and wrong on every other row it meets."""

    class Wild:
        def __init__(self, sign: float) -> None:
            self.sign = sign

        def scores(self, inputs: np.ndarray, goal: Goal) -> np.ndarray:
            side = np.where(inputs[:, 0] > 60.0, 1.0, -1.0) * self.sign
            return np.stack([-side, side], axis=1) * size

    goal = Goal(2)
    with np.errstate(all="ignore"):
        found = decided(goal, [("a", (Wild(1.0), Wild(1.0))), ("b", (Wild(-1.0), Wild(-1.0)))])
        x, y = rows(500, 7)
        ours, alone = (goal.losses(one.distribution(x), y).mean() for one in (found.delivered, found.alone))
    assert np.isfinite(ours)
    assert ours < alone + 0.05
