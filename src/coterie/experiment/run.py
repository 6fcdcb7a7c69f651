"""A run and its baselines, in one result folder that can be resumed."""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from coterie.errors import UsageError, cleaned
from coterie.experiment.build import Network, Parts, assemble, make_problem
from coterie.experiment.config import OWN_DATA, Config, RunTable, load
from coterie.experiment.config import recorded_tables as recorded_tables
from coterie.experiment.loggers import with_logs
from coterie.experiment.loop import Interrupted, Observer, check_stop, is_spent, run_rounds
from coterie.experiment.records import at_work_in, check, empty
from coterie.plugins import label
from coterie.problems.base import Problem
from coterie.storage import make_folder, sweep, write_atomically, write_json

Build = Callable[[Config], Parts]
"""What makes the live objects of a configuration; runs of one experiment share its problem."""


class Watch(Protocol):
    """Gives each run of an experiment its observer."""

    def __call__(self, name: str, is_baseline: bool) -> Observer | None:
        """The observer of one run."""


def run(
    config: Config,
    folder: Path,
    watch: Watch,
    *,
    force: bool = False,
    network: Network | None = None,
    patience: float = 0.0,
) -> dict[str, Any]:
    """Run the method, then its baselines in sub-folders; the summary compares them.

    network makes the transport of an engine other than the local one. patience is for how many seconds to wait for
    another process to leave the folder.
    """
    check(folder, force=force)
    parts = assemble(config, network)  # whatever is wrong with the settings shows before anything is overwritten
    check_stop(parts)
    observer = with_logs(config.run.log, folder, watch(label(config.run.method), False))
    with at_work_in(folder, patience=patience):
        empty(folder, force=force)
        write_atomically(folder / "config.toml", parts.config.as_record().encode())
        summary = _summary_of(parts, folder, observer)
        return _with_baselines(parts.config, summary, folder, watch, _on(lambda: parts.problem, network))


def resume(folder: Path, watch: Watch, *, network: Network | None = None, patience: float = 0.0) -> dict[str, Any]:
    """Resume a run where it was interrupted; one that is finished is read, not run again.

    patience is for how many seconds to wait for another process to leave the folder.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}.")
    if not (folder / "config.toml").is_file():
        if any(True for pattern in ("*/", "*/*/", "*/*/*/") for _ in folder.glob(f"{pattern}config.toml")):
            raise UsageError(
                f"{folder} holds the folders of several runs. Name one of them, or repeat the command that made them, "
                f"such as `coterie reproduce` or `coterie leaderboard`, with --out {folder}."
            )
        raise UsageError(
            f"{folder} is no result folder: it has no config.toml. Start one with `coterie run --out DIR`."
        )
    refuse_own(folder)
    with at_work_in(folder, patience=patience):
        config = load(folder / "config.toml")
        build = _on(cache(partial(make_problem, config)), network)
        summary = _run_or_read(config, folder, watch(label(config.run.method), False), folder, build)
        return _with_baselines(config, summary, folder, watch, build)


def _on(problem: Callable[[], Problem], network: Network | None) -> Build:
    """What assembles runs on one problem, which is built when the first of them is."""
    return lambda config: assemble(config, network, problem())


def refuse_own(folder: Path) -> None:
    """Refuse to resume a run of Python objects from the command line, and say who can."""
    run = recorded_tables(folder / "config.toml").get("run", {})
    if run.get("problem") == OWN_DATA and run.get("engine", "local") == "local":
        raise UsageError(
            f"{folder} was made by coterie.fit from Python objects, which no file holds. Resume it from Python: call "
            f"coterie.fit again with the same problem, method and settings, and out={str(folder)!r}."
        )


def _with_baselines(
    config: Config, summary: dict[str, Any], folder: Path, watch: Watch, build: Build
) -> dict[str, Any]:
    """Run the baselines, or what is left of them, on the same problem, and put them into the summary."""
    if summary["outcome"] != "finished":
        return summary
    baselines: dict[str, Any] = {}
    for name in config.run.baselines or []:
        shown = label(name)
        subfolder = folder / "baselines" / shown
        make_folder(subfolder)
        baseline = _run_or_read(config.for_baseline(name), subfolder, watch(shown, True), folder, build)
        if baseline["outcome"] == "stopped":
            return {**summary, "outcome": "stopped", "message": baseline["message"]}
        baselines[shown] = {k: baseline[k] for k in ("outcome", "final", "communication", "seconds")}
    if baselines != summary.get("baselines", {}):
        summary = {**summary, "baselines": baselines}
        write_json(folder / "summary.json", summary)
    return summary


def _run_or_read(config: Config, folder: Path, observer: Observer | None, home: Path, build: Build) -> dict[str, Any]:
    """One run, begun or not; a finished one is read, not run again. `home` is the folder that the user resumes."""
    known = finished(folder, config.run)
    if known is not None:
        return known
    sweep(folder)
    sweep(folder / "checkpoint")
    parts = build(config)
    begun = (folder / "config.toml").is_file()
    if not begun:
        write_atomically(folder / "config.toml", parts.config.as_record().encode())
    observer = with_logs(config.run.log, folder, observer)
    return _summary_of(parts, folder, observer, resume=begun, home=home)


def _summary_of(parts: Parts, folder: Path, observer: Observer | None, **more: Any) -> dict[str, Any]:
    """The summary of the rounds, also of rounds that were stopped: its outcome says so."""
    try:
        return run_rounds(parts, folder, observer, **more).summary
    except Interrupted as stop:
        return stop.result.summary


def finished(folder: Path, run: RunTable, *, or_diverged: bool = False) -> dict[str, Any] | None:
    """The summary of a run that has done all its rounds, or used up its budget; where wanted, of one that diverged."""
    path = folder / "summary.json"
    if not path.is_file():
        return None
    try:
        summary: dict[str, Any] = cleaned(json.loads(path.read_text(encoding="utf-8")))
        done = summary["rounds"] >= run.rounds or is_spent(run, summary["communication"])
        done = done or (run.stop is not None and bool(summary.get("stopped")))
        outcome = summary["outcome"]
        return summary if (outcome == "finished" and done) or (or_diverged and outcome == "diverged") else None
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged ({error}); delete it and resume again.") from None
