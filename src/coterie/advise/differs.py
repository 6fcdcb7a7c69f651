"""What differs at a partner: a unit, a code for no value, a reversed scale, exchanged classes, labels of a region.

Found from the summary in its message and from what its models say of my rows. A unit, a reversed scale and exchanged
classes can be undone without asking again: the arrays of its models are rewritten for my columns.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np

from coterie.advise.units import near_factors
from coterie.ensemble.goal import Goal
from coterie.ensemble.message import Message, Summary
from coterie.ensemble.models import Linear, Model, Trees
from coterie.ensemble.weights import permutation_z

Kind = Literal["unit", "missing code", "reversed", "classes", "region"]
FIT = 0.15  # of my range of quantiles by which quantiles may miss the map between two units
APART = 5.0  # times my range, larger or smaller, is another unit though the values lie in mine
CODE_SHARE = 0.03
FAR = 0.25  # of my range beyond it, for a code
OPPOSITE, REVERSED_Z = -0.5, -4.0  # cosine of rank correlations, and its distance from 0
SWAPPED_Z = 2.0
LEARNT = 0.97  # of the loss of knowing no column, below which a partner's trees have learnt something
CONTRADICTED = 1.0  # standard deviations that undoing a difference may cost before it is not believed
CUTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
MOST_CLASSES = 6  # of which all pairs are tried
REGION_Z = 2.5


class Difference(NamedTuple):
    """One thing that differs.

    Args:
        kind: of what.
        column: its name; "" for the label.
        ratio: my values are ratio × theirs + offset.
        offset: the same.
        classes: the two that are exchanged.
        text: for people.
    """

    kind: Kind
    column: str
    ratio: float = 1.0
    offset: float = 0.0
    classes: tuple[int, ...] = ()
    text: str = ""

    @property
    def can_be_undone(self) -> bool:
        """Whether the partner's models can be rewritten."""
        return self.kind in ("unit", "reversed", "classes")


def differences(
    goal: Goal,
    mine: Summary,
    inputs: np.ndarray,
    labels: np.ndarray,
    theirs: Message,
    names: Sequence[str],
    classes: Sequence[str] = (),
    label: str = "the label",
) -> list[Difference]:
    """What differs at a partner, the surest first.

    Args:
        goal: the kind of the label.
        mine: the summary of my rows.
        inputs: my rows.
        labels: mine.
        theirs: the partner's message.
        names: of the columns of numbers, which come first among the inputs.
        classes: their names.
        label: its name.
    """
    found = []
    for j, name in enumerate(names):
        low, high = np.nanmin(inputs[:, j], initial=np.inf), np.nanmax(inputs[:, j], initial=-np.inf)
        one = _unit(name, mine.quantiles[j], theirs.summary.quantiles[j], low, high)
        one = one or _code(name, theirs.summary.frequent[j], low, high)
        found += [one] if one else []
    found += _reversed(names, {one.column for one in found}, mine, theirs.summary, len(labels), theirs.rows)
    models = rewritten(theirs, [one for one in found if one.can_be_undone], names, goal)
    if theirs.held_out > LEARNT * theirs.blind:  # labels without a pattern of their own say nothing about classes
        return found
    swapped = _swapped(goal, models, inputs, labels, classes, label)
    if swapped is not None:
        return [*found, swapped]
    region = _region(goal, models, inputs, labels, names)
    return [*found, *([region] if region else [])]


def confirmed(
    goal: Goal,
    theirs: Message,
    found: Sequence[Difference],
    names: Sequence[str],
    inputs: np.ndarray,
    labels: np.ndarray,
) -> tuple[list[Difference], tuple[Model, ...], tuple[float, float]]:
    """Differences that my rows do not contradict, the models for my columns, and how far both fit my labels better than
    chance, in standard deviations: as sent, and with what differs undone.

    Args:
        goal: the kind of the label.
        theirs: the partner's message.
        found: what seems to differ.
        names: of the columns of numbers.
        inputs: my rows.
        labels: mine.
    """
    every = np.ones((1, len(labels)), dtype=bool)

    def fit(models: Sequence[Model]) -> float:
        distributions = (goal.distribution(model.scores(inputs, goal)) for model in models)
        return -min(float(permutation_z(goal, one, labels, every)[0]) for one in distributions)

    sent, undone = theirs.models(goal), rewritten(theirs, [d for d in found if d.can_be_undone], names, goal)
    before, after = fit(sent), fit(undone)
    if after < before - CONTRADICTED:
        return [one for one in found if not one.can_be_undone], sent, (before, before)
    return list(found), undone, (before, after)


def _unit(name: str, mine: np.ndarray, theirs: np.ndarray, low: float, high: float) -> Difference | None:
    """Values outside my range, or of quite another spread, that an affine map of the quantiles brings back."""
    spread, their_spread = mine[-1] - mine[0], theirs[-1] - theirs[0]
    if min(len(np.unique(mine)), len(np.unique(theirs))) < len(mine) - 1:
        return None
    outside = not low <= theirs[2] <= high
    wider = max(spread / their_spread, their_spread / spread) >= APART
    if not (outside or wider):
        return None
    ratio, offset = float(mine @ theirs / (theirs @ theirs)), 0.0
    slope, start = map(float, np.polyfit(theirs, mine, 1))
    plain, shifted = (float(np.abs(a * theirs + b - mine).max()) for a, b in ((ratio, 0.0), (slope, start)))
    if outside and slope > 0 and (plain > FIT * spread or (shifted < plain and near_factors(slope, start))):
        ratio, offset, plain = slope, start, shifted
    if plain > FIT * spread:
        return None
    return Difference("unit", name, ratio, offset, text=_unit_text(name, ratio, offset))


def _unit_text(name: str, ratio: float, offset: float) -> str:
    known = near_factors(ratio, offset)
    hint = f" ({known})" if known else ""
    if offset:
        return f"column {name!r} seems to have another unit: yours is about {ratio:.3g} × theirs {offset:+.3g}{hint}"
    size = f"{1 / ratio:.3g} times larger" if ratio < 1 else f"{ratio:.3g} times smaller"
    return f"column {name!r} seems to have another unit: theirs is about {size}{hint}"


def _code(name: str, frequent: np.ndarray, low: float, high: float) -> Difference | None:
    value, share = frequent
    margin = FAR * (high - low)
    if share < CODE_SHARE or low - margin <= value <= high + margin:
        return None
    return Difference(
        "missing code", name, text=f"column {name!r} holds {value:g} in {share:.0%} of its rows: a code for no value?"
    )


def _reversed(
    names: Sequence[str], known: set[str], mine: Summary, theirs: Summary, own_rows: int, their_rows: int
) -> list[Difference]:
    """Columns whose rank correlations with the others and the label have the opposite signs, the clearest first.

    A column that is found is turned round before others are looked at: those that go with it seemed reversed, too.
    """
    found: list[Difference] = []
    correlations = theirs.correlations.copy()
    while True:
        clearest = 0.0, -1
        for j, name in enumerate(names):
            others = [*(i for i in range(len(names)) if i != j), len(correlations) - 1]
            a, b = mine.correlations[j, others], correlations[j, others]
            norm = float(np.linalg.norm(a) * np.linalg.norm(b))
            spread = float(np.sqrt((np.square(a) / their_rows + np.square(b) / own_rows).sum()))
            if name in known or norm * spread == 0.0 or a @ b > OPPOSITE * norm or a @ b > REVERSED_Z * spread:
                continue
            clearest = min(clearest, (float(a @ b) / spread, j))
        j = clearest[1]
        if j < 0:
            return found
        known = known | {names[j]}
        ratio, offset = map(float, np.polyfit(theirs.quantiles[j], mine.quantiles[j][::-1], 1))
        if ratio >= 0:
            continue
        correlations[j] *= -1.0
        correlations[:, j] *= -1.0
        text = f"column {names[j]!r} seems to run the other way"
        found.append(Difference("reversed", names[j], ratio, offset, text=text))


def _swapped(
    goal: Goal, models: Sequence[Model], inputs: np.ndarray, labels: np.ndarray, classes: Sequence[str], label: str
) -> Difference | None:
    """Two classes that its models give to each other's rows."""
    if not 2 <= goal.classes <= MOST_CLASSES:
        return None
    every = np.ones((1, len(labels)), dtype=bool)

    def weaker(exchange: tuple[int, int] | None) -> float:
        found = []
        for model in models:
            scores = model.scores(inputs, goal)
            if exchange is not None:
                scores[:, list(exchange)] = scores[:, list(exchange[::-1])]
            found.append(float(permutation_z(goal, goal.distribution(scores), labels, every)[0]))
        return max(found)  # of both models: one alone may be so by chance

    before = weaker(None)
    pair = min(combinations(range(goal.classes), 2), key=weaker)
    after = weaker(pair)
    if after > -SWAPPED_Z or before - after < 2.0 * SWAPPED_Z:
        return None
    names = [classes[c] if c < len(classes) else str(c) for c in pair]
    return Difference(
        "classes", "", classes=pair, text=f"the classes {names[0]!r} and {names[1]!r} of {label!r} seem exchanged"
    )


def _region(
    goal: Goal, models: Sequence[Model], inputs: np.ndarray, labels: np.ndarray, names: Sequence[str]
) -> Difference | None:
    """Labels that my rows contradict on one side of a cut only."""
    if goal.classes != 2:
        return None
    best: tuple[float, str] = (REGION_Z, "")
    for j, name in enumerate(names):
        column = inputs[:, j]
        cuts: Any = np.unique(np.nanquantile(column, CUTS)) if not np.isnan(column).all() else []
        masks = [side for cut in cuts for side in (column <= cut, column > cut) if 0 < side.sum() < len(labels)]
        if len(masks) < 2:
            continue
        for model in models:
            z = permutation_z(goal, goal.distribution(model.scores(inputs, goal)), labels, np.array(masks))
            for one, other, cut in zip(z[::2], z[1::2], cuts, strict=False):
                strength = min(abs(one), abs(other))
                if one * other < 0 and strength > best[0]:
                    side = "up to" if one > 0 else "above"
                    best = strength, f"its labels contradict yours where {name!r} is {side} {cut:.4g}"
    return Difference("region", "", text=best[1]) if best[1] else None


def rewritten(theirs: Message, found: Sequence[Difference], names: Sequence[str], goal: Goal) -> tuple[Model, ...]:
    """A partner's models for my columns and classes, with what differs undone.

    Args:
        theirs: the partner's message.
        found: what differs and can be undone.
        names: of the columns of numbers.
        goal: the kind of the label.
    """
    linear, trees = theirs.linear, theirs.trees
    for one in found:
        if one.kind == "classes":
            linear, trees = _exchanged(linear, trees, one.classes, goal)
        else:
            j = list(names).index(one.column)
            linear, trees = _mapped(linear, j, one.ratio, one.offset), _mapped_trees(trees, j, one.ratio, one.offset)
    return theirs._replace(linear=linear, trees=trees).models(goal)


def _mapped(model: Linear, j: int, ratio: float, offset: float) -> Linear:
    """For my values of column j, which are ratio × theirs + offset."""
    weights, fill = model.weights.copy(), model.fill.copy()
    weights[:, j] /= ratio
    fill[j] = ratio * fill[j] + offset
    return Linear(weights, model.bias - offset * weights[:, j], fill)


def _mapped_trees(trees: Trees, j: int, ratio: float, offset: float) -> Trees:
    here = trees.feature == j
    threshold, fill = trees.threshold.copy(), trees.fill.copy()
    threshold[here] = ratio * threshold[here] + offset
    fill[j] = ratio * fill[j] + offset
    if ratio > 0:
        return trees._replace(threshold=threshold, fill=fill)
    threshold[here] = np.nextafter(threshold[here], np.float32(-np.inf))  # what was at most a threshold is now at least
    left, right = np.where(here, trees.right, trees.left), np.where(here, trees.left, trees.right)
    return trees._replace(threshold=threshold, left=left, right=right, fill=fill)


def _exchanged(linear: Linear, trees: Trees, pair: Sequence[int], goal: Goal) -> tuple[Linear, Trees]:
    order = np.arange(goal.classes)
    order[list(pair)] = order[list(pair[::-1])]
    linear = linear._replace(weights=linear.weights[order], bias=linear.bias[order])
    if goal.classes == 2:
        return linear, trees._replace(value=-trees.value, base=-trees.base)
    by_tree = (np.arange(len(trees.feature)) // goal.classes)[:, None] * goal.classes + order
    rows = by_tree[:: goal.classes].ravel()
    moved = {name: getattr(trees, name)[rows] for name in Trees._fields[:5]}
    return linear, trees._replace(**moved, base=trees.base[order])
