"""A study on a real network, on loopback: each side is a process with a folder of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hospitals import hospitals, private_values, rows, write
from safetensors.torch import load_file

pytest.importorskip("nvflare", reason="the extra coterie[nvflare] is not installed")

from coterie.engines.lifetime import Lifetime, free_ports
from coterie.experiment.config import load
from coterie.experiment.run import run
from coterie.study.advice import advise_trial

PATIENCE = 1800.0
TIMES = re.compile(rb"\d\d:\d\d:\d\d[.,]\d+")  # of logs: seconds can look like an age
SAME = ("federation.clip=none", "federation.mode=sequential", "federation.chunk=1", "run.threads=1", "run.baselines=[]")
pytestmark = [pytest.mark.nvflare, pytest.mark.slow]


class Cast:
    """The coordinator and the partners of a test, as processes that end with it."""

    def __init__(self, folder: Path, life: Lifetime) -> None:
        self.folder, self.life = folder, life
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, who: str) -> dict[str, str]:
        return {**os.environ, **self.life.environment, "XDG_STATE_HOME": str(self.folder / f"state-{who}")}

    def start(self, who: str, *words: str) -> None:
        with (self.folder / f"{who}.out").open("ab") as output:
            self.processes[who] = subprocess.Popen(
                [sys.executable, "-m", "coterie", *words],
                cwd=self.folder,
                env=self.environment(who),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def do(self, who: str, *words: str, code: int | None = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "coterie", *words],
            cwd=self.folder,
            env=self.environment(who),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def join(self, site: str) -> None:
        self.start(
            site, "site", "join", "--invitation", f"study/invitations/{site}.invite", "--data", f"sites/{site}.csv"
        )

    def home(self, site: str) -> Path:
        return self.folder / f"state-{site}" / "coterie" / "sites" / f"study-{site}"

    def connected(self) -> int:
        text = self.do("coordinator", "study", "status", "study", "--json", code=None)
        try:
            return sum(row["connected"] for row in json.loads(text[text.index("[") :]))
        except ValueError:
            return 0

    def memories(self, who: str) -> Iterator[tuple[str, bytes]]:
        """What the processes that somebody has started hold in memory now."""
        mark = f"XDG_STATE_HOME={self.folder / f'state-{who}'}\0".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    yield (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(), _memory(folder)

    def stop(self, who: str, number: signal.Signals = signal.SIGTERM) -> None:
        process = self.processes.pop(who)
        process.send_signal(number)
        process.wait(60)


def _memory(folder: Path) -> bytes:
    found = bytearray()
    with (folder / "mem").open("rb", buffering=0) as memory:
        for line in (folder / "maps").read_text().splitlines():
            place, rights = line.split()[:2]
            begin, end = (int(number, 16) for number in place.split("-"))
            if rights.startswith("rw") and end < 1 << 63:
                with suppress(OSError, ValueError):
                    memory.seek(begin)
                    found += memory.read(end - begin)
    return bytes(found)


def until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(1.0)


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    with Lifetime("study") as life:
        found = Cast(tmp_path, life)
        yield found
        for who in list(found.processes):
            found.stop(who)


def test_the_story(cast: Cast, tmp_path: Path) -> None:
    mine, files = hospitals(tmp_path)
    port = str(free_ports(1)[0])
    partners = ("--partners", ",".join(files), "--port", port)
    cast.do("coordinator", "study", "new", "study", "--label", "sick", "--data", "mine.csv", *partners)
    crooked = write(tmp_path / "crooked.csv", rows(4, 60), lambda r: {**r, "dose": r["dose"] * 1000})
    said = cast.do("east", "site", "check", str(crooked), "--invitation", "study/invitations/east.invite", code=1)
    assert "1,000 times larger" in said
    assert "What never leaves it" in said
    cast.start("server", "study", "serve", "study")
    for site in files:
        cast.join(site)
    until(lambda: cast.connected() == len(files))
    sets = [word for setting in SAME for word in ("--set", setting)]
    cast.do("coordinator", "run", "--study", "study", "--rounds", "2", "--out", "out", "--share", *sets)
    flags: dict[str, Any] = {"run.problem": "files", "run.rounds": 2, "problem.label": "sick"}
    flags |= {"problem.clients": str(tmp_path / "sites" / "*.csv"), "problem.target": str(mine), "run.baselines": []}
    flags |= {"federation.clip": "none", "federation.mode": "sequential", "federation.chunk": 1, "run.threads": 1}
    run(load(None, {}, flags), tmp_path / "here", lambda name, is_baseline: None)
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "here")]
    assert all(bool(((models[0][key] - models[1][key]).abs() <= 1e-5).all()) for key in models[0])
    assert "files/column-moments" in cast.do("east", "site", "log", "--home", str(cast.home("east")), "--json")
    assert "coterie predict" in cast.do("east", "site", "receive", "--home", str(cast.home("east")))
    cast.do("coordinator", "advise", "--study", "study", "--out", "advice")
    live = json.loads((tmp_path / "advice" / "advice.json").read_text())
    flags = {"run.problem": "study", "run.engine": "embedded", "problem.folder": str(tmp_path / "study")}
    flags["problem.sites"] = str(tmp_path / "sites" / "*.csv")
    tried = advise_trial(load(None, {}, flags), tmp_path / "trial")
    for theirs, ours in zip(live["partners"], tried["partners"], strict=True):
        assert theirs["verdict"] == ours["verdict"]
        assert theirs["gain"] == pytest.approx(ours["gain"], abs=1e-5)
    cast.do("coordinator", "doctor", "study")
    cast.do("east", "doctor", str(cast.home("east")))
    values = private_values(tmp_path)
    kept = [path for name in ("study", "out", "advice") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert any(path.name == "server.log" for path in kept)
    for path in [*kept, tmp_path / "server.out"]:
        content = TIMES.sub(b"", path.read_bytes())
        assert not [value for value in values if value in content], path
    doubles = {value for value in values if len(value) == 8}  # other forms are in any memory by chance
    for command, memory in cast.memories("server"):
        found = [
            value for value in doubles if value in memory
        ]  # of numbers with four digits, a few are there by chance
        assert len(found) <= len(doubles) // 25, command


def test_a_killed_site_and_a_killed_server_come_back(cast: Cast, tmp_path: Path) -> None:
    _, files = hospitals(tmp_path)
    port = str(free_ports(1)[0])
    partners = ("--partners", ",".join(files), "--port", port)
    cast.do("coordinator", "study", "new", "study", "--label", "sick", "--data", "mine.csv", *partners)
    cast.start("server", "study", "serve", "study")
    for site in files:
        cast.join(site)
    until(lambda: cast.connected() == len(files))
    patient = ("--set", "federation.timeout=5.0", "--set", "federation.patience=60.0", "--set", "run.baselines=[]")
    cast.start("run", "run", "--study", "study", "--rounds", "20000", "--out", "out", *patient)
    recorded = tmp_path / "out" / "metrics.jsonl"
    until(lambda: recorded.is_file() and len(recorded.read_text().splitlines()) > 5)
    cast.stop("north", signal.SIGKILL)
    events = tmp_path / "out" / "events.jsonl"
    until(lambda: events.is_file() and '"client": 1' in events.read_text())
    cast.join("north")
    cast.stop("server", signal.SIGKILL)
    cast.stop("run", signal.SIGKILL)
    until(lambda: not list(cast.memories("server")))
    done = len(recorded.read_text().splitlines())
    text = (tmp_path / "out" / "config.toml").read_text()
    (tmp_path / "out" / "config.toml").write_text(text.replace("rounds = 20000", f"rounds = {done + 5}"))
    cast.start("server", "study", "serve", "study")
    until(lambda: cast.connected() == len(files))
    cast.do("coordinator", "resume", "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    assert summary["rounds"] == done + 5
