"""examples/coterie-soba as a separate package: run, compared, killed, resumed, reported, on Ray and on Flower."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import coterie

PACKAGE = Path(__file__).resolve().parent.parent / "examples" / "coterie-soba"
STEPS = ("--set", "method.step=0.2", "--set", "method.outer_step=0.1", "--set", "federation.mode=vmap")
RUN = ("run", "--method", "minisoba", "--problem", "nested-quadratic", *STEPS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip makes of the package, in a folder of its own; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("outside")
    shutil.copytree(PACKAGE, folder / "source")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(folder / "site"))
    command = [sys.executable, "-m", "pip", "install", *options, str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def environment(site: Path) -> dict[str, str]:
    paths = [str(Path(coterie.__file__).parent.parent), str(site)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def command(site: Path, folder: Path, *arguments: object) -> str:
    """The output of a command of coterie, in a process that finds the package."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "coterie", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(site),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_it_is_listed_run_killed_resumed_compared_and_reported(site: Path, tmp_path: Path) -> None:
    assert "coterie-soba 0.1.0" in command(site, tmp_path, "list", "methods", "minisoba")
    command(site, tmp_path, *RUN, "--rounds", 300, "--out", "whole")
    words = [sys.executable, "-P", "-m", "coterie", *RUN, "--rounds", "300", "--out", "broken"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, cwd=tmp_path, env=environment(site), **silent) as process:
        metrics = tmp_path / "broken" / "metrics.jsonl"
        while process.poll() is None and not (metrics.is_file() and metrics.read_bytes().count(b"\n") > 40):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "broken" / "summary.json").exists()
    command(site, tmp_path, "resume", "broken")  # the package is installed: no further word is needed
    for name in ("model.safetensors", "weights.csv", "ledger.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes(), name
    compared = ("--methods", "minisoba,fednest", "--problem", "nested-quadratic", "--seeds", "0,1,2", "--rounds", 60)
    own = ("--set", "minisoba.step=0.2", "--set", "minisoba.outer_step=0.1")
    table = command(site, tmp_path, "compare", *compared, *own, "--out", "compared")
    assert "minisoba" in table
    assert "fednest" in table
    command(site, tmp_path, "report", "whole")
    assert "minisoba" in (tmp_path / "whole" / "report.html").read_text(encoding="utf-8")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(PACKAGE / "tests")]
    done = subprocess.run(tests, capture_output=True, text=True, cwd=tmp_path, env=environment(site), timeout=600)
    assert done.returncode == 0, done.stdout


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'coterie[ray]'")
def test_it_runs_on_ray_with_the_bits_of_the_local_engine(site: Path, tmp_path: Path) -> None:
    small = (
        "--set",
        "problem.clients=4",
        "--rounds",
        3,
        "--set",
        "federation.clip=none",
        "--set",
        "federation.chunk=2",
    )
    command(site, tmp_path, *RUN, *small, "--out", "here")
    command(site, tmp_path, *RUN, *small, "--engine", "ray", "--set", "engine.workers=2", "--out", "ray")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("here", "ray"))
    assert one == two


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed: pip install 'coterie[flower]'")
def test_its_file_alone_runs_on_flower(tmp_path: Path) -> None:
    """Not installed: every node imports the file, because the command that started the nodes has admitted it."""
    shutil.copy(PACKAGE / "coterie_soba.py", tmp_path / "mine.py")
    small = ("--problem", "nested-quadratic", "--set", "problem.clients=2", "--rounds", 2, "--engine", "flower")
    patient = ("--set", "federation.timeout=300", "--set", "federation.patience=500")
    command(tmp_path / "nothing", tmp_path, "run", "--method", "mine.py:minisoba", *small, *patient, "--out", "flower")
    summary = json.loads((tmp_path / "flower" / "summary.json").read_text())
    assert (summary["method"], summary["rounds"], summary.get("events")) == ("minisoba", 2, None)
