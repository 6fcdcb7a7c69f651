"""The decision on plain arrays: my rows, the partners' models, and what follows from them.

1. Own models (linear, trees, all of them stacked) are fitted, tuned and chosen by my rows alone.
2. A partner whose models are no better than chance on my rows is left out (exact permutation test).
3. Models that pass are recalibrated and weighed with mine; a linear model of mine takes their mean scores as columns.
   Every step is repeated without each fold of my rows, which judges it (crossfit.py).
4. My best model is delivered where that stack is worse by more than a standard error in the loss or the measure (or,
   if the caller is cautious, where its loss is not better by one).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import sqrt
from typing import Literal, NamedTuple

import numpy as np
from scipy.stats import norm

from coterie.advise.crossfit import CrossFit, Fit, Rows, cross_fitted, rescaled
from coterie.advise.paired import NOTHING, Paired, paired
from coterie.advise.scores import Score
from coterie.ensemble.goal import Goal
from coterie.ensemble.message import dealt
from coterie.ensemble.models import Model, chosen_penalty, fit_linear, fit_trees
from coterie.ensemble.stack import TOGETHER, Member, Stack, mean_columns
from coterie.ensemble.weights import admitted, recalibrated, weights_of

FOLDS, HALVES = 5, 2
MOST_ROWS = 8192  # of one's own that judge; all of them fit the models that are delivered
FEWEST_DEALINGS, MOST_DEALINGS = 2, 6  # of rows to folds
CLEAR = 2.0  # standard errors of the dealings between the gain and what decides; below, folds are dealt again
SURE = 0.95
SMALL_WEIGHT = 0.01
MODELS = ("linear", "trees")  # of everybody; further ones are called by their number
TIMES_MORE = (1, 2, 5)
TINY = 1e-12

Answer = Literal["yes", "not yet", "no"]


class Judged(NamedTuple):
    """Of one partner: its exact z, whether it was admitted, its gain beside me alone over my own stack in the measure,
    its better model against my best in standard errors of the loss, and its share of the stack."""

    z: float
    admitted: bool
    gain: Paired
    against: float
    weight: float


class Point(NamedTuple):
    """The gain to expect with so many rows of my own, and its standard error."""

    rows: int
    gain: float
    error: float


class Decision(NamedTuple):
    """The answer with everything that it rests on. Predictions of my rows [dealings, n, …] are held out."""

    answer: Answer
    delivered: Stack
    alone: Stack
    own_choice: str
    judged: tuple[Judged, ...]
    gain: Paired
    gain_over_own_stack: Paired
    curve: tuple[Point, ...]
    predictions: dict[str, np.ndarray]
    rows: np.ndarray
    dealings: int
    vetoed: bool


@dataclass(frozen=True)
class Evidence:
    """What several dealings of my rows to folds have shown."""

    rows: Rows
    score: Score
    cautious: bool
    dealings: tuple[CrossFit, ...]
    folds: int = FOLDS

    def _predictions(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack([self.rows.goal.predictions(part) for part in parts])

    @property
    def stack(self) -> np.ndarray:
        """Held-out predictions of the stack with the partners, by dealing."""
        return self._predictions([one.stack for one in self.dealings])

    def own(self, j: int) -> np.ndarray:
        """Those of one of my models; the last is my stack."""
        return self._predictions([one.own[j] for one in self.dealings])

    @cached_property
    def choice(self) -> int:
        """Which of my models is the best: the least held-out loss; my stack only if its measure is not worse.

        Seen in the first dealings only: how many follow depends on partners, and mine is mine.
        """
        goal, y, first = self.rows.goal, self.rows.labels, self.dealings[:FEWEST_DEALINGS]
        losses = np.mean([[goal.losses(own, y).mean() for own in one.own] for one in first], axis=0)
        single, stack = int(losses[:-1].argmin()), len(losses) - 1
        stacked, alone = (self.own(j)[: len(first)] for j in (stack, single))
        better = self.score.by_row(stacked, alone, y).mean() >= 0.0
        return stack if losses[stack] < losses[single] and better else single

    def gain(self, over: int) -> Paired:
        """Of the stack over one of my models, in the measure."""
        return paired(self.score.by_row(self.stack, self.own(over), self.rows.labels), self.folds)

    @property
    def vetoed(self) -> bool:
        """Whether my best model is delivered: where the stack is worse by a standard error, in the loss or the measure
        (cautious: unless its loss is better by one and its measure not worse)."""
        goal, y = self.rows.goal, self.rows.labels
        lost = [goal.losses(one.own[self.choice], y) - goal.losses(one.stack, y) for one in self.dealings]
        gained = self.score.by_row(self.stack, self.own(self.choice), y)
        loss, measure = (in_errors(np.mean(each, axis=0)) for each in (lost, gained))
        return loss < 1.0 or measure < 0.0 if self.cautious else min(loss, measure) < -1.0

    @property
    def settled(self) -> bool:
        """Whether other dealings would hardly change the answer."""
        each = [replace(self, dealings=(one,)) for one in self.dealings]
        gain, gains = self.gain(self.choice), [one.gain(self.choice).interval.value for one in each]
        noise = CLEAR * float(np.std(gains, ddof=1)) / sqrt(len(gains))
        distances = abs(gain.interval.value), abs(gain.interval.value - float(norm.ppf(SURE)) * gain.error)
        return len({one.vetoed for one in each}) == 1 and min(distances) > noise

    def judged(self, k: int, z: float, weight: float, *, admitted: bool) -> Judged:
        """What is known of one partner."""
        goal, y = self.rows.goal, self.rows.labels
        beside = self._predictions([one.pairs[k] for one in self.dealings])
        every = np.ones((1, len(y)), dtype=bool)
        theirs = [goal.losses(found[0], y) for found in rescaled(goal, self.rows.scores[k], y, every)]
        mine = np.mean([goal.losses(one.own[self.choice], y) for one in self.dealings], axis=0)
        against = in_errors(mine - min(theirs, key=lambda one: float(one.mean())))
        return Judged(z, admitted, paired(self.score.by_row(beside, self.own(-1), y), self.folds), against, weight)


def in_errors(differences: np.ndarray) -> float:
    """A mean over rows in its standard errors."""
    return float(differences.mean()) / max(TINY, float(differences.std(ddof=1)) / sqrt(len(differences)))


def decide(
    goal: Goal,
    score: Score,
    inputs: np.ndarray,
    labels: np.ndarray,
    partners: Sequence[tuple[str, Sequence[Model]]],
    *,
    seed: int = 0,
    cautious: bool = False,
    more: Sequence[Fit] = (),
) -> Decision:
    """With whom should I train?

    Args:
        goal: the kind of the label.
        score: the measure that is shown.
        inputs: my rows, [n, p], NaN where missing.
        labels: mine.
        partners: who is no copy: the name, the linear model, the trees, and a model for each of `more`.
        seed: of the folds and of my trees.
        cautious: deliver the stack only where it is better by a standard error.
        more: how further models of mine are fitted.
    """
    n = len(labels)
    some = np.arange(n) if n <= MOST_ROWS else np.random.default_rng(seed).permutation(n)[:MOST_ROWS]
    x, y = inputs[some], labels[some].astype(int) if goal.classes else labels[some]
    penalty = chosen_penalty(x, y, goal, dealt(y, FOLDS, seed))
    linear, trees = partial(fit_linear, goal=goal, penalty=penalty), partial(fit_trees, goal=goal, seed=seed)
    fits: tuple[Fit, ...] = (linear,) if goal.edges else (linear, trees, *more)
    rows = Rows(goal, x, y, fits, tuple(tuple(m.scores(x, goal) for m in models) for _, models in partners), penalty)
    z = rows.z(np.ones((1, len(y)), dtype=bool))[:, :, 0]
    gate = admitted(z)
    evidence = Evidence(rows, score, cautious, ())
    while len(evidence.dealings) < FEWEST_DEALINGS or not (
        len(evidence.dealings) == MOST_DEALINGS or not gate.any() or evidence.settled
    ):
        folds = dealt(y, FOLDS, seed * MOST_DEALINGS + len(evidence.dealings))
        evidence = replace(evidence, dealings=(*evidence.dealings, cross_fitted(rows, folds)))
    vetoed = bool(gate.any()) and evidence.vetoed
    members, alone, stack = _fitted(evidence, inputs, labels, partners, gate)
    shares = {member.holder: 0.0 for member in members} | stack.shares()
    judged = tuple(
        evidence.judged(k, float(z[k].min()), shares.get(name, 0.0), admitted=bool(gate[k]))
        for k, (name, _) in enumerate(partners)
    )
    kinds = [*_kinds(len(fits)), "stack"]
    together = bool(gate.any()) and not vetoed
    gain = evidence.gain(evidence.choice) if together else NOTHING
    predictions = {kind: evidence.own(j)[:FEWEST_DEALINGS] for j, kind in enumerate(kinds)}
    return Decision(
        _answer(gain),
        stack if together else alone,
        alone,
        kinds[evidence.choice],
        judged,
        gain,
        evidence.gain(-1) if together else NOTHING,
        _curve(evidence, seed) if together else (),
        {**predictions, "delivered": evidence.stack if together else predictions[kinds[evidence.choice]]},
        some,
        len(evidence.dealings),
        vetoed,
    )


def _kinds(count: int) -> list[str]:
    return [*MODELS, *(f"model {j + 1}" for j in range(len(MODELS), count))][:count]


def _answer(gain: Paired) -> Answer:
    if gain.interval.value <= 0.0:
        return "no"
    return "yes" if gain.probability >= SURE else "not yet"


def _fitted(
    evidence: Evidence,
    inputs: np.ndarray,
    labels: np.ndarray,
    partners: Sequence[tuple[str, Sequence[Model]]],
    gate: np.ndarray,
) -> tuple[list[Member], Stack, Stack]:
    """All members, my best model, and the stack: fitted on all my rows, weighed by held-out predictions."""
    rows, found = evidence.rows, evidence.dealings
    goal, kinds = rows.goal, _kinds(len(rows.fits))
    plain = (np.zeros(goal.outputs), 1.0, 1.0)
    members = [Member("", kind, fit(inputs, labels), *plain) for kind, fit in zip(kinds, rows.fits, strict=True)]
    held = [np.concatenate([one.own[j] for one in found]) for j in range(len(members))]
    truth = np.tile(rows.labels, len(found))
    first = FEWEST_DEALINGS * len(rows.labels)
    own = Stack(goal, _weighed(goal, members, [each[:first] for each in held], truth[:first]))
    alone = own if evidence.choice == len(members) else Stack(goal, (members[evidence.choice],))
    inside = np.flatnonzero(gate).tolist()
    every = np.ones((1, len(rows.labels)), dtype=bool)
    for k in inside:
        name, models = partners[k]
        for kind, model, scores in zip(kinds, models, rows.scores[k], strict=True):
            levels, slopes = recalibrated(goal, scores, rows.labels, every)
            members.append(Member(name, kind, model, levels[0], float(slopes[0]), 1.0))
            held.append(np.tile(goal.distribution(levels[0] + slopes[0] * scores), (len(found), 1)))
    if not inside:
        return members, alone, alone
    pooled = tuple(tuple(partners[k][1][: len(MODELS)]) for k in inside)
    x = np.hstack([inputs, *mean_columns(goal, [[m.scores(inputs, goal) for m in pair] for pair in pooled])])
    members.append(Member(TOGETHER, MODELS[0], fit_linear(x, labels, goal, rows.penalty), *plain))
    held.append(np.concatenate([one.together for one in found]))
    return members, alone, Stack(goal, _weighed(goal, members, held, truth), pooled)


def _weighed(
    goal: Goal, members: Sequence[Member], held: Sequence[np.ndarray], labels: np.ndarray
) -> tuple[Member, ...]:
    """Members with their weights; without those that hardly count."""
    weights = weights_of(goal, np.stack(held)[None], labels, np.ones((1, len(labels)), dtype=bool))[0]
    weights = np.where(weights >= SMALL_WEIGHT, weights, 0.0)
    weights /= weights.sum()
    return tuple(m._replace(weight=float(w)) for m, w in zip(members, weights, strict=True) if w > 0.0)


def _curve(evidence: Evidence, seed: int) -> tuple[Point, ...]:
    """The gain at my rows and at more: measures change as a + b/n, seen with a half and four fifths of my rows."""
    rows, choice = evidence.rows, evidence.choice
    halves = cross_fitted(rows, dealt(rows.labels, HALVES, seed))
    few = replace(evidence, dealings=(halves,), folds=HALVES).gain(choice)
    many = evidence.gain(choice)
    u, v = HALVES / (HALVES - 1.0), FOLDS / (FOLDS - 1.0)
    points = []
    for times in TIMES_MORE:
        t = (1.0 / times - v) / (u - v)
        value = many.interval.value + t * (few.interval.value - many.interval.value)
        points.append(
            Point(len(rows.labels) * times, value, sqrt(((1.0 - t) * many.error) ** 2 + (t * few.error) ** 2))
        )
    return tuple(points)
