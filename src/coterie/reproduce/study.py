"""A table or figure of a paper as data: which runs, at which scale and budget, how a cell is read, what was printed."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from typing import Any, Literal, NamedTuple, TypeVar

from coterie.errors import unknown
from coterie.settings import chosen

Settings = Mapping[str, Any]  # {'table.key': value}
EVERY_RUN: Settings = {"run.baselines": [], "run.threads": 1}


class Column(NamedTuple):
    """A column: settings of its runs, how a value is read (see `read`), and how it is written.

    A column that reads another value of the same runs as `of` has the settings that were chosen for that one.
    """

    name: str
    settings: Settings
    read: str
    form: str = ".3f"
    times: float = 1.0
    of: str = ""


class Row(NamedTuple):
    """A row: its name and the settings of its runs."""

    name: str
    settings: Settings


Part = TypeVar("Part", Row, Column)


class Budget(NamedTuple):
    """What every run of a table may spend; the round that reaches it is the last.

    Args:
        of: exchanges (rounds of communication), megabytes (up and down), or rounds of the method.
        amount: how much.
    """

    of: Literal["exchanges", "megabytes", "rounds"]
    amount: int

    def settings(self) -> dict[str, Any]:
        """What every run gets: it may take as many rounds as the budget allows.

        Example:
            >>> Budget("exchanges", 100).settings()
            {'run.exchanges': 100, 'run.rounds': 100}
        """
        if self.of == "megabytes":
            return {"run.budget": self.amount * 1_000_000}
        return ({"run.exchanges": self.amount} if self.of == "exchanges" else {}) | {"run.rounds": self.amount}

    def __str__(self) -> str:
        words = {"exchanges": "rounds of communication", "megabytes": "MB moved", "rounds": "rounds"}
        return f"{self.amount:,} {words[self.of]}"


@dataclass(frozen=True)
class Tuning:
    """Grids of equal size, one per method; what is best on rows that neither train nor test is used in all cells.

    Args:
        grids: by the name of the row or column that sets the method: settings to try.
        on: settings of the trials beside those of the table: which data, which seed.
        read: what to choose by, as in a column.
        higher: whether more is better.
        budget: what a trial may spend, where that is less than the table's runs spend.
    """

    grids: Mapping[str, Sequence[Settings]]
    on: Settings
    read: str = "best:selection_accuracy"
    higher: bool = True
    budget: Budget | None = None

    def __post_init__(self) -> None:
        sizes = {name: len(grid) for name, grid in self.grids.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"grids must be of equal size, not {sizes}")


class Curve(NamedTuple):
    """A figure: one measure against what was spent, the mean over seeds, one line per method.

    Args:
        measure: its name in the record.
        against: round, exchanges, points, bytes or seconds.
    """

    measure: str
    against: str = "exchanges"


class Trial(NamedTuple):
    """One run of a grid: whose, what is tried, and all its settings."""

    name: str
    tried: Settings
    settings: dict[str, Any]


@dataclass(frozen=True)
class Table:
    """All of it at one scale. printed are the paper's values by (row, column)."""

    about: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    common: Settings = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    corner: str = ""
    printed: Mapping[tuple[str, str], float] = field(default_factory=dict)
    adjust: Callable[[dict[str, Any]], dict[str, Any]] = lambda settings: settings
    name: Callable[[Settings], str] | None = None
    budget: Budget | None = None
    tuning: Tuning | None = None
    curves: tuple[Curve, ...] = ()
    tuned: Mapping[str, Settings] = field(default_factory=dict)

    def settings(self, row: Row, column: Column, seed: int) -> dict[str, Any]:
        """One run: what all have, what its column has, what its row has, what was chosen for its method."""
        chosen = {**self.tuned.get(column.of or column.name, {}), **self.tuned.get(row.name, {})}
        return self._merged({**column.settings, **row.settings, **chosen, "run.seed": seed}, self.budget)

    def _merged(self, own: Settings, budget: Budget | None) -> dict[str, Any]:
        merged = self.adjust({**EVERY_RUN, **self.common, **own})
        return merged if budget is None else {**merged, **budget.settings()}

    def folder(self, settings: Settings) -> str:
        """The name of a run's folder, the same for the same settings."""
        if self.name is not None and self.tuning is None:
            return self.name(settings)
        if self.name is not None:
            tried = [f"{k.partition('.')[2]}={v}" for k, v in sorted(settings.items()) if k in self._tried]
            return slug("-".join([self.name(settings), *tried]))
        common = {**EVERY_RUN, **self.common, "run.seed": settings["run.seed"]}
        own = {k: v for k, v in settings.items() if k not in common or common[k] != v}
        text = "-".join([str(settings["run.method"]), *(f"{k.partition('.')[2]}={v}" for k, v in sorted(own.items()))])
        return slug(f"{text.replace('-method=' + str(settings['run.method']), '')}-{settings['run.seed']}")

    @cached_property
    def _tried(self) -> frozenset[str]:
        """The settings that grids vary."""
        grids = () if self.tuning is None else self.tuning.grids.values()
        return frozenset(key for grid in grids for tried in grid for key in tried)

    def trials(self) -> list[Trial]:
        """The runs of all grids whose row or column is part of the table, and for which nothing has been chosen yet."""
        if self.tuning is None:
            return []
        parts = {row.name: row.settings for row in self.rows}
        parts |= {column.name: column.settings for column in self.columns}
        budget = self.tuning.budget or self.budget
        return [
            Trial(name, tried, self._merged({**parts[name], "run.seed": 0, **self.tuning.on, **tried}, budget))
            for name, grid in self.tuning.grids.items()
            if name in parts and name not in self.tuned
            for tried in grid
        ]

    def only(self, rows: Sequence[str], columns: Sequence[str], seeds: Sequence[int]) -> "Table":
        """A part of it; what is not named stays whole."""
        kept_rows, kept_columns = _named("row", rows, self.rows), _named("column", columns, self.columns)
        return replace(self, rows=kept_rows, columns=kept_columns, seeds=tuple(seeds) or self.seeds)


def _named(kind: str, wanted: Sequence[str], parts: tuple[Part, ...]) -> tuple[Part, ...]:
    names = [part.name for part in parts]
    for name in wanted:
        if name not in names:
            raise unknown(kind, name, names)
    return tuple(part for part in parts if not wanted or part.name in wanted)


@dataclass(frozen=True)
class Study:
    """One table or figure: its name, the page of docs/papers that shows it, what it is, and its scales.

    after may change the values of all cells together, once they are read.
    """

    name: str
    page: str
    what: str
    scales: Mapping[str, Table]
    after: Callable[[dict[str, Any]], dict[str, Any]] = lambda result: result

    def at(self, scale: str) -> Table:
        """The table at a scale."""
        return chosen(f"scale of {self.name}", scale, self.scales)


def flat(**tables: Settings) -> dict[str, Any]:
    """Settings by their dotted names, from tables as in a configuration file.

    Example:
        >>> flat(run={"problem": "friends", "rounds": 5}, method={"step": 0.1})
        {'run.problem': 'friends', 'run.rounds': 5, 'method.step': 0.1}
    """
    return {f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()}


def printed(study: str) -> dict[tuple[str, str], float]:
    """The values that the paper of a study prints, by (row, column); none where printed.toml has none."""
    text = (files("coterie.reproduce") / "printed.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text).get(study, {"columns": []})
    columns = rows.pop("columns")
    return {(row, column): v for row, values in rows.items() for column, v in zip(columns, values, strict=True)}


def slug(text: str) -> str:
    """Text as a file name."""
    return re.sub(r"[^A-Za-z0-9.=_]+", "-", text).strip("-")


class Cell(NamedTuple):
    """One cell's runs."""

    row: Row
    column: Column
    runs: tuple[dict[str, Any], ...]


def cells(table: Table) -> Iterator[Cell]:
    """Row by row."""
    for row in table.rows:
        for column in table.columns:
            yield Cell(row, column, tuple(table.settings(row, column, seed) for seed in table.seeds))
