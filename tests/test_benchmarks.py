"""The speed benchmark at small sizes: all sides of every workload do the same thing, and what it says of itself."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import WORKLOADS, main
from benchmarks.speed import flower_peer, pfl_peer, scaling
from benchmarks.speed.measure import LIMIT, LOOP, OURS, Workload, agreed, measure, table


@pytest.fixture(autouse=True)
def _no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other libraries are tried by the benchmark itself; here they would take too long where they are installed."""
    for peer in (pfl_peer, flower_peer):
        monkeypatch.setattr(peer, "missing", lambda: "left out by the test")


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
    assert json.loads((tmp_path / "out.json").read_text()) == found


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
