"""The speed benchmark at small sizes: all sides of every workload do the same thing, and what it says of itself."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from time import process_time, sleep, thread_time

import pytest
import torch
from benchmarks.__main__ import WORKLOADS, main, options_of
from benchmarks.speed import flower_peer, jax_peer, pfl_peer, scaling
from benchmarks.speed.measure import JAX, LIMIT, LOOP, OURS, Workload, agreed, measure, table, timed, without
from benchmarks.speed.processes import apart

ROOT = Path(__file__).resolve().parents[1]
JAX_ROUNDS = ("W1", "W2", "W4", "W5", "W7")
WITH_JAX = (*JAX_ROUNDS, "W1n", "W5b")  # the last two are W1 and W5 in other sizes


@pytest.fixture
def _no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other libraries are tried by the benchmark itself; here they would take too long where they are installed.

    JAX has a test below, in a process of its own: once imported, it objects to forks by other tests.
    """
    for peer in (pfl_peer, flower_peer, jax_peer):
        monkeypatch.setattr(peer, "missing", lambda: "left out by the test")


@pytest.mark.usefixtures("_no_peers")
@pytest.mark.parametrize("name", WORKLOADS)
def test_all_sides_agree(name: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        found = main([name, "--quick", "--repeats", "1", "--no-curves", "--json", str(tmp_path / "out.json")])
    finally:
        torch.set_num_threads(threads)
    (result,) = found["workloads"]
    assert set(result["sides"]) == ({OURS, "plain vmap"} if name == "W1o" else {OURS, LOOP, LIMIT})
    assert all(side["difference"] <= 1e-4 and side["ratio"] > 0 for side in result["sides"].values())
    assert (JAX in result["absent"]) == (name in WITH_JAX)
    assert json.loads((tmp_path / "out.json").read_text()) == found


@pytest.mark.skipif(find_spec("jax") is None, reason="the extra coterie[bench] is not installed")
def test_jax_agrees_where_it_is_a_side(tmp_path: Path) -> None:
    others = ("--without", LOOP, "--without", LIMIT, "--without", "pfl", "--without", "flower")
    options = ("--quick", "--repeats", "1", "--no-curves", "--json", str(tmp_path / "out.json"))
    command = [sys.executable, "-m", "benchmarks", *JAX_ROUNDS, *others, *options]
    quickly = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}  # here compiling takes the time
    done = subprocess.run(command, cwd=ROOT, env=quickly, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["machine"]["jax"] is not None
    assert [result["workload"] for result in found["workloads"]] == list(JAX_ROUNDS)
    for result in found["workloads"]:
        assert set(result["sides"]) == {OURS, JAX}
        assert result["sides"][JAX]["difference"] <= 1e-4


def test_absent_jax_is_said_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NPROC", "XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setitem(sys.modules, "jax", None)
    assert "pip install 'coterie[bench]'" in str(jax_peer.missing())
    assert jax_peer.version() is None


def test_time_of_other_threads_counts() -> None:
    def busy() -> None:
        while thread_time() < 0.05:
            pass

    def side() -> torch.Tensor:
        thread = Thread(target=busy)
        thread.start()
        thread.join()
        return torch.ones(1)

    assert timed(side).cpu >= 0.05


def test_ratios_are_of_the_clock_that_was_asked_for() -> None:
    def waiting() -> torch.Tensor:
        sleep(0.05)
        return torch.ones(1)

    def busy() -> torch.Tensor:
        end = process_time() + 0.03
        while process_time() < end:
            pass
        return torch.ones(1)

    workload = Workload("W0", "nothing", {OURS: busy, LOOP: waiting})
    by_processor, by_wall = (measure(workload, 3, 1e9, clock)["sides"][LOOP] for clock in ("cpu", "wall"))
    assert by_processor["ratio"] < 0.5
    assert by_wall["ratio"] > by_processor["ratio"]


def test_sides_can_be_left_out() -> None:
    sides = {OURS: lambda: torch.ones(2), LOOP: lambda: torch.zeros(2)}
    left = without(Workload("W0", "nothing", sides, absent={"pfl": "not installed"}), [LOOP, "pfl", OURS])
    assert list(left.sides) == [OURS]
    assert left.absent == {}


def test_the_commands_of_the_pages_have_options_that_exist() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "Makefile"]
    texts = [text for page in pages for text in re.findall(r"-m benchmarks ([^#`…\n]+)", page.read_text())]
    assert len(texts) > 5
    for text in texts:
        options_of(text.split())


def test_what_is_run_apart_has_the_same_threads() -> None:
    assert apart(_threads) == {"threads": torch.get_num_threads()}


def _threads() -> dict[str, int]:
    return {"threads": torch.get_num_threads()}


def test_sides_that_disagree_are_not_timed() -> None:
    sides = {OURS: lambda: torch.ones(2), LOOP: lambda: torch.tensor([1.0, 1.1])}
    with pytest.raises(SystemExit, match=r"W0: loop differs from coterie by 0\.1 of the largest entry"):
        measure(Workload("W0", "nothing", sides), 1, 1e9)
    with pytest.raises(SystemExit):
        agreed(Workload("W0", "nothing", {}), {OURS: torch.ones(1), LOOP: torch.full((1,), torch.nan)})


def test_the_table_says_who_is_absent_and_what_was_missed() -> None:
    side = {"cpu_ms": 1.0, "wall_ms": 1.0, "ratio": 1.5, "difference": 0.0}
    result = {
        "workload": "W0",
        "what": "nothing",
        "sides": {OURS: side, LOOP: side},
        "wanted": {LOOP: 2.0},
        "absent": {"pfl": "not installed"},
        "matmul_bound_ms": None,
    }
    assert "≥ 2 NO" in table([result])
    assert "pfl: not installed" in table([result])


@pytest.mark.chunk_free
def test_a_round_of_many_clients_does_not_depend_on_the_chunk() -> None:
    problem = scaling.logistic(150)
    assert torch.equal(scaling.round_of(problem, 2, "auto"), scaling.round_of(problem, 2, 7))


def test_a_wide_model_has_about_the_parameters_asked_for() -> None:
    assert abs(scaling.perceptron(10**4, 2).task.model.size - 10**4) < 100
