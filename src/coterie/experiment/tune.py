"""Hyper-parameter choice as in the papers: every combination of a grid for a few rounds, best validation wins.

Combinations run as processes of their own, in result folders of their own, so that they use all cores, can be resumed,
and can be looked at afterwards. The test set plays no part in the choice.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from coterie.errors import RunError, UsageError, unknown
from coterie.experiment.config import Config, load, resolve
from coterie.experiment.processes import Job, Watch, check_unchanged, run_all
from coterie.experiment.records import at_work_on, read_plan
from coterie.measures import STANDARD, Measure, of_summary
from coterie.plugins import label
from coterie.storage import write_atomically, write_json

OUTSIDE = re.compile(r",(?![^(]*\))")  # commas that are not between parentheses: cosine(0.1, 100) is one value

PLAN = "tune.json"

Grid = Mapping[str, Sequence[Any]]


class Trial(NamedTuple):
    """One combination: its settings, its folder, and what became of it."""

    number: int
    settings: dict[str, Any]
    final: dict[str, Any]
    outcome: str
    message: str = ""


def combinations(grid: Grid) -> list[dict[str, Any]]:
    """All choices of one value a key, in the grid's order."""
    for key, values in grid.items():
        if "." not in key:
            raise UsageError(f"the grid's key {key!r} names no table; write for example method.step.")
        if not values:
            raise UsageError(f"the grid gives no value for {key}.")
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def tune(
    config: Config,
    grid: Grid,
    folder: Path,
    *,
    rounds: int,
    jobs: int | None = None,
    force: bool = False,
    watch: Watch | None = None,
    measure: str | None = None,
) -> dict[str, Any]:
    """Run the grid, write tune.json and best.toml, and return the former.

    measure is the one to choose by; by default the most important that needs no test rows. A grid that was interrupted
    in the folder is resumed.
    """
    chosen = combinations(grid)
    configs = [_with(config, settings, rounds) for settings in chosen]
    runs = [Job(trial, folder / "trials" / f"{i:03d}") for i, trial in enumerate(configs)]
    plan = {"outcome": "not finished", "grid": grid, "rounds": rounds, "measure": measure, "jobs": jobs}
    with at_work_on(folder, PLAN, force=force):
        check_unchanged(runs)
        write_json(folder / PLAN, plan)
        write_atomically(folder / "config.toml", config.as_toml().encode())
        summaries = run_all(runs, at_once=jobs, watch=watch)
        trials = [Trial(i, chosen[i], s["final"], s["outcome"], s["message"]) for i, s in enumerate(summaries)]
        known = {m.name: m for summary in summaries if summary["outcome"] == "finished" for m in of_summary(summary)}
        best, name = _best(trials, known.values(), measure)
        winner = _with(config, best.settings, config.run.rounds)
        write_atomically(folder / "best.toml", winner.as_toml().encode())
        result = {
            **plan,
            "outcome": "finished",
            "method": label(config.run.method),
            "problem": label(config.run.problem),
            "seed": config.run.seed,
            "measure": name,
            "declared": known[name].as_dict(),
            "best": {"settings": best.settings, name: best.final[name]},
            "trials": [trial._asdict() for trial in trials],
        }
        write_json(folder / PLAN, result)
    return result


def resume(folder: Path, *, watch: Watch | None = None) -> dict[str, Any]:
    """Run what is left of an interrupted grid, as it was begun."""
    grid, rounds, measure, jobs = read_plan(folder / PLAN, "grid", "rounds", "measure", "jobs")
    return tune(load(folder / "config.toml"), grid, folder, rounds=rounds, measure=measure, jobs=jobs, watch=watch)


def _with(config: Config, settings: Mapping[str, Any], rounds: int) -> Config:
    """The configuration with some settings changed; checked, so that a bad value is found before anything runs."""
    tables = config.as_dict()
    tables.pop("version")
    for dotted, value in settings.items():
        table, _, key = dotted.partition(".")
        tables.setdefault(table, {})[key] = value
    tables["run"] |= {"rounds": rounds}
    return resolve(tables)


def _best(trials: list[Trial], measures: Iterable[Measure] = STANDARD, wanted: str | None = None) -> tuple[Trial, str]:
    """The best finished combination, by a measure or by the most important that needs no test rows."""
    finished = [trial for trial in trials if trial.outcome == "finished"]
    if not finished:
        raise RunError(f"no combination finished. The first {trials[0].outcome}: {trials[0].message}")
    known = {measure.name: measure for measure in measures}
    if wanted is not None and wanted not in known:
        raise unknown("measure", wanted, known)
    by_rows = [
        m
        for rows in ("selection", "validation", "")
        for m in known.values()
        if m.rows == rows and m.better != "neither"
    ]
    for measure in by_rows if wanted is None else [known[wanted]]:
        sign = -1.0 if measure.higher else 1.0
        able = [trial for trial in finished if trial.final.get(measure.name) is not None]  # None was not finite
        if able:
            return min(able, key=lambda trial: sign * trial.final[measure.name]), measure.name
    raise UsageError("the problem has no validation measure to choose by; give it a target with validation rows.")


def parse_grid(pairs: Sequence[str], read: Callable[[list[str]], dict[str, Any]]) -> dict[str, list[Any]]:
    """`table.key=v1,v2,v3` pairs; each value is read as a setting."""
    grid = {}
    for pair in pairs:
        key, sign, values = pair.partition("=")
        if not sign:
            raise UsageError(f"--grid {pair!r} has no '='; write --grid method.step=0.05,0.02.")
        grid[key.strip()] = [read([f"{key}={value}"])[key.strip()] for value in OUTSIDE.split(values)]
    return grid
