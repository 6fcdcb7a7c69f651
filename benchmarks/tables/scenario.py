"""One split of a table: own rows, partners whose truth is known, and test rows. Everything derives from the seed.

The files' names do not tell the truth: site-01.csv, site-02.csv, … in random order.

friend      rows as they come
noise10 …   labels replaced at random in 10, 30 or 50 % of the rows, always by another class; in regression, noise of
            1, 2 or 4 standard deviations of the label
permuted    labels shuffled among the partner's rows
flipped     every class replaced by the next one; in regression, mirrored at the mean
prevalence  the rarest class four times as often (classification only)
shift       nine rows of ten from one side of one column's median
unit        one column multiplied by 1,000
"""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.tables.sources import MISSING, Table

TEST, FEW, MOST = 1000, 200, 20_000  # test rows: of tables with at least 2,500 rows, of smaller ones, and at most
LARGE = 2500
LEAST = (80, 40)  # rows of a partner, and of one of a small table
CANDIDATES = {"prevalence": 3, "shift": 3}  # rows to choose from, per row
UNIT = 1000.0
DEVIATIONS = {"noise10": 1.0, "noise30": 2.0, "noise50": 4.0}
SHARES = {"noise10": 0.1, "noise30": 0.3, "noise50": 0.5}
Wanted = tuple[tuple[str, int], ...]
CELLS: dict[str, Wanted] = {  # the first ones matter most: see `fitted`
    "mixed": (
        *(("friend", 80), ("permuted", 200), ("friend", 200), ("flipped", 200), ("noise30", 200), ("noise10", 200)),
        *(("unit", 200), ("shift", 200), ("noise50", 200), ("friend", 400), ("prevalence", 200)),
    ),
    "friends": tuple(("friend", rows) for rows in (80, 200, 400, 80, 200, 400, 80, 200, 200, 400)),
    "useless": tuple((kind, 200) for _ in range(5) for kind in ("permuted", "noise50")),
    "one": (("friend", 200), *((kind, 200) for _ in range(5) for kind in ("permuted", "noise50")))[:10],
}
USELESS = ("useless", "one")  # with more than two classes, half of the labels right are worth something: all permuted


class Partner(NamedTuple):
    """A file's name, the truth about it, its rows, and the column of a unit error. `clean` has the unit repaired."""

    file: str
    truth: str
    table: Table
    column: str = ""

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.table.rows

    @property
    def clean(self) -> Table:
        """Its rows in the unit of all others."""
        if not self.column:
            return self.table
        return _multiplied(self.table, self.column, 1.0 / UNIT)


class Scenario(NamedTuple):
    """Own rows, partners and test rows."""

    own: Table
    partners: tuple[Partner, ...]
    test: Table

    def write(self, folder: Path) -> None:
        """mine.csv, test.csv and sites/site-*.csv."""
        (folder / "sites").mkdir(parents=True)
        write_csv(folder / "mine.csv", self.own)
        write_csv(folder / "test.csv", self.test)
        for partner in self.partners:
            write_csv(folder / "sites" / partner.file, partner.table)


def fitted(wanted: Wanted, available: int) -> Wanted:
    """The partners that so many rows suffice for.

    All sizes shrink by the same factor, down to 80 rows; then the last partners are left out until five are left; then
    80 becomes 40; then more are left out.
    """

    def sized(last: int, factor: float, least: int) -> Wanted:
        return tuple((kind, max(min(rows, least), int(rows * factor))) for kind, rows in wanted[:last])

    for last, least in [(n, LEAST[0]) for n in range(len(wanted), 4, -1)] + [(n, LEAST[1]) for n in range(5, 0, -1)]:
        for factor in np.linspace(1.0, 0.1, 91):
            chosen = sized(last, factor, least)
            if sum(rows * CANDIDATES.get(kind, 1) for kind, rows in chosen) <= available:
                return chosen
    raise ValueError(f"{available} rows are too few for one partner")


def scenario(table: Table, cell: str, own: int, split: int) -> Scenario:
    """A split of a table.

    Args:
        table: the rows to divide.
        cell: a key of `CELLS`.
        own: the target's rows; a third of a smaller table.
        split: the seed.
    """
    draw = np.random.default_rng([split, own, *cell.encode()])
    order = draw.permutation(table.rows)
    own = min(own, table.rows // 3)
    tested = TEST if table.rows >= LARGE else FEW
    wanted = tuple(one for one in CELLS[cell] if _possible(table, one[0]))
    if cell in USELESS and table.kind == "classification" and len(np.unique(table.labels)) > 2:
        wanted = tuple(("permuted" if kind == "noise50" else kind, rows) for kind, rows in wanted)
    chosen = fitted(wanted, table.rows - own - tested)
    names = draw.permutation(len(chosen))
    partners, start = [], own
    for place, (kind, rows) in zip(names, chosen, strict=True):
        stop = start + rows * CANDIDATES.get(kind, 1)
        drawn, column = altered(table.take(order[start:stop]), kind, rows, draw)
        partners.append(Partner(f"site-{place + 1:02d}.csv", kind, drawn, column))
        start = stop
    test = table.take(order[start : start + MOST])
    return Scenario(table.take(order[:own]), tuple(sorted(partners)), test)


def altered(table: Table, kind: str, rows: int, draw: np.random.Generator) -> tuple[Table, str]:
    """So many rows of the candidates with what the kind does to them, and the column of a unit error."""
    if kind in ("prevalence", "shift"):
        weights = _rarest(table.labels) if kind == "prevalence" else _one_side(table, draw)
        return table.take(draw.choice(table.rows, rows, replace=False, p=weights / weights.sum())), ""
    if kind == "unit":
        column = str(draw.choice(measured(table)))
        return _multiplied(table, column, UNIT), column
    change = _number if table.kind == "regression" else _class
    return table._replace(labels=change(table.labels, kind, draw)), ""


def _number(labels: np.ndarray, kind: str, draw: np.random.Generator) -> np.ndarray:
    if kind == "permuted":
        return draw.permutation(labels)
    if kind == "flipped":
        return np.asarray(2 * labels.mean() - labels)
    if kind in DEVIATIONS:
        return np.asarray(labels + DEVIATIONS[kind] * labels.std() * draw.standard_normal(len(labels)))
    return labels


def _class(labels: np.ndarray, kind: str, draw: np.random.Generator) -> np.ndarray:
    if kind == "permuted":
        return draw.permutation(labels)
    names, codes = np.unique(labels, return_inverse=True)
    if kind == "flipped":
        return names[(codes + 1) % len(names)]
    if kind in SHARES:
        wrong = draw.permutation(len(labels)) < round(SHARES[kind] * len(labels))
        other = codes + draw.integers(1, max(2, len(names)), len(labels))
        return np.asarray(names[np.where(wrong, other, codes) % len(names)])
    return labels


def _rarest(labels: np.ndarray) -> np.ndarray:
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return np.where(codes == counts.argmin(), 4.0, 1.0)


def _one_side(table: Table, draw: np.random.Generator) -> np.ndarray:
    values = table.numbers[:, table.number_names.index(str(draw.choice(measured(table))))]
    above = values > np.nanmedian(values)
    return np.where(above, 9.0, 1.0)


def measured(table: Table) -> list[str]:
    """Columns of numbers with at least ten different values, most of them other than 0; else those with the most."""
    distinct = [len(np.unique(column[~np.isnan(column)])) for column in table.numbers.T]
    used = [float((np.nan_to_num(column) != 0).mean()) for column in table.numbers.T]
    names = table.number_names
    good = [name for name, d, u in zip(names, distinct, used, strict=True) if d >= 10 and u >= 0.5]
    return good or [name for name, d in zip(names, distinct, strict=True) if d == max(distinct)]


def _possible(table: Table, kind: str) -> bool:
    if kind == "prevalence":
        return table.kind == "classification"
    return bool(table.number_names) or kind not in ("unit", "shift")


def _multiplied(table: Table, column: str, factor: float) -> Table:
    numbers = table.numbers.copy()
    numbers[:, table.number_names.index(column)] *= factor
    return table._replace(numbers=numbers)


def write_csv(path: Path, table: Table) -> None:
    """Numbers as they are, empty where missing."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*table.number_names, *table.word_names, table.label])
        writer.writerows(_lines(table))


def _lines(table: Table) -> Iterable[list[Any]]:
    for numbers, words, label in zip(table.numbers.tolist(), table.words.tolist(), table.labels.tolist(), strict=True):
        yield [*(MISSING if value != value else _short(value) for value in numbers), *words, label]


def _short(value: float) -> Any:
    return int(value) if value.is_integer() and abs(value) < 1e15 else value
