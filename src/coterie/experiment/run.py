"""A run and its baselines, in one result folder that can be resumed."""

import json
from pathlib import Path
from typing import Any, Protocol

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import Config, load
from coterie.experiment.files import write_atomically, write_json
from coterie.experiment.loop import Observer, Result, run_rounds
from coterie.experiment.records import prepare


class Watch(Protocol):
    """Gives each run of an experiment its observer."""

    def __call__(self, name: str, is_baseline: bool) -> Observer | None:
        """The observer of one run."""


def run(config: Config, folder: Path, watch: Watch, *, force: bool = False) -> dict[str, Any]:
    """Run the method, then its baselines in sub-folders; the summary compares them."""
    prepare(folder, force=force)
    return _all(config, folder, watch, fresh=True)


def resume(folder: Path, watch: Watch) -> dict[str, Any]:
    """Go on where a run was interrupted."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}.")
    if not (folder / "config.toml").is_file():
        raise UsageError(
            f"{folder} is no result folder: it has no config.toml. Start one with `coterie run --out DIR`."
        )
    return _all(load(folder / "config.toml"), folder, watch, fresh=False)


def _all(config: Config, folder: Path, watch: Watch, *, fresh: bool) -> dict[str, Any]:
    summary = _one(config, folder, watch(config.run.method, False), fresh=fresh)
    if summary["outcome"] != "finished":
        return summary
    baselines: dict[str, Any] = {}
    for name in config.run.baselines or []:
        place = folder / "baselines" / name
        started = place.is_dir() and (place / "config.toml").is_file()
        place.mkdir(parents=True, exist_ok=True)
        found = load(folder / "config.toml").for_baseline(name)
        one = _one(found, place, watch(name, True), fresh=not started)
        if one["outcome"] == "stopped":
            return {**summary, "outcome": "stopped", "message": f"go on with: coterie resume {folder}"}
        baselines[name] = {k: one[k] for k in ("outcome", "final", "communication", "seconds")}
    if baselines:
        summary = {**summary, "baselines": baselines}
        write_json(folder / "summary.json", summary)
    return summary


def _one(config: Config, folder: Path, observer: Observer | None, *, fresh: bool) -> dict[str, Any]:
    """One run; finished ones are read, not run again."""
    if not fresh:
        finished = _finished(folder)
        if finished is not None:
            return finished
    parts = assemble(config)
    if fresh:
        write_atomically(folder / "config.toml", parts.config.as_toml().encode())
    result: Result = run_rounds(parts, folder, observer, resume=not fresh)
    return result.summary


def _finished(folder: Path) -> dict[str, Any] | None:
    path = folder / "summary.json"
    if not path.is_file():
        return None
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
        return summary if summary["outcome"] == "finished" else None
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is damaged ({error}); delete it and resume again.") from None
