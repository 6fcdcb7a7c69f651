"""A table or figure of a paper as data: which runs, at which scale, how a cell is read from them, what was printed."""

import datetime
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

from coterie.errors import UsageError, unknown
from coterie.experiment.config import load
from coterie.experiment.processes import Job, Watch, run_all
from coterie.settings import chosen
from coterie.storage import make_folder, write_atomically, write_json

Settings = Mapping[str, Any]  # {'table.key': value}
EVERY_RUN: Settings = {"run.baselines": [], "run.threads": 1}
DASH = "–"
MEASURED = ("finished", "diverged")  # outcomes that a cell can be read from


class Column(NamedTuple):
    """A column: settings of its runs, how a value is read (see `read`), and how it is written."""

    name: str
    settings: Settings
    read: str
    form: str = ".3f"
    times: float = 1.0


class Row(NamedTuple):
    """A row: its name and the settings of its runs."""

    name: str
    settings: Settings


Part = TypeVar("Part", Row, Column)


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

    def settings(self, row: Row, column: Column, seed: int) -> dict[str, Any]:
        """One run: what all have, what its column has, what its row has."""
        merged = {**EVERY_RUN, **self.common, **column.settings, **row.settings, "run.seed": seed}
        return self.adjust(merged)

    def folder(self, settings: Settings) -> str:
        """The name of a run's folder, the same for the same settings."""
        if self.name is not None:
            return self.name(settings)
        own = {k: v for k, v in settings.items() if k not in {**EVERY_RUN, **self.common} and k != "run.seed"}
        text = "-".join([str(settings["run.method"]), *(f"{k.partition('.')[2]}={v}" for k, v in sorted(own.items()))])
        return slug(f"{text.replace('-method=' + str(settings['run.method']), '')}-{settings['run.seed']}")

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


def jobs(table: Table, out: Path) -> list[Job]:
    """Every run once, though several cells read it."""
    found: dict[str, Job] = {}
    for cell in cells(table):
        for settings in cell.runs:
            name = table.folder(settings)
            found.setdefault(name, Job(load(sets=settings), out / name))
    return list(found.values())


def reproduce(
    study: Study,
    table: Table,
    scale: str,
    out: Path,
    *,
    at_once: int | None = None,
    dry: bool = False,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Run what has not been run, read the cells, write NAME-SCALE.json and .md; dry reads only what is there."""
    make_folder(out)
    if not dry:
        run_all(jobs(table, out), at_once=at_once, watch=watch)
    result = study.after(collected(study, table, scale, out))
    write_json(out / f"{study.name}-{scale}.json", result)
    write_atomically(out / f"{study.name}-{scale}.md", markdown(result).encode())
    return result


class Checked(NamedTuple):
    """One run of a stored cell, made again: the stored value and the new one."""

    name: str
    seed: int
    stored: float
    again: float | None

    def agrees(self, tolerance: float) -> bool:
        """Whether both are the same, up to the tolerance, relative above 1 and absolute below."""
        return self.again is not None and abs(self.again - self.stored) <= tolerance * max(1.0, abs(self.stored))


def sample(study: Study, result: Mapping[str, Any], count: int) -> list[tuple[Cell, int, float]]:
    """A few cells of a stored result, spread evenly over it, each with one seed and that seed's stored value.

    Only cells that hold one value per seed of the result can be checked: the mean of several seeds tells nothing of
    one run.
    """
    seeds = [int(seed) for seed in result["seeds"]]
    table = study.at(result["scale"])
    names = [column["name"] for column in result["columns"]]
    stored = {
        (row["name"], name): values
        for row in result["rows"]
        for name, cell in zip(names, row["cells"], strict=True)
        if len(values := cell.get("values") or [cell[key] for key in ("mean",) if key in cell]) == len(seeds)
    }
    whole = [cell for cell in cells(replace(table, seeds=tuple(seeds))) if (cell.row.name, cell.column.name) in stored]
    chosen = [whole[round(i * (len(whole) - 1) / max(1, count - 1))] for i in range(min(count, len(whole)))]
    return [
        (cell, i % len(seeds), float(stored[cell.row.name, cell.column.name][i % len(seeds)]))
        for i, cell in enumerate(chosen)
    ]


def check_stored(
    study: Study,
    result: Mapping[str, Any],
    out: Path,
    *,
    count: int = 2,
    at_once: int | None = None,
    watch: Watch | None = None,
) -> list[Checked]:
    """Run a small sample of a stored result's cells again.

    Args:
        study: the study that the result is of.
        result: what `reproduce` stored.
        out: the folder for the runs.
        count: how many cells.
        at_once: runs at a time; by default one per core.
        watch: hears how the runs come along.
    """
    make_folder(out)
    table = study.at(result["scale"])
    chosen = sample(study, result, count)
    runs = [cell.runs[seed] for cell, seed, _ in chosen]
    found = {table.folder(settings): Job(load(sets=settings), out / table.folder(settings)) for settings in runs}
    run_all(list(found.values()), at_once=at_once, watch=watch)
    checked = []
    for (cell, seed, stored), settings in zip(chosen, runs, strict=True):
        again = value_of(finished_run(out / table.folder(settings)), cell.column)
        checked.append(Checked(f"{cell.row.name}, {cell.column.name}", int(result["seeds"][seed]), stored, again))
    return checked


def collected(study: Study, table: Table, scale: str, out: Path) -> dict[str, Any]:
    """The cells' values, as far as their runs are there."""
    run_in = cache(finished_run)
    seeds: set[int] = set()
    values: dict[tuple[str, str], list[float]] = {}
    for cell in cells(table):
        runs = [(settings["run.seed"], run_in(out / table.folder(settings))) for settings in cell.runs]
        seeds |= {seed for seed, run in runs if run is not None}
        found = [value for _, run in runs if (value := value_of(run, cell.column)) is not None]
        values[cell.row.name, cell.column.name] = found

    def entry(key: tuple[str, str]) -> dict[str, Any]:
        paper = {"paper": table.printed[key]} if key in table.printed else {}
        return {"values": values.get(key, []), **paper}

    rows = {row.name: [entry((row.name, column.name)) for column in table.columns] for row in table.rows}
    return {
        "name": study.name,
        "page": study.page,
        "what": study.what,
        "scale": scale,
        "about": table.about,
        "seeds": sorted(seeds) or list(table.seeds),
        "date": datetime.date.today().isoformat(),
        "corner": table.corner,
        "columns": [{"name": column.name, "form": column.form} for column in table.columns],
        "rows": [{"name": name, "cells": found} for name, found in rows.items()],
    }


class Finished(NamedTuple):
    """What a finished run left."""

    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    weights: dict[int, list[float]]  # by round; empty where there are none, or every client has weights of its own


def finished_run(folder: Path) -> Finished | None:
    """None where there is none, or where it is not finished."""
    path = folder / "summary.json"
    if not path.is_file():
        return None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        weights = _weights(folder / "weights.csv")
        return Finished(summary, lines, weights) if summary["outcome"] in MEASURED and lines else None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder} is damaged ({error}); delete it and run again.") from None


def value_of(run: Finished | None, column: Column) -> float | None:
    """A run's value in a column; None where it has none."""
    value = None if run is None else read(run, column.read)
    return None if value is None else column.times * value


def read(run: Finished, what: str) -> float | None:
    """A value of a run, by words; None where it has no such value.

    final:MEASURE, best:MEASURE (where the validation accuracy was best), lowest:MEASURE (where the validation loss was:
    few validation rows are soon all right), tail:N:MEASURE (the mean of the last N records), at:ROUND:MEASURE,
    weights:FROM:TO (their sum at the end), most:FROM:TO (the largest of them), lowest:weights:… and lowest:most:…,
    megabytes, megabytes_up, rounds (of communication).
    """
    kind, _, rest = what.partition(":")
    if kind == "final":
        return _number(run.lines[-1].get(rest, run.summary["final"].get(rest)))
    if kind == "best":
        best = max(run.lines, key=lambda line: _number(line.get("validation_accuracy")) or 0.0)
        return _number(best.get(rest))
    if kind == "lowest":
        lowest = min(run.lines, key=lambda line: line.get("validation_loss", math.inf))
        if rest.startswith(("weights:", "most:")):
            return _of_weights(run.weights.get(lowest["round"]), rest)
        return _number(lowest.get(rest))
    if kind == "tail":
        count, _, measure = rest.partition(":")
        found = [v for line in run.lines[-int(count) :] if (v := _number(line.get(measure))) is not None]
        return fmean(found) if found else None
    if kind == "at":
        when, _, measure = rest.partition(":")
        return next((_number(line.get(measure)) for line in run.lines if line["round"] == int(when)), None)
    if kind in ("weights", "most"):
        return _of_weights(run.summary["weights"], what)
    moved = run.summary["communication"]
    sums = {"megabytes": ("bytes_up", "bytes_down"), "megabytes_up": ("bytes_up",), "rounds": ("rounds",)}
    if kind not in sums:
        raise ValueError(f"no way to read {what!r}")
    return sum(moved[key] for key in sums[kind]) / (1.0 if kind == "rounds" else 1e6)


def _of_weights(weights: list[float] | None, what: str) -> float | None:
    """weights:FROM:TO or most:FROM:TO."""
    if weights is None:
        return None
    kind, first, last = what.split(":")
    chosen = weights[int(first) : int(last) if last else None]
    return float(sum(chosen)) if kind == "weights" else float(max(chosen))


def _weights(path: Path) -> dict[int, list[float]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not lines or not lines[0].startswith("round,client_0"):
        return {}
    rows = (line.split(",") for line in lines[1:])
    return {int(round_): [float(w) for w in row] for round_, *row in rows}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def cell_text(cell: Mapping[str, Any], form: str, *, each: bool = False, seeds: int | None = None) -> str:
    """Mean ± standard deviation of the seeds, or each; where some of the seeds are missing, how many there are.

    Results taken over from elsewhere have mean and std alone.
    """
    values = cell.get("values") or []
    if each and values:
        return " / ".join(_written(v, form) for v in values)
    mean = cell.get("mean", fmean(values) if values else None)
    spread = cell.get("std", stdev(values) if len(values) > 1 else None)
    if mean is None:
        return DASH
    partly = f" ({len(values)} of {seeds})" if seeds is not None and 0 < len(values) < seeds else ""
    return _written(mean, form) + ("" if spread is None else f" ± {_written(spread, form)}") + partly


def _written(value: float, form: str) -> str:
    """With short exponents: 1.5e-2, and 4.5 for 4.5e+00."""
    return re.sub(r"e([+-])0*(\d*)$", lambda e: f"e{e[1].strip('+')}{e[2]}" if e[2] else "", f"{value:{form}}")


def markdown(result: Mapping[str, Any]) -> str:
    """The table, the paper's values below ours, and what it is: scale, seeds, date."""
    heads, forms = [c["name"] for c in result["columns"]], [c["form"] for c in result["columns"]]
    each = result.get("show") == "each"
    lines = [_line([result.get("corner", ""), *heads]), "|---" * (len(heads) + 1) + "|"]
    for row in result["rows"]:
        seeds = len(result["seeds"])
        texts = [cell_text(c, form, each=each, seeds=seeds) for c, form in zip(row["cells"], forms, strict=True)]
        lines.append(_line([row["name"], *texts]))
        if any("paper" in cell for cell in row["cells"]):
            both = zip(row["cells"], forms, strict=True)
            printed = [_written(cell["paper"], form) if "paper" in cell else "" for cell, form in both]
            lines.append(_line([f"{row['name']}, paper", *printed]))
    return "\n".join([*lines, "", caption(result)]) + "\n"


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def caption(result: Mapping[str, Any]) -> str:
    """Scale, seeds, date, and what was run."""
    seeds = ", ".join(map(str, result["seeds"]))
    many = "seeds" if len(result["seeds"]) > 1 else "seed"
    spread = result.get("spread", "standard deviation")
    kind = "each seed" if result.get("show") == "each" else f"mean ± {spread}" if spread else "mean"
    text = f"scale {result['scale']}; {many} {seeds}" + (f" ({kind})" if len(result["seeds"]) > 1 else "")
    return f"{text}; {result['date']}. {result['about']}".strip()
