"""`coterie run --engine flower`: a deployment on this machine for trying things out, or a run on an existing one.

The server's app writes the result folder; this process starts things, reports the rounds, and ends everything.
"""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli_w

from coterie import machine
from coterie.engines.estimate import exchanges_of, time_text
from coterie.engines.flower.deployment import NAME, Deployment
from coterie.engines.follow import Log, follow, how_to_resume, interruptible, read_result, stderr_logger
from coterie.engines.lifetime import end_left_over
from coterie.errors import RunError, UsageError
from coterie.experiment.build import build_problem_and_method
from coterie.experiment.config import Config
from coterie.experiment.records import check
from coterie.experiment.rehearsal import announced
from coterie.experiment.run import Watch
from coterie.plugins import label

APP = "coterie_run"
SIMULATED = "Flower's simulation runtime: clients are called in processes of Ray, which take some seconds to start."


def launch(
    config: Config, folder: Path, watch: Watch, *, force: bool, resume: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Run or resume a configuration on Flower; the summary.

    Args:
        config: the resolved configuration.
        folder: the result folder.
        watch: not used: rounds are read from the result folder.
        force: whether results in the folder may be replaced.
        resume: whether the run in the folder is resumed.
        options: `superlink` (the name of an existing one in Flower's configuration) and `json` of the command line.
    """
    if not resume:
        check(folder, force=force)
    problem, method = build_problem_and_method(config)
    log = stderr_logger(options)
    superlink, simulated = options.get("superlink"), config.engine.simulation
    _check_simulation(superlink, simulated)
    for line in announced(config, problem, method):
        log(line)
    if left := end_left_over():
        log(left)
    log(SIMULATED if simulated else cost_text(config, problem.clients))
    with interruptible(), Deployment() as flower:
        if superlink is not None:
            _borrow_configuration(flower)
        else:
            flower.superlink(*(["--simulation"] if simulated else []))
            for k in range(0 if simulated else problem.clients):
                flower.supernode(k, problem.clients)
        result = flower.folder / "answer.json"
        memory = str(folder.resolve() / "clients") if superlink is None else ""
        paths: dict[str, Any] = {"folder": str(folder.resolve()), "memory": memory, "answer": str(result)}
        run_settings: dict[str, Any] = {"config": config.as_toml(), "nodes": "", "force": force, "resume": resume}
        app = write_app(flower.folder / "app", **paths, **run_settings)
        run = flower.submit(app, superlink or NAME, nodes=problem.clients if simulated else None)
        log(f"run {run} has started; results go to {folder}")
        return _followed(flower, run, superlink, folder, result, log)


def _check_simulation(superlink: str | None, simulated: bool) -> None:
    if simulated and superlink is not None:
        raise UsageError("engine.simulation starts a SuperLink of its own; leave out --superlink, or the simulation.")
    if simulated and find_spec("ray") is None:
        raise UsageError("engine.simulation needs Ray; install it with: pip install 'coterie[flower-simulation]'.")


def write_app(path: Path, **settings: Any) -> Path:
    """Write the Flower app of one run: two lines of code, which name the two sides in `tryout`, and its settings; its
    folder."""
    (path / APP).mkdir(parents=True)
    (path / APP / "__init__.py").write_text("")
    for side in ("server", "client"):
        (path / APP / f"{side}.py").write_text(
            f"from coterie.engines.flower.tryout import {side} as app\n\n__all__ = ['app']\n"
        )
    project = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {"name": "coterie-run", "version": "1.0.0", "license": "Apache-2.0", "dependencies": []},
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
            "flwr": {
                "app": {
                    "publisher": "coterie",
                    "components": {"serverapp": f"{APP}.server:app", "clientapp": f"{APP}.client:app"},
                    "config": settings,
                }
            },
        },
    }
    (path / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")
    return path


def seconds_of(clients: int, cores: int | None = None) -> float:
    """Seconds per exchange on one machine: Flower starts one process per client, and looks for work once a second."""
    return 2.0 + 1.2 * clients / (cores or machine.cores())


def cost_text(config: Config, clients: int) -> str:
    """How long a run will take, and the settings that lower it."""
    asked = config.federation.count or max(1, round(config.federation.active * clients))
    each, once = exchanges_of(config), seconds_of(asked)
    total = config.run.rounds * each * once
    lower = [f"federation.count={max(1, asked // 3)} (clients per round, now {asked})"] if asked > 3 else []
    for key in ("local_steps", "period", "inner_steps", "outer_steps"):
        if isinstance(value := config.method.get(key), int) and not isinstance(value, bool):
            lower.append(f"method.{key}={max(2, 4 * value)} (steps between exchanges, now {value})")
    lower.append(f"run.rounds (now {config.run.rounds})")
    return (
        f"Flower starts a process at every client for every exchange. {label(config.run.method)}: "
        f"{config.run.rounds} rounds × {each} exchanges × about {once:.0f} s = {time_text(total)} on this machine. "
        f"Lower it with --set: {'; '.join(lower)}."
    )


def _followed(
    flower: Deployment, run: str, superlink: str | None, folder: Path, result: Path, log: Log
) -> dict[str, Any]:
    """The summary of a run, at its end."""

    def check() -> None:
        if "superlink" in flower.ended():
            raise RunError(f"Flower's SuperLink has ended. {how_to_resume(folder)}")

    status = follow(folder, result, log, lambda: flower.status(run, superlink or NAME), check)
    if status is None:
        return read_result(result)
    summary = folder / "summary.json"
    if superlink is not None and summary.is_file():  # another SuperLink, on this machine
        found: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
        return found
    if superlink is not None and status == "finished:completed":
        raise RunError(f"the run is finished; its result is where the SuperLink runs, in {folder.resolve()}.")
    raise RunError(f"the run ended without a result ({status}). {how_to_resume(folder)}")


def _borrow_configuration(flower: Deployment) -> None:
    """Let Flower's commands see the user's own configuration, which names the SuperLink."""
    home = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"))
    if (home / "config.toml").is_file():
        shutil.copy(home / "config.toml", flower.folder / "flwr" / "config.toml")
