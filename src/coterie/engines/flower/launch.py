"""`coterie run --engine flower`: a deployment on this machine for trying things out, or a run on an existing one.

The server's app writes the result folder; this process only starts things, tells how far they are, and ends them.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli_w

from coterie.engines.flower.deployment import NAME, Deployment
from coterie.engines.follow import LOOK, answered, interruptible, speaker, tell
from coterie.engines.lifetime import notice
from coterie.errors import RunError, UsageError
from coterie.experiment.build import assemble, build_problem_and_method
from coterie.experiment.config import Config
from coterie.experiment.records import check
from coterie.experiment.run import Watch
from coterie.numerics import Draw

APP = "coterie_run"
SIMULATED = "Flower's simulation runtime: clients are called in processes of Ray, which take some seconds to start."
SILENT = 4  # questions without an answer after which a SuperLink is taken to be gone
OVER = ("finished", "stopped", "failed")


def launch(
    config: Config, folder: Path, watch: Watch, *, force: bool, resume: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Run or resume a configuration on Flower; the summary."""
    if not resume:
        check(folder, force=force)
    problem, _ = build_problem_and_method(config)
    say = speaker(options)
    superlink, simulated = options.get("superlink"), config.engine.simulation
    _check_simulation(superlink, simulated)
    if left := notice():
        say(left)
    say(SIMULATED if simulated else cost_text(config, problem.clients))
    with interruptible(), Deployment() as flower:
        if superlink is not None:
            _borrow_configuration(flower)
        else:
            flower.superlink(*(["--simulation"] if simulated else []))
            for k in range(0 if simulated else problem.clients):
                flower.supernode(k, problem.clients)
        answer = flower.folder / "answer.json"
        app = write_app(
            flower.folder / "app",
            config=config.as_toml(),
            folder=str(folder.resolve()),
            memory=str(folder.resolve() / "clients") if superlink is None else "",
            answer=str(answer),
            nodes="",
            force=force,
            resume=resume,
        )
        run = flower.submit(app, superlink or NAME, nodes=problem.clients if simulated else None)
        say(f"run {run} has started; results go to {folder}")
        return _followed(flower, run, superlink, folder, answer, say)


def _check_simulation(superlink: str | None, simulated: bool) -> None:
    if simulated and superlink is not None:
        raise UsageError("engine.simulation starts a SuperLink of its own; leave out --superlink, or the simulation.")
    if simulated and find_spec("ray") is None:
        raise UsageError("engine.simulation needs Ray; install it with: pip install 'coterie[flower-simulation]'.")


def write_app(place: Path, **settings: Any) -> Path:
    """The Flower app of one run: two lines of code and its settings."""
    (place / APP).mkdir(parents=True)
    (place / APP / "__init__.py").write_text("")
    for side in ("server", "client"):
        (place / APP / f"{side}.py").write_text(
            f"from coterie.engines.flower.tryout import {side} as app\n\n__all__ = ['app']\n"
        )
    about = {
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
    (place / "pyproject.toml").write_text(tomli_w.dumps(about), encoding="utf-8")
    return place


def exchanges_of(config: Config) -> int:
    """How often a round asks the clients, counted on one round in this process."""
    parts = assemble(config.with_run(engine="local", baselines=[]))
    draw = Draw.of(config.run.seed, device=parts.fed.sizes.device).round(0)
    parts.method.round(parts.fed.begin(1, draw), parts.method.init(parts.problem, parts.fed.n), draw)
    return parts.fed.ledger.total.rounds


def seconds_of(clients: int, cores: int | None = None) -> float:
    """What an exchange takes on one machine: Flower starts a process a client, and looks for work once a second."""
    return 2.0 + 1.2 * clients / (cores or os.cpu_count() or 1)


def cost_text(config: Config, clients: int) -> str:
    """What a run will take, and what would lower it."""
    asked = config.federation.count or max(1, round(config.federation.active * clients))
    each, once = exchanges_of(config), seconds_of(asked)
    total = config.run.rounds * each * once
    lower = [f"federation.count={max(1, asked // 3)} (clients a round, now {asked})"] if asked > 3 else []
    for key in ("local_steps", "period", "inner_steps", "outer_steps"):
        if isinstance(value := config.method.get(key), int) and not isinstance(value, bool):
            lower.append(f"method.{key}={max(2, 4 * value)} (steps between exchanges, now {value})")
    lower.append(f"run.rounds (now {config.run.rounds})")
    return (
        f"Flower starts a process at every client for every exchange. {config.run.method}: {config.run.rounds} rounds "
        f"× {each} exchanges × about {once:.0f} s = {_time(total)} on this machine. "
        f"Lower it with --set: {'; '.join(lower)}."
    )


def _time(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _followed(
    flower: Deployment, run: str, superlink: str | None, folder: Path, answer: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Tell how far a run is until it is over."""
    told, looked, silent = 0, time.monotonic(), 0
    again = f"Go on with: coterie resume {folder}"
    while not answer.exists():
        time.sleep(LOOK)
        told = tell(folder / "metrics.jsonl", told, say)
        if "superlink" in flower.ended():
            raise RunError(f"Flower's SuperLink has ended. What was saved is intact. {again}")
        if time.monotonic() - looked > 15.0:
            looked = time.monotonic()
            try:
                status, silent = flower.status(run, superlink or NAME), 0
            except RunError as error:  # one that is ours and dead is noticed above; another one may come back
                silent += 1
                if silent == SILENT:
                    raise RunError(f"{error} What was saved is intact. {again}") from None
                continue
            if status.split(":")[0] in OVER and not answer.exists():
                if superlink is not None and (folder / "summary.json").is_file():
                    break
                if superlink is not None and status == "finished:completed":
                    raise RunError(
                        f"the run is finished; its result is where the SuperLink runs, in {folder.resolve()}."
                    )
                raise RunError(f"the run ended without a result ({status}). What was saved is intact. {again}")
    if not answer.exists():
        found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return found
    tell(folder / "metrics.jsonl", told, say)
    return answered(answer)


def _borrow_configuration(flower: Deployment) -> None:
    """Let Flower's commands see the user's own configuration, which names the SuperLink."""
    home = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"))
    if (home / "config.toml").is_file():
        shutil.copy(home / "config.toml", flower.folder / "flwr" / "config.toml")
