"""What each partner adds: leave-one-out and truncated Monte Carlo Shapley values, beside learned weights.

The value v(S) of a set S of partners is minus the held-out squared error of a model trained on the target's rows and
those of S, every holder weighted by its rows (at most half for all partners together).

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
from torch.func import vmap

from coterie.advise.screening import PARTNER_ROWS, TARGET_ROWS, ScreeningPlan, activations, at_once, errors_after, pool
from coterie.errors import UsageError
from coterie.federation import RESULT, Batch, Federation, LocalEngine, Shard, Static, work
from coterie.federation.tree import Tree
from coterie.numerics import Draw
from coterie.problems.files import PreparedFiles

ORDERS = 20
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
    plan: ScreeningPlan = ScreeningPlan(),  # noqa: B008
    draw: Draw | None = None,
    *,
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
    say(f"{kind}: at most {most} trainings on {plan.folds} folds each, all of a stage at once")
    game = _Game(data, plan, draw)
    everyone, nobody = frozenset(range(K)), frozenset[int]()
    whole, empty = game.values([everyone, nobody])
    if kind == "loo":
        without = game.values([everyone - {k} for k in range(K)])
        values = [whole - one for one in without]
    else:
        values = _shapley(game, K, orders, tolerance * abs(whole - empty), whole, empty, draw)
    moved = game.fed.ledger.total
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

    def __init__(self, data: PreparedFiles, plan: ScreeningPlan, draw: Draw) -> None:
        n = min(data.target_rows, TARGET_ROWS)
        span = data.span(0, 0, n)
        problem = data.problem(span._replace(length=0), span, None)
        self.plan, self.draw, self.start = plan, draw, problem.start
        self.most = min(PARTNER_ROWS, problem.train.capacity)
        each = plan.folds * activations(problem)
        chunk = at_once(ORDERS * each * self.most)
        self.chunk = at_once(each * n)
        self.fed = Federation.on(LocalEngine(problem.task, problem.train, None, problem.target, chunk=chunk))
        self.sizes = problem.train.counts.clamp(max=self.most).to(problem.start)
        self.own = n * (1.0 - 1.0 / plan.folds)
        self.known: dict[Members, float] = {}

    def values(self, sets: Sequence[Members]) -> list[float]:
        """v of each."""
        new = list(dict.fromkeys(one for one in sets if one not in self.known))
        if new:
            for one, error in zip(new, self._errors(new).mean(1).tolist(), strict=True):
                self.known[one] = -error
        return [self.known[one] for one in sets]

    def _errors(self, sets: Sequence[Members]) -> Tensor:
        """Held-out errors [A, n] of the models of these sets, trained together."""
        plan, fed = self.plan, self.fed
        member = torch.zeros(len(sets), fed.n, dtype=self.start.dtype)
        for a, one in enumerate(sets):
            member[a, sorted(one)] = 1.0
        rows = member * self.sizes
        together = rows.sum(1, keepdim=True)
        share = (together / (together + self.own)).clamp(max=0.5)
        W = share * rows / together.clamp(min=1.0)  # [A, K]

        def mixed(x: Tensor, own: Tensor) -> Tensor:
            given, ids = fed.gather(set_gradients, x, draw=self.draw, rows=self.most)
            return (1.0 - share)[:, :, None] * own + torch.einsum("ak,kafd->afd", W[:, ids], given)

        return errors_after(mixed, fed, self.start, len(sets), plan, self.chunk, self.draw)


@work("contributions/set-gradients", update=RESULT)
def set_gradients(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇L_k at the models of all sets, [A, F, d]."""
    rows = shard.train
    assert rows is not None
    index, weight = pool(rows, static.rows, draw)
    batch = Batch(rows.take(index).columns, weight)
    return vmap(vmap(lambda theta: shard.task.gradient(theta, batch)))(shared)
