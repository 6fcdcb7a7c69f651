"""`coterie run --engine flower` ends whatever it started, however it is ended itself."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest

pytest.importorskip("flwr", reason="the extra coterie[flower] is not installed")

from federations import rounds, until

from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds

pytestmark = [pytest.mark.flower, pytest.mark.slow]
COMMAND = ["run", "--engine", "flower", "--problem", "quadratic", "--rounds", "50", "--set", "problem.clients=2"]


def marked(mark: str) -> set[str]:
    """The programs of processes that have inherited a mark, but for those that have ended."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "environ").read_bytes():
                found.add((place / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it ended meanwhile
    return {program for program in found if program}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_nothing_is_left(how: signal.Signals, tmp_path: Path) -> None:
    mark = f"COTERIE_TEST_MARK={uuid4()}"
    temporary = Path(tempfile.mkdtemp(prefix="t"))  # a short name: sockets are below it
    environment = {**os.environ, "COTERIE_TEST_MARK": mark.partition("=")[2], "TMPDIR": str(temporary)}
    environment["XDG_RUNTIME_DIR"] = str(temporary)
    command = [sys.executable, "-m", "coterie", *COMMAND, "--set", "problem.friends=1", "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        until(lambda: sum("supernode" in program for program in marked(mark)) >= 2)
        process.send_signal(how)
        said = process.communicate()[1].decode()
    assert process.returncode != 0
    assert how is signal.SIGKILL or "resume" in said
    until(lambda: not marked(mark))
    own = temporary / f"coterie-{os.getuid()}"
    until(lambda: list(temporary.glob("coterie-*")) == [own] and not list(own.glob("deployments/*")))
    shutil.rmtree(temporary)


def killed(mark: str, program: str) -> bool:
    """Kill the process of that program that has inherited a mark, if there is one."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (
                mark.encode() in (place / "environ").read_bytes()
                and program.encode() in (place / "cmdline").read_bytes()
            ):
                os.kill(int(place.name), signal.SIGKILL)
                return True
        except OSError:
            continue
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_superlink_is_killed_and_the_run_is_resumed(tmp_path: Path) -> None:
    mark = f"COTERIE_TEST_MARK={uuid4()}"
    environment = {**os.environ, "COTERIE_TEST_MARK": mark.partition("=")[2]}
    start = [sys.executable, "-m", "coterie"]
    settings = ["--set", "problem.friends=1", "--set", "federation.patience=300.0", "--set", "federation.timeout=300.0"]
    command = [*start, *COMMAND, *settings, "--rounds", "3", "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        until(lambda: rounds(tmp_path / "out") >= 1 or process.poll() is not None)
        assert killed(mark, "flower-superlink")
        said = process.communicate()[1].decode()
    assert process.returncode == 1
    assert "coterie resume" in said
    until(lambda: not marked(mark))
    subprocess.run([*start, "resume", str(tmp_path / "out")], check=True)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["outcome"], summary["rounds"]) == ("finished", 3)
    flags = {"run.problem": "quadratic", "run.rounds": 3, "run.threads": 1, "run.baselines": []}
    sizes = {"problem.clients": 2, "problem.friends": 1, "federation.mode": "sequential"}
    local = run_rounds(assemble(load(flags={**flags, **sizes})), None)
    assert summary["weights"] == pytest.approx(local.view.weights.tolist(), abs=1e-5)
