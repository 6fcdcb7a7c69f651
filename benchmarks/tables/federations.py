"""Federations whose truth is known: own rows, partners and fresh test rows. Everything derives from the seed.

mix      friends of 80, 200 and 400 rows; labels permuted, flipped, and with noise in 10, 30 and 50 % of the rows; one
         column in another unit; rows from one side of a column's median; more of the rarest class
friends  friends only
useless  labels permuted; of two classes and numbers also with 50 % noise
natural  one site of the table is mine, up to nine others are partners with up to 400 rows each
faults   one fault of a column or of labels per partner, beside friends
copies   partners that hold my rows: all, half, or jittered, beside friends

The partners' names do not tell the truth: site_01, site_02, … in random order.
"""

from typing import NamedTuple

import numpy as np

from benchmarks.tables.sources import Columns, Table, is_number, joined, take

TEST, FEW = 3000, 200  # fresh rows at most and at least
SITE_TEST = (400, 140)  # fresh rows of a natural site at least; of a table whose sites are smaller
LEAST = 60  # rows of a partner of a small table, or of a natural site
SITES, SITE_ROWS = 9, 400  # natural partners, and rows of each at most
CODE = -999.0
DISTINCT = 10  # values of a column that is measured
UNITS = {"unit": 1000.0, "unit88": 88.4}  # such as grams for kilograms, µmol/l for mg/dl
NOISE = {"noise10": (0.1, 1.0), "noise30": (0.3, 2.0), "noise50": (0.5, 4.0)}  # wrong labels; deviations of numbers
CHOICES = {"prevalence": 3, "shift": 3}  # candidates per row
KINDS = {  # partners and their rows; the first ones matter most: a small table has fewer
    "mix": "friend 80, permuted 200, friend 200, flipped 200, noise30 200, noise10 200, unit 200, shift 200, "
    "friend 400, noise50 200, prevalence 200",
    "friends": "friend 80, friend 200, friend 400, friend 80, friend 200, friend 400",
    "useless": "permuted 200, noise50 200, permuted 200, noise50 200, permuted 200, noise50 200",
    "natural": "",
    "faults": "friend 200, unit 200, code 200, reversed 200, region 200, swapped 200, friend 200, unit88 200, "
    "friend 400",
    "copies": "copy 0, half-copy 200, jittered-copy 0, friend 200, friend 400, permuted 200",
}
Wanted = list[tuple[str, int]]


class Partner(NamedTuple):
    """A partner's name, the truth about it, its rows, and the column of a planted fault."""

    name: str
    truth: str
    columns: Columns
    fault: str = ""


class Federation(NamedTuple):
    """Own rows, partners, test rows, and the table that they are of."""

    table: Table
    own: Columns
    partners: tuple[Partner, ...]
    test: Columns


def federation(table: Table, kind: str, own: int, seed: int) -> Federation | None:
    """The federation of a table, or None where the table has too few rows or no sites.

    Args:
        table: the rows to divide.
        kind: a key of `KINDS`.
        own: how many rows are mine.
        seed: of every draw.
    """
    draw = np.random.default_rng([seed, own, *kind.encode(), *table.name.encode()])
    return _natural(table, own, draw) if kind == "natural" else _planted(table, kind, own, draw)


def _natural(table: Table, own: int, draw: np.random.Generator) -> Federation | None:
    if table.sites is None:
        return None
    names, counts = np.unique(table.sites, return_counts=True)
    least = next((rows for rows in SITE_TEST if counts.max() >= own + rows), TEST)
    mine = draw.permutation(names[counts >= own + least])
    if not len(mine):
        return None
    rows = {name: draw.permutation(np.flatnonzero(table.sites == name)) for name in names[counts >= LEAST]}
    held = rows.pop(mine[0])
    others = draw.permutation(sorted(rows))[:SITES]
    partners = [(name, take(table.columns, rows[name][:SITE_ROWS]), "") for name in others]
    return _made(table, held[:own], partners, held[own:], draw)


def _planted(table: Table, kind: str, own: int, draw: np.random.Generator) -> Federation | None:
    order = draw.permutation(table.rows)
    mine, rest = take(table.columns, order[:own]), order[own:]
    partners, start = [], 0
    for truth, rows in fitted(possible(table, kind), len(rest) - FEW):
        stop = start + rows * CHOICES.get(truth, 1)
        given = take(table.columns, rest[start:stop])
        partners.append((truth, *altered(table, given, truth, rows, mine, draw)))
        start = stop
    return _made(table, order[:own], partners, rest[start:], draw) if len(partners) > 1 else None


def _made(
    table: Table, own: np.ndarray, partners: list[tuple[str, Columns, str]], test: np.ndarray, draw: np.random.Generator
) -> Federation:
    places = draw.permutation(len(partners))
    named = [Partner(f"site_{place + 1:02d}", *one) for place, one in zip(places, partners, strict=True)]
    return Federation(
        table,
        take(table.columns, own),
        tuple(sorted(named, key=lambda one: one.name)),
        take(table.columns, test[:TEST]),
    )


def possible(table: Table, kind: str) -> Wanted:
    """The partners that a table can have; half of the labels right are worth something where there are many classes."""
    without = {"prevalence", "swapped"} if table.kind != "classes" else set()
    if table.kind == "times":
        without |= {"flipped", "region", *NOISE}
    if not measured(table):
        without |= {*UNITS, "shift", "code", "reversed", "region"}
    many = kind == "useless" and len(table.classes) > len("01")
    wanted = [(truth, int(rows)) for truth, rows in map(str.split, KINDS[kind].split(", "))]
    return [("permuted" if many else truth, rows) for truth, rows in wanted if many or truth not in without]


def fitted(wanted: Wanted, available: int) -> Wanted:
    """The partners that so many rows suffice for: smaller ones, then fewer."""
    for last in range(len(wanted), 0, -1):
        for factor in (1.0, 0.8, 0.6, 0.5, 0.4, 0.3):
            sized = [(truth, max(min(rows, LEAST), int(rows * factor))) for truth, rows in wanted[:last]]
            if sum(rows * CHOICES.get(truth, 1) for truth, rows in sized) <= available:
                return sized
    return []


def altered(
    table: Table, given: Columns, truth: str, rows: int, mine: Columns, draw: np.random.Generator
) -> tuple[Columns, str]:
    """What a partner holds, and the column of its fault. `given` are its candidates, `mine` the target's rows."""
    if truth in CHOICES:
        if truth == "prevalence":
            _, codes, counts = np.unique(given[table.label], return_inverse=True, return_counts=True)
            weights = np.where(codes == counts.argmin(), 4.0, 1.0)
        else:
            values = given[str(draw.choice(measured(table)))]
            weights = np.where(values > np.nanmedian(values), 9.0, 1.0)
        return take(given, draw.choice(len(weights), rows, replace=False, p=weights / weights.sum())), ""
    if truth.endswith("copy"):
        return _copied(table, mine, given, truth, draw), ""
    if truth in (*UNITS, "code", "reversed", "region"):
        return _faulty(table, given, truth, draw)
    names = [table.label, table.event] if truth == "permuted" and table.event else [table.label]
    order = draw.permutation(len(given[table.label]))
    changed = take({name: given[name] for name in names}, order) if truth == "permuted" else {}
    if truth not in ("friend", "permuted"):
        change = _number if table.kind == "numbers" else _class
        changed = {table.label: change(given[table.label], truth, draw)}
    return given | changed, table.label if truth in ("flipped", "swapped") else ""


def _number(labels: np.ndarray, truth: str, draw: np.random.Generator) -> np.ndarray:
    if truth == "flipped":
        return np.asarray(2 * labels.mean() - labels)
    return np.asarray(labels + NOISE[truth][1] * labels.std() * draw.standard_normal(len(labels)))


def _class(labels: np.ndarray, truth: str, draw: np.random.Generator) -> np.ndarray:
    names, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if truth == "swapped":  # the two commonest classes
        first, second = counts.argsort()[-2:]
        codes = np.where(codes == first, second, np.where(codes == second, first, codes))
        return np.asarray(names[codes])
    if truth == "flipped":
        return np.asarray(names[(codes + 1) % len(names)])
    wrong = draw.permutation(len(labels)) < round(NOISE[truth][0] * len(labels))
    other = codes + draw.integers(1, max(2, len(names)), len(labels))
    return np.asarray(names[np.where(wrong, other, codes) % len(names)])


def _faulty(table: Table, given: Columns, truth: str, draw: np.random.Generator) -> tuple[Columns, str]:
    """One column in another unit, with a code for missing values, reversed, or wrong labels beyond a cut."""
    name = str(draw.choice(measured(table)))
    values = given[name].copy()
    if truth == "region":
        cut = np.nanquantile(values, 0.7)
        labels, wrong = given[table.label], np.nan_to_num(values, nan=-np.inf) > cut
        changed = _number(labels, "flipped", draw) if table.kind == "numbers" else _class(labels, "swapped", draw)
        return given | {table.label: np.where(wrong, changed, labels)}, name
    if truth in UNITS:
        values *= UNITS[truth]
    elif truth == "code":
        values[draw.permutation(len(values))[: max(1, len(values) // 10)]] = CODE
    else:
        values = np.nanmin(values) + np.nanmax(values) - values
    return given | {name: values}, name


def _copied(table: Table, mine: Columns, given: Columns, truth: str, draw: np.random.Generator) -> Columns:
    """My rows in another order, half of them with as many others, or all with noise of 1 % of a deviation."""
    order = draw.permutation(len(mine[table.label]))
    if truth == "half-copy":
        half = len(order) // 2
        return joined([take(mine, order[:half]), take(given, np.arange(min(half, len(given[table.label]))))])
    found = take(mine, order)
    if truth == "jittered-copy":
        jitter = {name: draw.standard_normal(len(order)) for name in table.features if is_number(found[name])}
        found |= {name: found[name] + 0.01 * np.nanstd(found[name]) * noise for name, noise in jitter.items()}
    return found


def measured(table: Table) -> list[str]:
    """Columns of numbers with at least ten values, most of them other than 0."""
    columns = {name: table.columns[name] for name in table.features if is_number(table.columns[name])}
    varied = [name for name, values in columns.items() if len(np.unique(values[~np.isnan(values)])) >= DISTINCT]
    return [name for name in varied if (np.nan_to_num(columns[name]) != 0).mean() > 1 / 2]
