"""Scaling and categories without a look at anybody's rows.

Means, variances and the categories with their counts are asked for by the federation's verbs, so they are in the ledger
under the names of the works below. A holder sends, for each column, the count, the mean and the sum of squared
deviations of its rows (merged pairwise, so that no digit is lost at any offset), and its categories with their counts.
For robust scaling and medians it sends quantiles too, and for imputation by regression the sums of products of columns.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import reduce
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.errors import RunError, UsageError
from coterie.federation import Federation, Ledger, LocalEngine, Rows, Shard, Stack, Static, work
from coterie.federation.tree import Tree
from coterie.numerics import Draw
from coterie.numerics.roots import square_root
from coterie.problems.files.store import RowBuffer
from coterie.problems.files.tables import Form, Holder, Tables
from coterie.problems.tasks.survival import Baseline

ROWS = 4_096  # at a time
INDICATED = 0.01  # a column with more missing values than this share gets an indicator
RARE_NUMBER = 1e-12
SAMPLED = 50_000  # rows that quantiles are taken of, spread evenly
NORMAL = 1.3489795  # the interquartile range of a normal variable, in standard deviations
ENTRIES, WIDTH = 1 << 16, 1 << 12  # of a list of words, and bytes of a word, that a holder may declare
RIDGE = 0.1  # of the regression that fills in missing values, beside variances of 1

Scaling = Literal["common", "own", "robust"]
Impute = Literal["mean", "median", "regression"]


LARGEST = 1e30  # of inputs: float32 has no larger numbers whose squares can be added
EARLIEST = 1e-30  # of times: an event at time 0 has to be told from a censored row


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations by column, [p] each."""

    n: Tensor
    mean: Tensor
    squares: Tensor

    @staticmethod
    def of(x: Tensor) -> "Moments":
        """Of some rows, NaN left out."""
        there = ~torch.isnan(x)
        count = there.sum(0).to(x.dtype)
        mean = torch.where(there, x, 0.0).sum(0) / count.clamp(min=1.0)
        return Moments(count, mean, torch.where(there, x - mean, 0.0).square().sum(0))

    def merged(self, other: "Moments") -> "Moments":
        """Of both parts together (Chan, Golub and LeVeque 1983)."""
        count = self.n + other.n
        share = other.n / count.clamp(min=1.0)
        gap = other.mean - self.mean
        return Moments(count, self.mean + gap * share, self.squares + other.squares + gap.square() * self.n * share)

    @property
    def deviation(self) -> Tensor:
        """Of the whole, with n in the denominator; 1 where a column never changes."""
        deviation = square_root(self.squares / self.n.clamp(min=1.0))
        return torch.where(deviation > RARE_NUMBER * self.mean.abs(), deviation, 1.0)


@work("files/column-moments", update=None, mode="sequential")
def column_moments(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """Count, mean and squared deviations of a holder's columns of numbers, a block of rows at a time."""
    assert shard.train is not None
    blocks = shard.train.blocks(ROWS)
    whole = Moments.of(next(blocks).columns[0])
    for batch in blocks:  # merged at once: a list of small tensors between large ones would tear the heap
        whole = whole.merged(Moments.of(batch.columns[0]))
    return tuple(whole)


class Quantiles(NamedTuple):
    """By column: how many zeros and other numbers, quantiles of log₁₀ of the others' magnitudes, the three quartiles.

    zeros [p], nonzero [p], least [p] of the others' magnitudes, logs [p, 4] at 25, 50, 75 and 90 %, and low, middle,
    high [p] of all numbers.
    """

    zeros: Tensor
    nonzero: Tensor
    least: Tensor
    logs: Tensor
    low: Tensor
    middle: Tensor
    high: Tensor


@work("files/column-quantiles", update=None, mode="sequential")
def column_quantiles(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """Quantiles of a holder's columns of numbers, of at most SAMPLED rows."""
    assert shard.train is not None
    rows = shard.train.capacity
    sample = shard.train.take(torch.arange(0, rows, max(1, rows // SAMPLED))).columns[0].numpy()
    p = sample.shape[1]
    counts, least, logs, quartiles = np.zeros((2, p)), np.zeros(p), np.zeros((p, 4)), np.zeros((p, 3))
    for j, column in enumerate(sample.T):
        known = column[~np.isnan(column)]
        magnitudes = np.abs(known[known != 0.0])
        counts[:, j] = len(known) - len(magnitudes), len(magnitudes)
        if len(magnitudes):
            least[j] = magnitudes.min()
            logs[j] = np.quantile(np.log10(magnitudes), (0.25, 0.5, 0.75, 0.9))
        if len(known):
            quartiles[j] = np.quantile(known, (0.25, 0.5, 0.75))
    return tuple(map(torch.from_numpy, (*counts, least, logs, *quartiles.T.copy())))


@work("files/column-products", update=None, mode="sequential")
def column_products(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """Sums of products of a holder's scaled columns over the rows that have both, and the numbers of those rows."""
    assert shard.train is not None
    centre, scale = shared
    p = len(centre)
    if static.own:
        moments = reduce(Moments.merged, (Moments.of(batch.columns[0][:, :p]) for batch in shard.train.blocks(ROWS)))
        centre, scale = moments.mean, moments.deviation
    products, counts = torch.zeros(p, p, dtype=torch.float64), torch.zeros(p, p, dtype=torch.float64)
    for batch in shard.train.blocks(ROWS):
        z = (batch.columns[0][:, :p] - centre) / scale
        present = (~torch.isnan(z)).double()
        z = torch.nan_to_num(z)
        products += z.T @ z
        counts += present.T @ present
    return products, counts


@work("files/dictionary-size", update=None, mode="sequential")
def dictionary_size(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """How many entries a holder's list of words has, and how long the longest word is in bytes."""
    assert shard.valid is not None
    _, letters = shard.valid.columns
    return torch.tensor([len(letters), int((letters != 0).sum(1).max()) if len(letters) else 0])


@work("files/category-counts", update=None, mode="sequential")
def category_counts(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """A holder's words in UTF-8 with the column each stands in and how often; padded with column −1."""
    assert shard.train is not None
    assert shard.valid is not None
    places, letters = shard.valid.columns
    counts = torch.zeros(len(places), dtype=torch.int64)
    for batch in shard.train.blocks(ROWS):
        for j in range(batch.columns[1].shape[1]):
            mine = (places == j).nonzero()[:, 0]
            codes = batch.columns[1][:, j]
            counts[mine] += torch.bincount(codes[codes >= 0], minlength=len(mine))
    column = torch.full((static.entries,), -1)
    words = torch.zeros(static.entries, static.width, dtype=torch.uint8)
    sums = torch.zeros(static.entries, dtype=torch.int64)
    n = min(static.entries, len(places))
    column[:n], sums[:n] = places[:n], counts[:n]
    words[:n, : min(static.width, letters.shape[1])] = letters[:n, : static.width]
    return column, words, sums


class Numeric(NamedTuple):
    """A column of numbers: its centre and scale, and whether missing values are indicated.

    A missing value becomes, in the scaled column, fill plus the slopes (if any) times the row's other scaled columns.
    """

    name: str
    mean: float
    deviation: float
    indicator: bool
    fill: float = 0.0
    slopes: tuple[float, ...] = ()


class Worded(NamedTuple):
    """A column of words: the categories of all holders, and whether missing is one of its own."""

    name: str
    words: tuple[str, ...]
    missing: bool


class Preparation(NamedTuple):
    """From a row as it stands in a file to the model's inputs: learnt once, from all holders, and stored."""

    form: Form
    numeric: tuple[Numeric, ...]
    worded: tuple[Worded, ...]
    classes: tuple[str, ...] = ()
    class_counts: tuple[int, ...] = ()
    label_mean: float = 0.0
    label_deviation: float = 1.0
    missing: tuple[str, ...] = ()
    baseline: Baseline | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        if self.form.image is not None:
            return self.form.image
        wide = sum(len(column.words) + column.missing for column in self.worded)
        return (len(self.numeric) + sum(column.indicator for column in self.numeric) + wide,)

    def as_it_stands(self) -> "Preparation":
        """The same columns without scaling, NaN where a number is missing."""
        numeric = (c._replace(mean=0.0, deviation=1.0, fill=float("nan"), slopes=()) for c in self.numeric)
        return self._replace(numeric=tuple(numeric))

    @property
    def outputs(self) -> int:
        """Of the model."""
        return len(self.classes) if self.form.kind == "classification" else 1

    def inputs(self, numbers: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """float32 [n, …]: scaled numbers (imputed where missing), indicators, then categories as 0 and 1.

        codes number the words of `worded`, −1 where missing or unknown.
        """
        mean = np.array([column.mean for column in self.numeric])
        deviation = np.array([column.deviation for column in self.numeric])
        numbers = numbers[:, : len(self.numeric)]
        absent = np.isnan(numbers)
        scaled = np.where(absent, 0.0, (numbers - mean) / deviation)
        filled = np.broadcast_to([column.fill for column in self.numeric], scaled.shape)
        if any(column.slopes for column in self.numeric):
            filled = filled + scaled @ np.array([column.slopes for column in self.numeric]).T
        parts = [np.where(absent, filled, scaled)]
        parts += [absent[:, [j for j, column in enumerate(self.numeric) if column.indicator]].astype(np.float64)]
        for j, column in enumerate(self.worded):
            known = np.arange(len(column.words))
            parts.append((codes[:, j : j + 1] == known).astype(np.float64))
            if column.missing:
                parts.append((codes[:, j : j + 1] == -1).astype(np.float64))
        return np.clip(np.concatenate(parts, axis=1), -LARGEST, LARGEST).astype(np.float32)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for preprocess.json."""
        return {
            "version": 2,
            "label": self.form.label,
            "kind": self.form.kind,
            "numeric": [{**column._asdict(), "slopes": list(column.slopes)} for column in self.numeric],
            "dates": list(self.form.dates),
            "missing": list(self.missing),
            "categorical": [{**column._asdict(), "words": list(column.words)} for column in self.worded],
            "image": None if self.form.image is None else {"shape": list(self.form.image), "unit": self.form.unit},
            "classes": list(self.classes),
            "class_counts": list(self.class_counts),
            "label_mean": self.label_mean,
            "label_deviation": self.label_deviation,
            "event": self.form.event,
            "baseline": None if self.baseline is None else self.baseline._asdict(),
            "inputs": list(self.shape),
            "outputs": self.outputs,
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Preparation":
        """The inverse of as_dict."""
        numeric = tuple(Numeric(**{**column, "slopes": tuple(column.get("slopes", ()))}) for column in data["numeric"])
        worded = tuple(Worded(c["name"], tuple(c["words"]), c["missing"]) for c in data["categorical"])
        image = data["image"]
        numbers, words = tuple(column.name for column in numeric), tuple(column.name for column in worded)
        form = Form(data["label"], data["kind"], numbers, words, dates=tuple(data.get("dates", ())))
        form, hazard = form._replace(event=data.get("event")), data.get("baseline")
        baseline = None if hazard is None else Baseline(tuple(hazard["edges"]), tuple(hazard["rates"]))
        if image is not None:
            form = form._replace(image=tuple(image["shape"]), unit=image["unit"])
        classes, counts = tuple(data["classes"]), tuple(data["class_counts"])
        label = (data["label_mean"], data["label_deviation"])
        return Preparation(form, numeric, worded, classes, counts, *label, tuple(data.get("missing", ())), baseline)


def learnt(tables: Tables, scaling: Scaling = "common", impute: Impute = "mean") -> tuple[Preparation, Ledger]:
    """The preparation of all holders' rows, and what was moved for it.

    Args:
        tables: everybody's rows.
        scaling: numbers by mean and deviation over all holders, by those of each holder (the target's are stored), or
            by medians and interquartile ranges.
        impute: what stands for a missing number.
    """
    rows = sum(holder.rows for holder in tables.holders)
    fed = federation_of(tables)
    return learnt_from(fed, tables.form, rows, scaling, impute), fed.ledger


def of_own_rows(tables: Tables) -> Preparation:
    """The columns, words and classes of the target's rows alone: what partners have changes nothing in it.

    Args:
        tables: everybody's rows, the target's last.
    """
    form, mine = tables.form, tables.stack.client(len(tables.holders) - 1).all()
    numbers, codes = (column.numpy() for column in mine.columns)
    moments = Moments.of(mine.columns[0])
    found = zip(form.numbers(), moments.mean.tolist(), moments.deviation.tolist(), moments.n.tolist(), strict=True)
    numeric = [Numeric(name, mean, deviation, 1.0 - n / len(numbers) > INDICATED) for name, mean, deviation, n in found]
    lists = [
        {word: int((codes[:, j] == code).sum()) for word, code in known.items()}
        for j, known in enumerate(tables.holders[-1].words)
    ]
    worded = tuple(
        Worded(name, tuple(sorted(word for word, n in words.items() if n)), bool((codes[:, j] < 0).any()))
        for j, (name, words) in enumerate(zip(form.worded, lists, strict=False))
    )
    if form.kind == "classification":
        classes = tuple(sorted((word for word, n in lists[-1].items() if n), key=in_order))
        return Preparation(form, tuple(numeric), worded, classes, tuple(lists[-1][word] for word in classes))
    label = (0.0, 1.0) if form.event is not None else (numeric[-1].mean, numeric[-1].deviation)
    return Preparation(form, tuple(numeric[:-1]), worded, (), (), *label)


def learnt_from(
    fed: Federation, form: Form, rows: int, scaling: Scaling = "common", impute: Impute = "mean"
) -> Preparation:
    """The preparation that the holders of raw rows agree on, wherever they are.

    Args:
        fed: holders with raw rows (train) and their own lists of words (valid), and the target with its.
        form: the columns of all files.
        rows: how many rows all holders have together.
        scaling: as for `learnt`.
        impute: as for `learnt`.
    """
    draw = Draw.of(0)
    numeric: tuple[Numeric, ...] = ()
    label_mean, label_deviation = 0.0, 1.0
    if form.numbers():
        each, _ = fed.gather(column_moments, draw=draw)
        own = Moments(*fed.ask_target(column_moments, draw=draw))
        moments = reduce(Moments.merged, [*map(Moments, *each), own])
        found = (moments.mean.tolist(), moments.deviation.tolist(), moments.n.tolist())
        numeric = tuple(
            Numeric(name, mean, deviation, 1.0 - n / float(rows) > INDICATED)
            for name, mean, deviation, n in zip(form.numeric, *found, strict=False)
        )
        if form.kind == "regression":
            label_mean, label_deviation = float(moments.mean[-1]), float(moments.deviation[-1])
        numeric = _scaled(fed, numeric, scaling, impute, own)
    if not form.codes():
        return Preparation(form, numeric, (), (), (), label_mean, label_deviation)
    tallies = _tallies(fed, len(form.codes()))
    worded = tuple(
        Worded(name, tuple(sorted(tally)), sum(tally.values()) < rows)
        for name, tally in zip(form.worded, tallies, strict=False)
    )
    if form.kind == "regression":
        return Preparation(form, numeric, worded, (), (), label_mean, label_deviation)
    classes = tuple(sorted(tallies[-1], key=in_order))
    return Preparation(form, numeric, worded, classes, tuple(tallies[-1][c] for c in classes))


def _scaled(
    fed: Federation, numeric: tuple[Numeric, ...], scaling: Scaling, impute: Impute, target: Moments
) -> tuple[Numeric, ...]:
    """The columns with the centre, the scale and the imputation that are wanted."""
    draw, p = Draw.of(0), len(numeric)
    if scaling == "own":
        numeric = _rescaled(numeric, target.mean, target.deviation)
    if scaling == "robust" or impute == "median":
        each, _ = fed.gather(column_quantiles, draw=draw)
        here = fed.ask_target(column_quantiles, draw=draw)
        everybody = Quantiles(*(torch.cat([rows, own[None]]) for rows, own in zip(each, here, strict=True)))
        middle = everybody.middle.median(0).values
        spread = (everybody.high - everybody.low).median(0).values / NORMAL
        if scaling == "robust":
            usual = torch.tensor([column.deviation for column in numeric], dtype=torch.float64)
            numeric = _rescaled(numeric, middle, torch.where(spread[:p] > 0, spread[:p], usual))
        middle = Quantiles(*here).middle if scaling == "own" else middle
        if impute == "median":
            numeric = tuple(
                column._replace(fill=(float(value) - column.mean) / column.deviation)
                for column, value in zip(numeric, middle, strict=False)
            )
    return _regressed(fed, numeric, draw, own=scaling == "own") if impute == "regression" else numeric


def _rescaled(numeric: tuple[Numeric, ...], centre: Tensor, scale: Tensor) -> tuple[Numeric, ...]:
    found = zip(numeric, centre.tolist(), scale.tolist(), strict=False)
    return tuple(column._replace(mean=mean, deviation=deviation) for column, mean, deviation in found)


def _regressed(fed: Federation, numeric: tuple[Numeric, ...], draw: Draw, *, own: bool) -> tuple[Numeric, ...]:
    """Slopes of a ridge regression of each column on the others, from sums of products over rows that have both.

    With own, every holder scales its columns by its own mean and deviation.
    """
    shared = tuple(
        torch.tensor(values, dtype=torch.float64)
        for values in ([column.mean for column in numeric], [column.deviation for column in numeric])
    )
    (products, counts), _ = fed.gather(column_products, shared, draw=draw, own=own)
    here = fed.ask_target(column_products, shared, draw=draw, own=own)
    covariance = ((products.sum(0) + here[0]) / (counts.sum(0) + here[1]).clamp(min=1.0)).numpy()
    values, vectors = np.linalg.eigh(covariance)  # pairs of rows differ, so it may have lost its sign
    covariance = (vectors * values.clip(min=0.0)) @ vectors.T
    found = []
    for j, column in enumerate(numeric):
        others = [i for i in range(len(numeric)) if i != j]
        inner = covariance[np.ix_(others, others)] + RIDGE * np.eye(len(others))
        slopes = np.zeros(len(numeric))
        slopes[others] = np.linalg.solve(inner, covariance[others, j])
        found.append(column._replace(slopes=tuple(slopes.tolist())))
    return tuple(found)


def in_order(word: str) -> tuple[int, float, str]:
    """Numbers by value, then words."""
    try:
        return 0, float(word), word
    except ValueError:
        return 1, 0.0, word


def _tallies(fed: Federation, columns: int) -> list[dict[str, int]]:
    """For each column of words, every category of any holder with its count."""
    draw = Draw.of(0)
    sizes = torch.cat([fed.gather(dictionary_size, draw=draw).rows, fed.ask_target(dictionary_size, draw=draw)[None]])
    entries, width = (max(1, value) for value in sizes.amax(0).tolist())
    if entries > ENTRIES or width > WIDTH:
        raise RunError(
            f"a holder declares {entries:,} categories of up to {width:,} bytes, more than {ENTRIES:,} of {WIDTH:,}; "
            "a column of theirs may hold free text: leave it out."
        )
    (places, letters, counts), _ = fed.gather(category_counts, draw=draw, entries=entries, width=width)
    own = fed.ask_target(category_counts, draw=draw, entries=entries, width=width)
    tallies: list[dict[str, int]] = [{} for _ in range(columns)]
    for place, word, count in zip(
        [*places.flatten().tolist(), *own[0].tolist()],
        [*letters.flatten(0, 1).tolist(), *own[1].tolist()],
        [*counts.flatten().tolist(), *own[2].tolist()],
        strict=True,
    ):
        if 0 <= place < columns:
            name = bytes(word).rstrip(b"\0").decode(errors="replace")
            tallies[place][name] = tallies[place].get(name, 0) + count
    return tallies


def federation_of(tables: Tables) -> Federation:
    """The clients with their raw rows (train) and their own lists of words (valid), and the target with its."""
    stack, words = tables.stack, dictionaries(tables.holders)
    clients = Stack(stack.columns, stack.offsets[:-1], stack.counts[:-1])
    lists = Stack(words.columns, words.offsets[:-1], words.counts[:-1])
    last = len(stack) - 1
    target = Shard(None, stack.client(last), words.client(last))
    return Federation.on(LocalEngine(None, clients, lists, target))


def dictionaries(holders: Iterable[Holder]) -> Stack:
    """Every holder's own words: the column of each, and its bytes."""
    entries = [[(j, word.encode()) for j, known in enumerate(holder.words) for word in known] for holder in holders]
    width = max((len(word) for one in entries for _, word in one), default=1) or 1
    places = torch.tensor([j for one in entries for j, _ in one], dtype=torch.int64)
    raw = b"".join(word.ljust(width, b"\0") for one in entries for _, word in one)
    letters = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    counts = torch.tensor([len(one) for one in entries])
    return Stack((places, letters.view(-1, width)), counts.cumsum(0) - counts, counts)


def transformed(
    tables: Tables,
    prepared: Preparation,
    order: Callable[[Tensor], Tensor],
    *,
    folder: str | None = None,
    by_centre: bool = False,
) -> tuple[Tensor, Tensor, int, tuple[Holder, ...]]:
    """Everybody's inputs and labels: the clients' rows, then the target's in an order, and where those begin.

    order is made of the target's labels. Rows are changed a block at a time. The holders that are returned count
    the rows that are used: those of a class that the preparation does not know are not. With by_centre, every client
    scales its columns of numbers by its own mean and deviation.
    """
    form, stack = tables.form, tables.stack
    inputs = RowBuffer(prepared.shape, "float32", mapped=tables.mapped, folder=folder)
    labels = RowBuffer((), "int64" if form.kind == "classification" else "float32", mapped=tables.mapped, folder=folder)
    *clients, target = range(len(stack))
    used = []
    for k in clients:
        before = inputs.rows
        for x, y in _model_blocks(tables, own_scaled(tables, prepared, k) if by_centre else prepared, k):
            inputs.append(x)
            labels.append(y)
        used.append(replace(tables.holders[k], rows=inputs.rows - before))
    own = model_rows(tables, prepared, target)
    begin, taken = inputs.rows, order(torch.from_numpy(own[1])).numpy()
    inputs.append(own[0][taken])
    labels.append(own[1][taken])
    return inputs.tensor(), labels.tensor(), begin, (*used, replace(tables.holders[target], rows=len(taken)))


def model_rows(tables: Tables, prepared: Preparation, k: int) -> tuple[np.ndarray, np.ndarray]:
    """One holder's inputs and labels; rows of a class that the preparation does not know are left out."""
    inputs, labels = zip(*_model_blocks(tables, prepared, k), strict=True)
    return np.concatenate(inputs), np.concatenate(labels)


def baseline_of(tables: Tables) -> Baseline:
    """The target's baseline hazard, where the label is a time."""
    form, name = tables.form, tables.holders[-1].name
    signed = tables.numbers[int(tables.stack.offsets[-1]) :, -1].numpy()
    happened = ~np.signbit(signed)
    if not happened.any():
        raise UsageError(
            f"{name}: the event {form.event!r} never happens, so that nothing can be learned about when it does. Give "
            "rows in which it happened, or set problem.event to another column."
        )
    return Baseline.of(np.abs(signed), happened)


def own_scaled(tables: Tables, prepared: Preparation, k: int) -> Preparation:
    """The preparation with the means and deviations of one holder's rows (−1: the target's), which do not leave it."""
    blocks = (Moments.of(batch.columns[0]) for batch in tables.stack.client(k % len(tables.holders)).blocks(ROWS))
    moments = reduce(Moments.merged, blocks)
    return prepared._replace(numeric=_rescaled(prepared.numeric, moments.mean, moments.deviation))


def _model_blocks(tables: Tables, prepared: Preparation, k: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One holder's inputs and labels."""
    form, stack = tables.form, tables.stack
    recoding = _recoding(tables.holders[k], prepared)
    for numbers, codes, pictures in _raw_blocks(tables, stack.client(k), int(stack.offsets[k])):
        common = np.stack([table[codes[:, j]] for j, table in enumerate(recoding)] or [np.empty(len(codes))], axis=1)
        if pictures is not None:
            x = pictures.astype(np.float32) / np.float32(form.unit)
        else:
            x = prepared.inputs(numbers, common)
        if prepared.baseline is not None:
            yield x, prepared.baseline.labels(numbers[:, -1])
        elif form.kind == "classification":
            y = common[:, -1].astype(np.int64)
            known = y >= 0
            yield (x, y) if known.all() else (x[known], y[known])
        elif form.event is not None:
            times = numbers[:, -1]
            yield x, np.where(np.signbit(times), times, np.maximum(times, EARLIEST)).astype(np.float32)
        else:
            yield x, ((numbers[:, -1] - prepared.label_mean) / prepared.label_deviation).astype(np.float32)


def _raw_blocks(tables: Tables, rows: Rows, first: int) -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    start = first
    for batch in rows.blocks(ROWS):
        numbers, codes = (column.numpy() for column in batch.columns)
        stop = start + len(codes)
        yield numbers, codes, None if tables.pictures is None else tables.pictures[start:stop].numpy()
        start = stop


def _recoding(holder: Holder, prepared: Preparation) -> list[np.ndarray]:
    """For each column of words, the common number of each of the holder's own codes; the last entry is for missing."""
    lists = [column.words for column in prepared.worded]
    if prepared.form.kind == "classification":
        lists.append(prepared.classes)
    recoding = []
    for known, common in zip(holder.words, lists, strict=True):
        number = {word: i for i, word in enumerate(common)}
        recoding.append(np.array([*(number.get(word, -2) for word in known), -1]))
    return recoding
