"""Scaling and categories of the clients' rows under (ε, δ) per client: one bounded, noisy vector from each client.

A row becomes a vector. A numeric column with the declared bounds [a, b], whose value x is clipped to them, gives

    (1, 0, 0) where x is missing,   else   (0, u, u² − ½)   with u = (2x − a − b)/(b − a) ∈ [−1, 1];

a column of words gives a 1 at the row's word, or at "missing", and only zeros for a word that is on no public list.
The squared length of a row's vector is 5/4 at most for each of p numeric columns, and 1 for each of q columns of words:

    R² = 5p/4 + q.

A client sends the mean v of its rows' vectors. The mean of points in a ball lies in the ball, so ‖v‖ ≤ R whatever the
rows are and however many. Two federations are neighbours if one client's v is 0 in one of them, as for updates; the
sensitivity is R, and v + zRξ with ξ ~ N(0, I) is one Gaussian mechanism of noise multiplier z. It goes through
the stage `Privacy` like every update and is composed with the updates by the same accountant. Everything below that
takes noisy vectors only is post-processing.

No word leaves a client. If a client sent a word that nobody else knows, the neighbouring federation could not have
produced it, so δ would be the probability of sending it. A noisy count above a threshold does not help here, because
every client is the only contributor to its own upload. The lists are therefore public: words of the target's file
(which the promise does not cover) and words that `privacy.categories` declares. Of the declared words those are kept
whose mean noisy share exceeds the noise: the threshold is exceeded by pure noise in any coordinate with probability
CHANCE at most. Rows of a client whose class is on no list stay unused at that client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from scipy.stats import norm
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import RESULT, Ledger, Shard, Static, work
from coterie.federation.stages.base import staged
from coterie.federation.stages.privacy import Mechanism, Privacy
from coterie.federation.tree import Tree
from coterie.numerics import Draw
from coterie.numerics.roots import square_root
from coterie.problems.files.prepare import INDICATED, ROWS, Numeric, Preparation, Worded, federation_of, in_order
from coterie.problems.files.tables import Tables
from coterie.settings import StatisticsPrivacy

PER_NUMBER = 5 / 4  # the largest squared length that a numeric column adds to a row's vector
CHANCE = 0.05  # that any coordinate of pure noise exceeds the threshold
NARROW = 0.05  # the least deviation, in half-ranges: noise may leave less than nothing
MOST_MISSING = 0.9  # a share of missing values is believed up to this


@dataclass(frozen=True)
class Layout:
    """What the coordinates of a client's vector mean; public.

    Args:
        middle: the centres of the numeric columns' bounds, [p].
        half: their half-ranges, [p].
        words: the public list of each column of words, the label last in classification.
    """

    middle: Tensor
    half: Tensor
    words: tuple[tuple[str, ...], ...]

    @property
    def radius(self) -> float:
        """R, which no client's vector exceeds."""
        return sqrt(PER_NUMBER * len(self.middle) + len(self.words))

    @property
    def shared(self) -> Tree:
        """What clients are sent: bounds, and the words in UTF-8 with the column of each."""
        entries = [(j, word.encode()) for j, listed in enumerate(self.words) for word in listed]
        width = max((len(word) for _, word in entries), default=1) or 1
        letters = torch.tensor([list(word.ljust(width, b"\0")) for _, word in entries], dtype=torch.uint8)
        columns = torch.tensor([j for j, _ in entries], dtype=torch.int64)
        return self.middle, self.half, columns, letters.reshape(-1, width)

    def spread(self, noise: float, clients: int) -> float:
        """The deviation of the noise in the mean of all clients and the target, which adds none."""
        return noise * self.radius * sqrt(clients) / (clients + 1)

    def threshold(self, noise: float, clients: int) -> float:
        """What a share must exceed to be told from noise, for all shares at once."""
        tested = len(self.middle) + sum(map(len, self.words)) + len(self.words)
        return float(self.spread(noise, clients) * norm.isf(CHANCE / max(1, tested)))


@work("private-files/column-means", update=RESULT, mode="sequential")  # rows are streamed
def column_means(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """The mean of a holder's row vectors: missing, u and u² − ½ by numeric column, words, missing words by column."""
    assert shard.train is not None
    assert shard.valid is not None
    middle, half, columns, letters = shared
    p, q = len(middle), shard.train.columns[1].shape[1]
    slots = _slots(shard.valid.columns, columns, letters, q)
    numbers = torch.zeros(3, p, dtype=torch.float64)
    counts = torch.zeros(len(columns) + q + 1, dtype=torch.float64)
    for batch in shard.train.blocks(ROWS):
        x, codes = batch.columns
        missing = torch.isnan(x)
        u = torch.where(missing, 0.0, ((x - middle) / half).clamp(-1.0, 1.0))
        numbers += torch.stack([missing.double(), u, torch.where(missing, 0.0, u.square() - 0.5)]).sum(1)
        for j in range(q):
            counts += torch.bincount(slots[j][codes[:, j].long()], minlength=len(counts))
    return torch.cat([numbers.flatten(), counts[:-1]]) / max(1, int(shard.train.count))


def _slots(own: Sequence[Tensor], columns: Tensor, letters: Tensor, q: int) -> list[Tensor]:
    """For each column of words, the coordinate of each of the holder's own codes; the last entry is for missing."""
    entries = zip(columns.tolist(), letters.tolist(), strict=True)
    public = {(j, bytes(word).rstrip(b"\0")): i for i, (j, word) in enumerate(entries)}
    unknown = len(columns) + q
    slots: list[list[int]] = [[] for _ in range(q)]
    for j, word in zip(own[0].tolist(), own[1].tolist(), strict=True):
        slots[j].append(public.get((j, bytes(word).rstrip(b"\0")), unknown))
    return [torch.tensor([*known, len(columns) + j]) for j, known in enumerate(slots)]


def layout_of(tables: Tables, statistics: StatisticsPrivacy) -> Layout:
    """The layout of declared bounds and lists; what is not declared is refused with the remedy."""
    form, bounds, categories = tables.form, statistics.bounds, statistics.categories
    numeric = (*form.numeric, form.label) if form.kind == "regression" else form.numeric
    _check_known("bounds", bounds, numeric, "numeric columns")
    _check_known("categories", categories, form.codes(), "columns of words")
    if lacking := [name for name in numeric if name not in bounds]:
        listed = ", ".join(map(repr, lacking[:8])) + (f" and {len(lacking) - 8} more" if len(lacking) > 8 else "")
        raise UsageError(
            f"privacy.bounds lacks the column{'s' if len(lacking) > 1 else ''} {listed}. With privacy.noise, clients "
            "clip every numeric column to declared bounds before they send noisy means; bounds read off the rows would "
            "reveal them. Declare what is known beforehand, for example "
            f"--set 'privacy.bounds={{\"{lacking[0]}\"=[0.0, 100.0]}}', or leave columns out with problem.drop."
        )
    low, high = (torch.tensor([bounds[name][i] for name in numeric], dtype=torch.float64) for i in (0, 1))
    words = tuple(
        tuple(dict.fromkeys([*known, *categories.get(name, ())]))
        for name, known in zip(form.codes(), tables.holders[-1].words, strict=True)
    )
    return Layout((low + high) / 2, (high - low) / 2, words)


def _check_known(setting: str, declared: Mapping[str, Any], columns: Sequence[str], kind: str) -> None:
    if strange := [name for name in declared if name not in columns]:
        raise UsageError(
            f"privacy.{setting} names {', '.join(map(repr, strange))}, which is none of the {kind}: "
            f"{', '.join(map(repr, columns)) or 'there are none'}."
        )


def bounded_means(tables: Tables, layout: Layout, noise: float, seed: int) -> tuple[Tensor, Tensor, Ledger]:
    """The clients' noisy vectors, [K, D], the target's own without noise, [D], and what was moved."""
    fed = federation_of(tables)
    declared = (noise, layout.middle.tolist(), layout.half.tolist(), layout.words)  # another release, other noise
    privacy = Privacy(Mechanism(layout.radius, noise), str(declared))
    fed = replace(fed, engine=staged(fed.engine, privacy))
    draw = Draw.of(seed).phase("statistics")
    rows = fed.gather(column_means, layout.shared, draw=draw).rows
    return rows, fed.ask_target(column_means, layout.shared, draw=draw), fed.ledger


def learnt_privately(tables: Tables, statistics: StatisticsPrivacy, seed: int) -> tuple[Preparation, Ledger]:
    """The preparation from one noisy vector per client, and what was moved for it."""
    form, layout = tables.form, layout_of(tables, statistics)
    rows, own, ledger = bounded_means(tables, layout, statistics.noise, seed)
    clients, p = len(rows), len(layout.middle)
    whole = (rows.sum(0) + own) / (clients + 1)
    variance, least = layout.spread(statistics.noise, clients) ** 2, layout.threshold(statistics.noise, clients)
    shares = list(torch.split(whole[3 * p :], [*map(len, layout.words), len(layout.words)]))
    absent, absent_here = shares.pop(), own[-len(layout.words) :] if layout.words else own[:0]
    mean, deviation = _scales(whole[: 3 * p].reshape(3, p), layout, variance)
    missing, missing_here = whole[:p], own[:p]
    indicated = (missing > max(INDICATED, least)) | (missing_here > INDICATED)
    numeric = tuple(map(Numeric, form.numeric, mean.tolist(), deviation.tolist(), indicated.tolist()))
    lists = [
        [(word, i) for i, word in enumerate(listed) if word in known or float(share[i]) > least]
        for listed, known, share in zip(layout.words, tables.holders[-1].words, shares, strict=True)
    ]
    worded = tuple(
        Worded(name, tuple(sorted(word for word, _ in kept)), bool(gone > least or gone_here > 0.0))
        for name, kept, gone, gone_here in zip(form.worded, lists, absent, absent_here, strict=False)
    )
    if form.kind == "regression":
        return Preparation(form, numeric, worded, (), (), float(mean[-1]), float(deviation[-1])), ledger
    kept = sorted(lists[-1], key=lambda entry: in_order(entry[0]))
    share = _class_shares(shares[-1][[i for _, i in kept]], variance)
    total = sum(holder.rows for holder in tables.holders)  # sizes are declared, and not covered
    counts = tuple(max(1, round(value * total)) for value in share.tolist())
    return Preparation(form, numeric, worded, tuple(word for word, _ in kept), counts), ledger


def _scales(means: Tensor, layout: Layout, variance: float) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each numeric column, from the noisy means of missing, u and u² − ½.

    The best linear estimates for a value that is uniform between the bounds: much noise gives that value's own.
    """
    missing = _toward(means[0], 0.0, 1 / 12, variance).clamp(0.0, MOST_MISSING)
    present = 1.0 - missing
    noise = variance / present.square()
    first = _toward(means[1] / present, 0.0, 1 / 3, noise).clamp(-1.0, 1.0)
    second = _toward(means[2] / present + 0.5, 1 / 3, 4 / 45, noise).clamp(0.0, 1.0)
    deviation = square_root((second - first.square()).clamp(min=NARROW**2))
    return layout.middle + layout.half * first, layout.half * deviation


def _class_shares(noisy: Tensor, variance: float) -> Tensor:
    """Shares of the classes that sum to 1; much noise gives equal ones."""
    m = len(noisy)
    equal = torch.full((m,), 1 / m, dtype=noisy.dtype)
    share = _toward(noisy, 1 / m, (m - 1) / (m * m * (m + 1)), variance).clamp(min=0.1 / m) if m > 1 else equal
    return share / share.sum()


def _toward(noisy: Tensor, mean: float, spread: float, variance: float | Tensor) -> Tensor:
    """The linear estimate of a quantity with this mean and variance `spread` from itself plus noise."""
    return mean + (noisy - mean) * spread / (spread + variance)
