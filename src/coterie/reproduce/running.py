"""Runs of a study: what has not been run, the grids first; then its cells and curves."""

import datetime
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from coterie import machine
from coterie.errors import RunError, UsageError
from coterie.experiment.config import load
from coterie.experiment.processes import Job, Watch, check_unchanged, run_all
from coterie.experiment.records import at_work_in
from coterie.problems.data.sets import KNOWN, locate
from coterie.problems.models.text import check_installed
from coterie.reproduce.adding import added, cell_of, check_fits, with_chosen
from coterie.reproduce.curves import drawn, gathered
from coterie.reproduce.least import as_recorded, check_addable
from coterie.reproduce.pages import markdown
from coterie.reproduce.reading import Finished, better_off, finished_run, read, value_of
from coterie.reproduce.study import Cell, Settings, Study, Table, cells
from coterie.storage import make_folder, write_atomically, write_json

TRIALS = "trials"


def jobs(table: Table, out: Path) -> list[Job]:
    """Every run once, though several cells read it."""
    found: dict[str, Job] = {}
    for cell in cells(table):
        for settings in cell.runs:
            name = table.folder(settings)
            found.setdefault(name, Job(load(sets=settings), out / name))
    return list(found.values())


def trial_jobs(table: Table, out: Path) -> list[Job]:
    """Every run of the grids."""
    folders = {table.folder(trial.settings): trial for trial in table.trials()}
    return [Job(load(sets=trial.settings), out / TRIALS / name) for name, trial in folders.items()]


def check_data(table: Table) -> None:
    """Refuse a table whose data or packages are missing, with all that is missing and how to get it, before any run."""
    known = {entry.name for entry in KNOWN if entry.files}
    runs = [s for cell in cells(table) for s in cell.runs] + [trial.settings for trial in table.trials()]
    wanted = {s.get("problem.data") for s in runs}
    checks: list[Callable[[], object]] = [partial(locate, name) for name in sorted(known & wanted)]
    if "goemotions" in wanted:
        checks.append(partial(check_installed, "transformers"))
    if any(s.get("problem.lora") for s in runs):
        checks.append(partial(check_installed, "peft"))
    missing = [problem for check in checks if (problem := _refusal(check))]
    if missing:
        raise UsageError(" ".join(missing))


def _refusal(check: Callable[[], object]) -> str:
    """Why a check refuses; nothing where it does not."""
    try:
        check()
    except UsageError as error:
        return str(error)
    return ""


def chosen(table: Table, out: Path, *, partly: bool = False) -> Table:
    """The table with the best settings of each grid; with `partly`, grids that have not been run are left out.

    A trial that diverged counts only where every trial of its grid did.

    Args:
        table: the table.
        out: the folder of its runs.
        partly: whether grids may be missing.
    """
    if table.tuning is None:
        return table
    tuning, best = table.tuning, dict[str, tuple[tuple[bool, float], Settings]]()
    complete = {trial.name: True for trial in table.trials()}
    for trial in table.trials():
        run = finished_run(out / TRIALS / table.folder(trial.settings))
        complete[trial.name] &= run is not None
        value = None if run is None else read(run, tuning.read)
        if run is not None and value is not None:
            scored = (run.summary["outcome"] == "finished", value if tuning.higher else -value)
            if trial.name not in best or scored > best[trial.name][0]:
                best[trial.name] = (scored, trial.tried)
    lost = [name for name in complete if name not in best]
    if lost and not partly:
        raise RunError(f"no trial of {', '.join(lost)} gives {tuning.read}; look at {out / TRIALS}.")
    found = {name: best[name][1] for name in best if complete[name] or not partly}
    return replace(table, tuned={**table.tuned, **found})


def reproduce(
    study: Study,
    table: Table,
    scale: str,
    out: Path,
    *,
    at_once: int | None = None,
    dry: bool = False,
    stored: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    again: str = "",
) -> dict[str, Any]:
    """Run what has not been run, read the cells, write NAME-SCALE.json, .md and curves; dry reads what is there.

    Args:
        study: which one.
        table: the study at a scale, or a part of that.
        scale: its name.
        out: the folder for the runs.
        at_once: runs at a time; by default one per core.
        dry: run nothing.
        stored: an earlier result of the same study and scale, to which this one is added.
        watch: hears how the runs come along.
        again: how the user resumes; by default with the same command.
    """
    if stored is not None:
        check_fits(study, scale, stored)
        check_addable(stored)
        table = with_chosen(table, stored)
    if not dry:
        check_data(table)
    make_folder(out)
    with nullcontext() if dry else at_work_in(out, again or f"the same command with --out {out}"):
        _run(trial_jobs(table, out), at_once, watch, dry=dry)
        table = chosen(table, out, partly=dry)
        _run(jobs(table, out), at_once, watch, dry=dry)
        result = study.after(collected(study, table, scale, out))
        if stored is not None:
            whole = study.at(scale)
            names = [row.name for row in whole.rows] + [column.name for column in whole.columns]
            result = added(stored, result, names)
        write_json(out / f"{study.name}-{scale}.json", result)
        write_atomically(out / f"{study.name}-{scale}.md", markdown(result).encode())
        for chart in drawn(result):
            write_atomically(out / f"{study.name}-{scale}-{chart.name}.svg", chart.file(paper=True).encode())
    return result


def _run(wanted: list[Job], at_once: int | None, watch: Watch | None, *, dry: bool = False) -> None:
    """Make the runs, unless dry; those that are there must have the settings that the study has now."""
    check_unchanged(wanted)
    if wanted and not dry:
        run_all(wanted, at_once=at_once, watch=watch)


class Checked(NamedTuple):
    """One run of a stored cell, made again: the stored value and the new one."""

    name: str
    seed: int
    stored: float
    again: float | None

    def agrees(self, tolerance: float) -> bool:
        """Whether both are the same, up to the tolerance, relative above 1 and absolute below."""
        return self.again is not None and abs(self.again - self.stored) <= tolerance * max(1.0, abs(self.stored))


def stored_table(study: Study, result: Mapping[str, Any]) -> Table:
    """The table of a stored result, with the settings that were chosen for it."""
    table = study.at(result["scale"])
    return replace(table, tuned=result.get("chosen", {}))


def sample(study: Study, result: Mapping[str, Any], count: int) -> list[tuple[Cell, int, float]]:
    """A few cells of a stored result, spread evenly over it, each with one seed and that seed's stored value.

    Only cells that hold one value per seed of the result can be checked: the mean of several seeds tells nothing of
    one run. Seconds are never the same, and a comparison with another row needs more than one run.
    """
    seeds = [int(seed) for seed in result["seeds"]]
    table = stored_table(study, result)
    names = [column["name"] for column in result["columns"]]
    stored = {
        (row["name"], name): values
        for row in result["rows"]
        for name, cell in zip(names, row["cells"], strict=True)
        if len(values := cell.get("values") or [cell[key] for key in ("mean",) if key in cell]) == len(seeds)
    }
    whole = [
        cell
        for cell in cells(replace(table, seeds=tuple(seeds)))
        if (cell.row.name, cell.column.name) in stored and not cell.column.read.startswith(("seconds", "better:"))
    ]
    chosen = [whole[round(i * (len(whole) - 1) / max(1, count - 1))] for i in range(min(count, len(whole)))]
    found = []
    for i, cell in enumerate(chosen):
        seed = i % len(seeds)
        value = float(stored[cell.row.name, cell.column.name][seed])
        found.append((cell, seed, as_recorded(result, cell.column.name, seed, value)))
    return found


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
    table = stored_table(study, result)
    chosen = sample(study, result, count)
    runs = [cell.runs[seed] for cell, seed, _ in chosen]
    found = {table.folder(settings): Job(load(sets=settings), out / table.folder(settings)) for settings in runs}
    with at_work_in(out, "the same command with its --out"):
        _run(list(found.values()), at_once, watch)
    checked = []
    for (cell, seed, stored), settings in zip(chosen, runs, strict=True):
        again = value_of(finished_run(out / table.folder(settings)), cell.column)
        checked.append(Checked(f"{cell.row.name}, {cell.column.name}", int(result["seeds"][seed]), stored, again))
    return checked


def collected(study: Study, table: Table, scale: str, out: Path) -> dict[str, Any]:
    """The cells' values, as far as their runs are there, with what they were run on."""
    run_in = cache(finished_run)
    seeds: set[int] = set()
    values: dict[tuple[str, str], dict[int, float]] = {}
    without: set[tuple[str, str]] = set()
    folders: dict[Path, bool] = {}
    for cell in cells(table):
        runs = [(settings["run.seed"], out / table.folder(settings)) for settings in cell.runs]
        folders |= {folder: run_in(folder) is not None for _, folder in runs}
        seeds |= {seed for seed, folder in runs if folders[folder]}
        read_all = {
            settings["run.seed"]: _cell_value(table, cell, settings, lambda name: run_in(out / name))
            for settings in cell.runs
        }
        key = cell.row.name, cell.column.name
        values[key] = {s: value for s, value in read_all.items() if value is not None}
        if not values[key] and all(folders[folder] for _, folder in runs):
            without.add(key)

    def entry(key: tuple[str, str]) -> dict[str, Any]:
        paper = {"paper": table.printed[key]} if key in table.printed else {}
        absent = {"absent": True} if key in without else {}
        return {**cell_of(values.get(key, {}), table.seeds), **absent, **paper}

    rows = {row.name: [entry((row.name, column.name)) for column in table.columns] for row in table.rows}
    summaries = [run.summary for folder in folders if (run := run_in(folder)) is not None]
    missing = [folder.name for folder, is_there in folders.items() if not is_there]
    here = machine.platform()
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
        **({} if table.budget is None else {"budget": str(table.budget)}),
        **({} if table.tuning is None else {"chosen": dict(table.tuned), "grid": _grid_words(table)}),
        **({} if not missing else {"missing": missing, "runs": len(folders)}),
        "seconds": round(sum(float(summary.get("seconds") or 0.0) for summary in summaries)),
        "platform": {key: here[key] for key in ("coterie", "torch", "python", "processor")},
        **({} if not table.curves else {"curves": gathered(table, out)}),
    }


def _cell_value(table: Table, cell: Cell, settings: Settings, run_in: Callable[[str], Finished | None]) -> float | None:
    """A run's value in a column; better:ROW compares it with the same run of another row."""
    kind, _, other = cell.column.read.partition(":")
    run = run_in(table.folder(settings))
    if kind != "better":
        return value_of(run, cell.column)
    rows = [row for row in table.rows if row.name == other]
    alone = [run_in(table.folder(table.settings(row, cell.column, settings["run.seed"]))) for row in rows]
    value = better_off(run, alone[0]) if alone else None
    return None if value is None else cell.column.times * value


def _grid_words(table: Table) -> str:
    """How settings were chosen."""
    assert table.tuning is not None
    size = max((len(grid) for grid in table.tuning.grids.values()), default=0)
    shorter = "" if table.tuning.budget is None else f" after {table.tuning.budget}"
    return f"{size} settings per method, chosen by {table.tuning.read.replace(':', ' ').replace('_', ' ')}{shorter}"
