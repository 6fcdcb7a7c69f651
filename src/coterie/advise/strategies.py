"""Alone, with the partners that agree, with all, or by learned weights: chosen by nested validation.

For every fold of every order of the target's rows, the choice among strategies and strengths of the penalty is made on
the other folds alone, and judged on the fold: so the choice is part of what is judged. Every strategy is a vector of
weights of holders; its model is trained to the end on that mixture (mixtures.py).

alone     the target's own rows.
helpers   own rows and those of the partners that agree (agreement.py), every row counting the same.
wider     the same with the partners that agree in part.
all       own rows and those of all partners, every row counting the same.
learned   the weights that the method learns by bilevel optimisation; partners whose labels carry nothing get none.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.advise import agreement
from coterie.advise.agreement import Agreement, Slope
from coterie.advise.mixtures import Arms, Mixtures
from coterie.advise.splits import Splits
from coterie.numerics import Draw

ALONE, HELPERS, WIDER, ALL, LEARNED = NAMES = ("alone", "helpers", "wider", "all", "learned")
DOUBTFUL = (ALL, LEARNED)
PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # times problem.l2, for the target's own rows
LIGHTER = (0.03, 0.1, 0.3, 1.0)  # times the penalty that is best alone: more rows need less
PARTLY = 0.5  # agreement above which a partner agrees in part
LEAST = 0.01  # of the learned weights that count
MOST = 0.7  # of the weight that a single partner gets beside the target
Weights = Callable[[int, int], Tensor | None]


class Chosen(NamedTuple):
    """One strategy with the strength of its penalty, and the weights [K + 1] of the holders, the target's own last."""

    name: str
    weights: Tensor
    l2: float


class Trial(NamedTuple):
    """Everything that cross-fitting found.

    By strategy, and for "delivered" (the choice): held-out predictions [R, n, outputs], row_losses [R, n] and their
    mean, picks (how often it was chosen) and own (the mean weight of the target's rows). final is what is delivered,
    theta its model. fewer are predictions [R (F − 1), n, outputs] of training alone with one fold less, from which one
    sees how much more rows would help.
    """

    predictions: dict[str, np.ndarray]
    losses: dict[str, float]
    picks: dict[str, int]
    final: Chosen
    theta: Tensor
    agreement: Agreement
    alone_l2: float
    row_losses: dict[str, np.ndarray]
    own: dict[str, float]
    fewer: np.ndarray
    fewer_losses: np.ndarray


class _Table:
    """Models by what they were trained on; each is trained once."""

    def __init__(self, mixtures: Mixtures, splits: Splits) -> None:
        self.mixtures, self.splits = mixtures, splits
        self.number: dict[tuple[bytes, int, float], int] = {}
        self.thetas = mixtures.start.new_zeros(0, len(mixtures.start))
        self.losses = mixtures.start.new_zeros(0, splits.masks.shape[1])

    def key(self, chosen: Chosen, mask: int) -> tuple[bytes, int, float]:
        return chosen.weights.numpy().tobytes(), mask, chosen.l2

    def train(self, wanted: list[tuple[Chosen, int]]) -> None:
        """Train what is not known yet, all at once."""
        new = {self.key(*pair): pair for pair in wanted if self.key(*pair) not in self.number}
        if not new:
            return
        like = self.mixtures.start
        arms = Arms(
            torch.stack([chosen.weights for chosen, _ in new.values()]).to(like),
            torch.tensor([mask for _, mask in new.values()]),
            torch.tensor([chosen.l2 for chosen, _ in new.values()]).to(like),
        )
        thetas = self.mixtures.train(arms, self._near(new))
        self.number |= {key: len(self.thetas) + i for i, key in enumerate(new)}
        self.thetas = torch.cat([self.thetas, thetas])
        self.losses = torch.cat([self.losses, self.mixtures.row_errors(thetas)])

    def _near(self, new: dict[tuple[bytes, int, float], tuple[Chosen, int]]) -> Tensor | None:
        """Where to start: at the model of the same mixture on all rows, which is trained first.

        Only linear models are trained to an end that does not depend on the start; others must not begin at a model
        that has seen the rows that judge them.
        """
        if not self.mixtures.task.model.linear:
            return None
        whole = {self.key(chosen, self.splits.whole): chosen for chosen, _ in new.values()}
        missing = [key for key in whole if key not in self.number and key not in new]
        if missing:
            self.train([(whole[key], self.splits.whole) for key in missing])
        start = self.mixtures.start
        return torch.stack(
            [
                self.thetas[number]
                if (number := self.number.get(self.key(chosen, self.splits.whole))) is not None
                else start
                for chosen, _ in new.values()
            ]
        )

    def theta(self, chosen: Chosen, mask: int) -> Tensor:
        return self.thetas[self.number[self.key(chosen, mask)]]

    def inner(self, chosen: Chosen, r: int, f: int) -> Tensor:
        """The losses of the rows of all folds but f, by models that saw neither f nor the row's fold, [rows]."""
        parts = [(r, g, self.splits.without(r, f, g)) for g in range(self.splits.F) if g != f]
        return torch.cat([self._held(chosen, *part) for part in parts])

    def outer(self, chosen: Chosen, r: int, f: int) -> Tensor:
        """The losses of the rows of fold f by the model that did not see them, [rows]."""
        return self._held(chosen, r, f, self.splits.without(r, f))

    def _held(self, chosen: Chosen, r: int, g: int, mask: int) -> Tensor:
        return self.losses[self.number[self.key(chosen, mask)]][self.splits.folds[r] == g].double()

    def over_orders(self, chosen: Chosen) -> Tensor:
        """The losses of all rows by models that did not see them, averaged over the orders, [n]."""
        splits = self.splits
        masks = [[splits.without(r, f) for f in range(splits.F)] for r in range(splits.repeats)]
        numbers = torch.tensor([[self.number[self.key(chosen, mask)] for mask in row] for row in masks])
        rows = torch.arange(splits.masks.shape[1])
        return (
            torch.stack([self.losses[numbers[r][splits.folds[r]], rows] for r in range(splits.repeats)])
            .double()
            .mean(0)
        )


def best_of(options: Sequence[Chosen], losses: Callable[[Chosen], Tensor]) -> Chosen:
    """The option with the lowest mean error; doubtful ones only if they are better by a standard error.

    Learned weights have seen the rows that judge them here, so that their error comes out too low; everybody includes
    partners of whom nothing good is known. Where partners agree, their rows are of the same kind as the target's, and
    more such rows help: training alone is doubtful then, and few held-out rows alone must not tell otherwise.
    """
    by_option = {i: losses(option) for i, option in enumerate(options)}
    ranked = sorted(by_option, key=lambda i: float(by_option[i].mean()))
    first = ranked[0]
    doubtful = DOUBTFUL if all(option.name != HELPERS for option in options) else (*DOUBTFUL, ALONE)
    if options[first].name in doubtful:
        other = next((i for i in ranked if options[i].name not in doubtful), first)
        ahead = by_option[other] - by_option[first]
        if float(ahead.mean()) < float(ahead.std()) / len(ahead) ** 0.5:
            first = other
    return options[first]


def eligible(options: dict[str, Chosen], found: Agreement) -> list[Chosen]:
    """What may be delivered: everybody only if the labels of all partners carry something."""
    return [option for name, option in options.items() if name != ALL or found.carries.all()]


def trial(mixtures: Mixtures, splits: Splits, l2: float, learned: Weights, placebos: int, draw: Draw) -> Trial:
    """Cross-fit everything.

    Args:
        mixtures: trains the models.
        splits: folds of the target's rows.
        l2: the penalty around which others are tried.
        learned: the weights that the method learns without fold f of order r, or (−1, −1) from all rows.
        placebos: shuffles of every partner's labels.
        draw: randomness of the shuffles.
    """
    table = _Table(mixtures, splits)
    K, places = mixtures.partners, [(r, f) for r in range(splits.repeats) for f in range(splits.F)]
    own = torch.zeros(K + 1)
    own[-1] = 1.0
    alone = [Chosen(ALONE, own, l2 * factor) for factor in PENALTIES]
    table.train([(one, mask) for one in alone for mask in range(len(splits.masks))])
    best_alone = {(r, f): best_of(alone, partial(table.inner, r=r, f=f)) for r, f in places}
    overall = best_of(alone, table.over_orders)
    agreed, by_place = _agreements(table, overall, best_alone, placebos, draw)

    def candidates(found: Agreement, weights: Tensor | None, base: float) -> dict[str, list[Chosen]]:
        sets = {
            HELPERS: pooled(mixtures, found.agrees),
            WIDER: pooled(mixtures, found.carries & (found.value > PARTLY)),
            ALL: pooled(mixtures, np.ones(K, bool)),
        }
        if torch.equal(sets[HELPERS], sets[WIDER]):
            del sets[WIDER]
        if weights is not None:
            sets[LEARNED] = floored(weights, found)
        return {
            name: [Chosen(name, vector, base * factor) for factor in LIGHTER]
            for name, vector in sets.items()
            if not torch.equal(vector, own)
        }

    inner: dict[tuple[int, int], dict[str, list[Chosen]]] = {}
    wanted: list[tuple[Chosen, int]] = []
    for r, f in places:
        inner[r, f] = candidates(by_place[r, f], learned(r, f), best_alone[r, f].l2)
        masks = [splits.without(r, f, g) for g in range(splits.F)]
        wanted += [(one, mask) for options in inner[r, f].values() for one in options for mask in masks]
    from_all = learned(-1, -1)
    names = tuple(name for name in NAMES if name != LEARNED or from_all is not None)
    final = candidates(agreed, from_all, overall.l2)
    wanted += [(one, splits.without(r, f)) for options in final.values() for one in options for r, f in places]
    table.train(wanted)

    predictions: dict[str, list[np.ndarray]] = {}
    by_row: dict[str, list[np.ndarray]] = {}
    picks = dict.fromkeys(names, 0)
    shared: dict[str, list[float]] = {}
    for r in range(splits.repeats):
        rows: dict[str, Tensor] = {}
        lost: dict[str, Tensor] = {}
        for f in range(splits.F):
            on = splits.folds[r] == f
            best = {ALONE: best_alone[r, f]}
            judge = partial(table.inner, r=r, f=f)
            best |= {name: best_of(options, judge) for name, options in inner[r, f].items()}
            pick = best_of(eligible(best, by_place[r, f]), judge)
            picks[pick.name] += 1
            for name in (*names, "delivered"):
                instead = best.get(HELPERS, best[ALONE]) if name == WIDER else best[ALONE]
                used = pick if name == "delivered" else best.get(name, instead)
                outputs = mixtures.predictions(table.theta(used, splits.without(r, f))[None])[0]
                rows.setdefault(name, torch.zeros_like(outputs))[on] = outputs[on]
                shared.setdefault(name, []).append(float(used.weights[-1]))
                each = table.losses[table.number[table.key(used, splits.without(r, f))]]
                lost.setdefault(name, torch.zeros_like(each))[on] = each[on]
        for name, values in rows.items():
            predictions.setdefault(name, []).append(values.double().numpy())
            by_row.setdefault(name, []).append(lost[name].double().numpy())
    honest = {name: torch.as_tensor(np.mean(values, axis=0)) for name, values in by_row.items()}
    options = {ALONE: overall} | {name: best_of(several, table.over_orders) for name, several in final.items()}
    delivered = best_of(eligible(options, agreed), lambda option: honest[option.name])
    table.train([(delivered, splits.whole)])
    return Trial(
        {name: np.stack(values) for name, values in predictions.items()},
        {name: float(np.mean(values)) for name, values in by_row.items()},
        picks,
        delivered,
        table.theta(delivered, splits.whole),
        agreed,
        overall.l2,
        {name: np.stack(values) for name, values in by_row.items()},
        {name: float(np.mean(values)) for name, values in shared.items()},
        *_with_fewer(table, overall),
    )


def _with_fewer(table: _Table, alone: Chosen) -> tuple[np.ndarray, np.ndarray]:
    """Training alone without two folds: predictions and losses on one of them."""
    splits, F = table.splits, table.splits.F
    predictions, losses = [], []
    for r in range(splits.repeats):
        for shift in range(1, F):
            parts = [(alone, r, g, splits.without(r, g, (g + shift) % F)) for g in range(F)]
            predictions.append(sum_of(table, parts).double().numpy())
            rows = torch.stack([table.losses[table.number[table.key(alone, mask)]] for *_, mask in parts])
            losses.append(rows.gather(0, splits.folds[r][None])[0].double().numpy())
    return np.stack(predictions), np.stack(losses)


def _agreements(
    table: _Table, overall: Chosen, best: dict[tuple[int, int], Chosen], placebos: int, draw: Draw
) -> tuple[Agreement, dict[tuple[int, int], Agreement]]:
    """From all rows, and without each fold. One exchange."""
    splits, mixtures = table.splits, table.mixtures
    others = {place: [g for g in range(splits.F) if g != place[1]] for place in best}
    first = torch.stack([table.theta(overall, splits.without(r, f)) for r, f in best])
    rest = torch.stack(
        [torch.stack([table.theta(best[r, f], splits.without(r, f, g)) for g in others[r, f]]) for r, f in best]
    )
    groups = [first, *rest]
    given = agreement.ask(mixtures, groups, placebos, draw)
    number = mixtures.task.classes is None
    G = len(groups)
    shuffled = np.concatenate([given[:, :1, 0], given[:, G:, 0]], 1)
    shuffled[:, 0] = given[:, 0, 0]
    held = torch.stack(
        [sum_of(table, [(overall, r, f, splits.without(r, f)) for f in range(splits.F)]) for r in range(splits.repeats)]
    )
    full = agreement.compared(
        own_slope(mixtures, held, torch.ones(held.shape[1])), agreement.slopes(given[:, 0]), shuffled, number=number
    )
    found = {}
    for i, (r, f) in enumerate(best):
        on = (splits.folds[r] != f).to(held)
        parts = [(best[r, f], r, g, splits.without(r, f, g)) for g in others[r, f]]
        mine = own_slope(mixtures, sum_of(table, parts)[None], on)
        found[r, f] = agreement.compared(mine, agreement.slopes(given[:, 1 + i]), None, number=number)
    return full, found


def with_each(mixtures: Mixtures, splits: Splits, l2: float) -> tuple[np.ndarray, np.ndarray]:
    """Held-out predictions [K, R, n, outputs] and losses [K, R, n] of models trained with one partner each.

    Every row counts the same, up to MOST of the weight for the partner.
    """
    K, R, F = mixtures.partners, splits.repeats, splits.F
    share = shares(mixtures)
    weights = torch.zeros(K, R * F, K + 1).to(share)
    weights[torch.arange(K), :, torch.arange(K)] = share[:, None]
    weights[:, :, -1] = 1.0 - share[:, None]
    penalty = (l2 * (1.0 - share)).repeat_interleave(R * F)
    thetas = mixtures.train_pairs(Arms(weights.flatten(0, 1), splits.outer.repeat(K), penalty))
    on = (splits.folds[:, None] == torch.arange(F)[:, None]).to(thetas)  # [R, F, n]
    shape = (K, R, F, splits.masks.shape[1])
    predicted = torch.einsum("krfno,rfn->krno", mixtures.predictions(thetas).view(*shape, -1), on)
    losses = torch.einsum("krfn,rfn->krn", mixtures.row_errors(thetas).view(shape), on)
    return predicted.double().numpy(), losses.double().numpy()


def shares(mixtures: Mixtures) -> Tensor:
    """The weight of a partner that is alone with the target, [K]."""
    return (mixtures.sizes / (mixtures.sizes + mixtures.masks.shape[1])).clamp(max=MOST)


def sum_of(table: _Table, parts: list[tuple[Chosen, int, int, int]]) -> Tensor:
    """Predictions [n, outputs] put together from several models, each for the fold g of order r that it did not see."""
    thetas = torch.stack([table.theta(chosen, mask) for chosen, _, _, mask in parts])
    predicted = table.mixtures.predictions(thetas)
    total = torch.zeros_like(predicted[0])
    for values, (_, r, g, _) in zip(predicted, parts, strict=True):
        on = table.splits.folds[r] == g
        total[on] = values[on]
    return total


def own_slope(mixtures: Mixtures, predicted: Tensor, rows: Tensor) -> Slope:
    """The slope of the target's own labels on held-out predictions [R, n, outputs], of the rows that count."""
    weight = rows.to(predicted)
    y = agreement.centred(agreement.targets(mixtures.task, mixtures.own), weight)
    totals = agreement.sums(agreement.centred(predicted, weight), y, weight)
    return agreement.slopes(totals.double().numpy())


def pooled(mixtures: Mixtures, members: np.ndarray) -> Tensor:
    """Weights under which every row of the target and of these partners counts the same."""
    rows = torch.cat([mixtures.sizes.cpu() * torch.as_tensor(members), torch.tensor([float(mixtures.masks.shape[1])])])
    return (rows / rows.sum()).float()


def floored(weights: Tensor, found: Agreement) -> Tensor:
    """Learned weights without the partners whose labels carry nothing, and without tiny ones."""
    kept = torch.cat([torch.as_tensor(found.carries), torch.tensor([True])])
    share = torch.where(kept & (weights.cpu() >= LEAST), weights.cpu().float(), 0.0)
    if share.sum() <= 0.0:
        share = kept.float() * torch.cat([torch.zeros(len(kept) - 1), torch.ones(1)])
    return share / share.sum()
