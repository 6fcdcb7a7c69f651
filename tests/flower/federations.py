"""Runs on Flower's own processes, as `coterie run --engine flower` makes them, and what they are compared with."""

import json
import time
from pathlib import Path
from typing import Any

from coterie.engines.flower.deployment import Deployment
from coterie.engines.flower.launch import APP, write_app
from coterie.experiment.config import Config

PATIENCE = 3600.0  # processes are slow to start on a busy machine; nothing is measured here


def begin(
    flower: Deployment,
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    nodes: dict[str, int] | None = None,
    client: str | None = None,
) -> Path:
    """Start a run, if wanted with other code at the clients; the file that its answer will be in."""
    place = flower.folder / f"app-{time.monotonic_ns()}"
    answer = place / "answer.json"
    write_app(
        place,
        config=config.as_toml(),
        folder=str(folder),
        memory=str(folder.parent / "clients"),
        answer=str(answer),
        nodes=json.dumps(nodes) if nodes else "",
        force=False,
        resume=resume,
    )
    if client is not None:
        (place / APP / "client.py").write_text(client)
    flower.submit(place)
    return answer


def until(what: Any, flower: Deployment | None = None) -> Any:
    """Wait for something to become true; what is waited for is named by its own failure."""
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < deadline, "" if flower is None else flower.log("superlink")[-3000:]
        time.sleep(0.2)
    return found


def end(flower: Deployment, answer: Path) -> dict[str, Any]:
    """The answer of a run."""
    until(answer.exists, flower)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def rounds(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) - 1 if path.is_file() else 0
