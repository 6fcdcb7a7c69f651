"""Which faults of files are found before training: one fault at a time, planted in files that have none.

Nothing is trained. A fault counts as found if a finding names its file and its column or what else is wrong; findings
on files without a fault are counted too.
"""

import csv
import re
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.tables import adapter
from benchmarks.tables.scenario import Partner, Scenario, measured, scenario, write_csv
from benchmarks.tables.sources import SOURCES, Table
from benchmarks.tables.summary import Share, markdown, share

MINE = "mine.csv"
NO_FAULT = "none"


class Planted(NamedTuple):
    """The file at fault, and words of which a finding must hold one."""

    file: str
    words: tuple[str, ...]


Plant = Callable[[Path, Scenario, np.random.Generator], Planted | None]


def _first(drawn: Scenario) -> Partner:
    return next(one for one in drawn.partners if one.truth == "friend")


def _column(table: Table, draw: np.random.Generator) -> int:
    return table.number_names.index(str(draw.choice(measured(table))))


def _unit(factor: float, folder: Path, drawn: Scenario, draw: np.random.Generator) -> Planted | None:
    partner = _first(drawn)
    if not partner.table.number_names:
        return None
    j, numbers = _column(partner.table, draw), partner.table.numbers.copy()
    numbers[:, j] *= factor
    write_csv(folder / "sites" / partner.file, partner.table._replace(numbers=numbers))
    return Planted(partner.file, (repr(partner.table.number_names[j]),))


def _code(value: float, cells: float, folder: Path, drawn: Scenario, draw: np.random.Generator) -> Planted | None:
    """A number in place of a share of a column's cells, or of one cell, at a partner."""
    partner = _first(drawn)
    if not partner.table.number_names:
        return None
    j, numbers = _column(partner.table, draw), partner.table.numbers.copy()
    numbers[draw.permutation(len(numbers))[: max(1, round(cells * len(numbers)))], j] = value
    write_csv(folder / "sites" / partner.file, partner.table._replace(numbers=numbers))
    return Planted(partner.file, (repr(partner.table.number_names[j]),))


def _commas(own: bool, folder: Path, drawn: Scenario, draw: np.random.Generator) -> Planted | None:
    """Semicolons between the cells and commas in the numbers, as spreadsheets write them in many countries."""
    broken = [j for j, column in enumerate(drawn.own.numbers.T) if (np.nan_to_num(column) % 1 != 0).any()]
    if not broken:
        return None
    file = MINE if own else _first(drawn).file
    path = folder / MINE if own else folder / "sites" / file
    lines = _read(path)
    places = [lines[0].index(drawn.own.number_names[j]) for j in broken]
    for line in lines[1:]:
        for place in places:
            line[place] = line[place].replace(".", ",")
    _write(path, lines, delimiter=";")
    return Planted(file, ("comma",))


def _coding(folder: Path, drawn: Scenario, draw: np.random.Generator) -> Planted | None:
    """Class names in other capitals."""
    partner = _first(drawn)
    if drawn.own.kind == "regression" or all(name.swapcase() == name for name in set(drawn.own.labels)):
        return None
    labels = np.array([name.swapcase() for name in partner.table.labels], dtype=object)
    write_csv(folder / "sites" / partner.file, partner.table._replace(labels=labels))
    return Planted(partner.file, ("coding", "class"))


def _copies(part: float, folder: Path, drawn: Scenario, draw: np.random.Generator) -> Planted:
    """A share of a partner's rows are the target's."""
    partner = _first(drawn)
    lines, mine = _read(folder / "sites" / partner.file), _read(folder / MINE)
    kept = round((1.0 - part) * (len(lines) - 1))
    _write(folder / "sites" / partner.file, [*lines[: 1 + kept], *mine[1 : len(lines) - kept]])
    return Planted(partner.file, ("also in", "copies", "copy"))


def _own_file(folder: Path, drawn: Scenario, draw: np.random.Generator) -> Planted:
    shutil.copy(folder / MINE, folder / "sites" / "site-99.csv")
    return Planted("site-99.csv", ("own file", "also in", MINE))


def _added(name: str, value: Callable[[int], Any], folder: Path, drawn: Scenario, draw: np.random.Generator) -> Planted:
    """One more column in every file."""
    count = 0
    for path in (folder / MINE, folder / "test.csv", *sorted((folder / "sites").glob("*.csv"))):
        header, *lines = _read(path)
        for line in lines:
            line.insert(0, str(value(count)))
            count += 1
        _write(path, [[name, *header], *lines])
    return Planted("", (repr(name),))


def _day(row: int) -> date:
    return date(2020, 1, 1) + timedelta(days=row * 7919 % 1400)


FAULTS: dict[str, Plant] = {
    NO_FAULT: lambda folder, drawn, draw: None,
    "unit × 10": partial(_unit, 10.0),
    "unit × 100": partial(_unit, 100.0),
    "unit × 1000": partial(_unit, 1000.0),
    "unit ÷ 1000": partial(_unit, 0.001),
    "99999999 in 3 %": partial(_code, 99999999.0, 0.03),
    "-9999 in 3 %": partial(_code, -9999.0, 0.03),
    "one cell 1e18": partial(_code, 1e18, 0.0),
    "decimal commas, mine": partial(_commas, True),
    "decimal commas, a partner": partial(_commas, False),
    "classes in other capitals": _coding,
    "only my rows": partial(_copies, 1.0),
    "half are my rows": partial(_copies, 0.5),
    "my file among the partners": _own_file,
    "number of the record": partial(_added, "record", lambda row: 10_000 + row),
    "ISO dates": partial(_added, "seen", _day),
}


def _read(path: Path) -> list[list[str]]:
    return list(csv.reader(path.read_text(encoding="utf-8").splitlines()))


def _write(path: Path, lines: Iterable[Sequence[str]], delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows(lines)


def tried(table: Table, name: str, own: int, split: int) -> tuple[bool | None, list[str]]:
    """Whether one fault is found (None where a table cannot have it), and what is said of files without a fault."""
    drawn = scenario(table, "friends", own, split)
    with tempfile.TemporaryDirectory(prefix="coterie-tables-") as place:
        folder = Path(place)
        drawn.write(folder)
        planted = FAULTS[name](folder, drawn, np.random.default_rng([split, *name.encode()]))
        if planted is None and name != NO_FAULT:
            return None, []
        said = adapter.questioned(folder, table.label, split)
    if planted is None:
        return None, [f"{file}: {what}" for file, what in said]
    hits = [
        (file, what)
        for file, what in said
        if file.startswith(planted.file) and any(word in what for word in planted.words)
    ]
    return bool(hits), [f"{file}: {what}" for file, what in said if (file, what) not in hits]


def shown(tables: Iterable[str], own: int, splits: Iterable[int]) -> str:
    """Found faults by fault and table, as Markdown, with what else was found, alike findings counted."""
    names, seeds = list(tables), list(splits)
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    strange: Counter[str] = Counter()
    for name in names:
        table = SOURCES[name].load(name)
        for split in seeds:
            usual: set[str] = set()  # what is said without a fault is counted once
            for fault in FAULTS:
                hit, others = tried(table, fault, own, split)
                if hit is not None:
                    found[fault, name].append(hit)
                new = set(others) - usual
                strange.update(f"{name}, {fault}: {alike(one)}" for one in new)
                usual |= new if fault == NO_FAULT else set()
    rows = []
    for fault in FAULTS:
        if fault != NO_FAULT:
            each = [share(found[fault, name]) for name in names]
            rows.append([fault, Share(sum(s.hits for s in each), sum(s.total for s in each)), *map(_short, each)])
    listed = "\n".join(f"- {count} × {one}" for one, count in strange.items()) or "None."
    return f"{markdown(['fault', 'found', *names], rows)}\n\n## Findings on files without a fault\n\n{listed}"


def alike(finding: str) -> str:
    """A finding without its file's name and its numbers."""
    return re.sub(r"\d[\d,.]*", "N", finding.partition(": ")[2])


def _short(one: Share) -> str:
    return f"{one.hits}/{one.total}" if one.total else "–"
