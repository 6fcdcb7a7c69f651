"""SIGKILL at random moments, and at every step of writing files; the resumed results are those of one whole run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from folders import assert_same_results, lines, summary_of

from coterie.cli import main

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills are made with fork")

ROUNDS = 40
RUN = [
    *("--problem", "quadratic", "--method", "meritfed", "--rounds", str(ROUNDS)),
    *("--set", 'run.baselines=["fedavg", "local-train"]', "--set", "run.record=3"),
    *("--set", "run.checkpoint=1"),
    *("--set", "federation.active=0.6", "--set", "federation.norm=2.5", "--set", "federation.mode=vmap"),
    *("--set", "method.batch=5", "--set", "method.mirror_steps=3"),
]
SHORT = [*RUN, "--set", "run.baselines=[]", "--rounds", "2"]


KILLED_AT = """
import os
import signal
import sys


def watch(event, values):
    if event == "os.rename" and os.path.basename(os.fspath(values[1])).startswith("00000007"):
        os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(watch)
"""
"""What Python imports first in a process that is killed while it writes the checkpoint of round 7."""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def killer(*arguments: Any) -> dict[str, Any]:
    script = Path(__file__).with_name("killer.py")
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def coterie(*arguments: Any, **more: str) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "coterie", *map(str, arguments)]
    return subprocess.run(command, env=environment(**more), capture_output=True, timeout=300, check=False)


def errors_beside(folder: Path) -> str:
    path = Path(f"{folder}.err")
    return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run, by the command line in this process."""
    folder = tmp_path_factory.mktemp("kill") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["coterie", "run", "--out", str(folder), *RUN])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return folder


@pytest.mark.parametrize("kills", [pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path: Path, whole: Path, kills: int) -> None:
    folder = tmp_path / "killed"
    report = killer("random", kills, 2, 3 * ROUNDS, folder, "--", *RUN)
    assert report["code"] == 0, errors_beside(folder)
    assert report["kills"] == kills, report
    assert errors_beside(folder) == ""
    assert len({*report["rounds"]}) > kills // 2, "the kills were all in one round"
    assert_same_results(whole, folder)
    resumed = [e for path in folder.rglob("events.jsonl") for e in lines(path) if e["event"] == "resumed"]
    assert kills // 2 < len(resumed) <= kills
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_step_of_writing(tmp_path: Path, stride: int) -> None:
    """Before and after each fsync, rename, removal and new file of a short run; by default at every 23rd of them."""
    report = killer("points", stride, tmp_path, "--", *SHORT)
    assert report["code"] == 0
    whole = Path(report["whole"])
    assert summary_of(whole)["outcome"] == "finished"
    assert len(report["deaths"]) >= 60 // stride
    assert any(death["left"] for death in report["deaths"]), "no kill fell into a write"
    for death in report["deaths"]:
        folder = Path(death["folder"])
        assert death["code"] == 0, (death, errors_beside(folder))
        assert_same_results(whole, folder)
        assert not list(folder.rglob("*.tmp")), death


def test_the_real_command_killed_once(tmp_path: Path, whole: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(KILLED_AT)
    folder = tmp_path / "killed"
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = coterie("run", "--out", folder, *RUN, PYTHONPATH=path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (folder / "summary.json").exists()
    done = coterie("resume", folder)
    assert done.returncode == 0, done.stderr
    assert_same_results(whole, folder)
