"""What each partner adds: leave-one-out and truncated Monte Carlo Shapley values, beside learned weights.

The value v(S) of a set S of partners is minus the held-out loss of a model trained to the end on the target's rows and
those of S, every row counting the same.

leave-one-out   v(all) − v(all but k): K + 1 trainings. Blind to partners that can stand in for each other.
Shapley         the mean over random orders of v(those before k and k) − v(those before k) (Ghorbani and Zou 2019). An
                order is cut short where the rest cannot change v by more than the tolerance. At most P·K + 2
                trainings for P orders; each set is trained once. All sets of a stage are trained together.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from coterie.advise.mixtures import TARGET_ROWS, Arms, Mixtures
from coterie.advise.splits import Splits
from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems.files import PreparedFiles

ORDERS = 20
FOLDS = 5
TOLERANCE = 0.01  # of the whole value, below which an order is cut short
MOST = 30  # partners: beyond, the number of sets is no small problem

Members = frozenset[int]


class Contributions(NamedTuple):
    """One number per partner, how it was found, the trainings it took and what they moved."""

    kind: str
    values: list[float]
    trainings: int
    most: int
    whole: float
    empty: float
    rounds: int
    bytes: int

    def as_dict(self, weights: Sequence[float] | None) -> dict[str, Any]:
        """Plain data, with the rank correlation to learned weights."""
        agreement = None
        if weights is not None and len(self.values) > 2:
            rank = float(spearmanr(self.values, list(weights)[: len(self.values)]).statistic)
            agreement = rank if np.isfinite(rank) else None
        return {**self._asdict(), "agreement_with_weights": agreement}


def most_trainings(kind: str, partners: int, orders: int = ORDERS) -> int:
    """How many sets of partners may have to be trained."""
    if kind == "loo":
        return partners + 2
    return int(min(2.0**partners, partners * orders + 2))


def contributions(
    data: PreparedFiles,
    kind: str,
    draw: Draw | None = None,
    *,
    folds: int = FOLDS,
    l2: float | None = None,
    orders: int = ORDERS,
    tolerance: float = TOLERANCE,
    say: Callable[[str], None] = lambda text: None,
) -> Contributions:
    """Leave-one-out ("loo") or Shapley ("shapley") values of the partners."""
    K = len(data.partners)
    if kind not in ("loo", "shapley"):
        raise UsageError(f"contributions are 'loo' or 'shapley', not {kind!r}.")
    if K > MOST:
        raise UsageError(f"contributions of {K} partners would take too long; they are for at most {MOST}.")
    draw = Draw.of(data.context.seed).phase("contributions") if draw is None else draw
    most = most_trainings(kind, K, orders)
    say(f"{kind}: at most {most} trainings on {folds} folds each, all of a stage at once")
    game = _Game(data, folds, data.l2 if l2 is None else l2, draw)
    everyone, nobody = frozenset(range(K)), frozenset[int]()
    whole, empty = game.values([everyone, nobody])
    if kind == "loo":
        without = game.values([everyone - {k} for k in range(K)])
        values = [whole - one for one in without]
    else:
        values = _shapley(game, K, orders, tolerance * abs(whole - empty), whole, empty, draw)
    moved = game.mixtures.fed.ledger.total
    return Contributions(
        kind, values, len(game.known), most, whole, empty, moved.rounds, moved.bytes_up + moved.bytes_down
    )


def _shapley(
    game: "_Game", K: int, orders: int, tolerance: float, whole: float, empty: float, draw: Draw
) -> list[float]:
    """Stage j adds the j-th partner of every order that is not cut short yet."""
    ways = torch.stack([draw.phase("order").step(i).permutation(K) for i in range(orders)]).tolist()
    before, total = [empty] * orders, np.zeros(K)
    for j in range(K):
        going = [i for i in range(orders) if j == 0 or abs(whole - before[i]) > tolerance]
        after = game.values([frozenset(ways[i][: j + 1]) for i in going])
        for i, value in zip(going, after, strict=True):
            total[ways[i][j]] += value - before[i]
            before[i] = value
    return [float(value) for value in total / orders]


class _Game:
    """v(S) for any sets, each trained once."""

    def __init__(self, data: PreparedFiles, folds: int, l2: float, draw: Draw) -> None:
        n = min(data.target_rows, TARGET_ROWS)
        self.splits = Splits.of(data.orders[:1], n, folds, data.context.dtype)
        self.mixtures = Mixtures(data, self.splits.masks, draw)
        self.l2, self.n = l2, n
        self.known: dict[Members, float] = {}

    def values(self, sets: Sequence[Members]) -> list[float]:
        """v of each."""
        new = list(dict.fromkeys(members for members in sets if members not in self.known))
        if new:
            self.known |= dict(zip(new, (-self._losses(new)).tolist(), strict=True))
        return [self.known[members] for members in sets]

    def _losses(self, sets: Sequence[Members]) -> Tensor:
        """Held-out losses [A] of the models of these sets, trained together."""
        mixtures, F = self.mixtures, self.splits.F
        rows = torch.zeros(len(sets), mixtures.partners + 1).to(mixtures.start)
        rows[:, -1] = self.n
        for a, members in enumerate(sets):
            rows[a, sorted(members)] = mixtures.sizes[sorted(members)]
        share = self.n / rows.sum(1, keepdim=True)
        weights = (rows / rows.sum(1, keepdim=True)).repeat_interleave(F, 0)
        penalties = (self.l2 * share).repeat_interleave(F)
        thetas = mixtures.train(Arms(weights, self.splits.outer.repeat(len(sets)), penalties))
        on = self.splits.folds[0] == torch.arange(F)[:, None]
        return (mixtures.row_errors(thetas).view(len(sets), F, -1) * on).sum((1, 2)) / self.n
