"""The grid: every combination in a process of its own, the best validation wins, nothing runs twice."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coterie.errors import RunError, UsageError
from coterie.experiment.config import load
from coterie.experiment.tune import Trial, _best, combinations, tune
from coterie.measures import named
from coterie.report.terminal import show_grid

Command = Callable[..., Any]


def trial(number: int, outcome: str = "finished", **final: float) -> Trial:
    return Trial(number, {"method.step": number}, final, outcome, "Lower method.step.")


def test_combinations_are_the_product_in_order() -> None:
    grid = {"method.step": [1, 2], "method.batch": [3, 4]}
    assert [tuple(c.values()) for c in combinations(grid)] == [(1, 3), (1, 4), (2, 3), (2, 4)]


def test_the_best_validation_accuracy_wins_and_the_first_of_equals() -> None:
    trials = [trial(0, validation_accuracy=0.5), trial(1, validation_accuracy=0.9), trial(2, validation_accuracy=0.9)]
    assert _best(trials)[0].number == 1


def test_diverged_combinations_do_not_count() -> None:
    trials = [trial(0, "diverged", validation_accuracy=0.9), trial(1, validation_accuracy=0.2)]
    assert _best(trials)[0].number == 1
    with pytest.raises(RunError, match=r"no combination finished. The first diverged: Lower method.step"):
        _best(trials[:1])


def test_the_table_has_the_best_first_and_what_was_not_finite_last() -> None:
    trials = [
        {"settings": {"method.step": i}, "final": {"validation_loss": loss}, "outcome": outcome}
        for i, loss, outcome in ((0, None, "diverged"), (1, 2.0, "finished"), (2, 1.0, "finished"))
    ]
    console = Console(file=io.StringIO(), width=100)
    best = {"settings": {"method.step": 2}}
    result = {"declared": named("validation_loss").as_dict(), "best": best, "trials": trials}
    show_grid(console, result, "runs/tuned")
    lines = console.file.getvalue().splitlines()[1:4]  # type: ignore[attr-defined]
    assert [line.split()[0] for line in lines] == ["2", "1", "0"]


def test_without_classes_the_least_validation_loss_wins() -> None:
    assert _best([trial(0, validation_loss=2.0), trial(1, validation_loss=1.0)]) == (
        trial(1, validation_loss=1.0),
        "validation_loss",
    )


@pytest.mark.parametrize(("grid", "complaint"), [({"step": [1]}, "names no table"), ({"method.step": []}, "no value")])
def test_bad_grids_are_explained(grid: dict[str, list[int]], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        combinations(grid)


def test_a_value_out_of_bounds_is_found_before_anything_runs(tmp_path: Path) -> None:
    config = load(None, {}, {"run.problem": "quadratic", "run.method": "fedavg"})
    with pytest.raises(UsageError, match=r"method\.step = -1"):
        tune(config, {"method.step": [0.1, -1.0]}, tmp_path / "grid", rounds=2)
    assert not (tmp_path / "grid").exists()


@pytest.mark.usefixtures("workers_here")
def test_the_command_writes_the_best_configuration_and_repeats_nothing(coterie: Command, tmp_path: Path) -> None:
    folder = tmp_path / "grid"
    arguments = ["tune", "--problem", "quadratic", "--method", "local-train", "--grid", "method.step=0.001,0.3"]
    done = coterie(*arguments, "--rounds", 3, "--out", folder, "--json")
    assert done.code == 0, done.err
    assert done.json["best"]["settings"] == {"method.step": 0.3}
    assert done.json == json.loads((folder / "tune.json").read_text())
    assert load(folder / "best.toml").method["step"] == 0.3
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")}
    assert len(before) == 2
    assert coterie(*arguments, "--rounds", 3, "--out", folder, "--json").code == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")} == before

    other = coterie(*arguments[:-1], "method.step=0.001,0.2", "--rounds", 3, "--out", folder, "--json")
    assert other.code == 2
    assert "was made with method.step = 0.3, not 0.2" in other.err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")} == before


def test_a_method_without_a_published_grid_asks_for_one(coterie: Command, tmp_path: Path) -> None:
    done = coterie("tune", "--problem", "quadratic", "--method", "fedavg", "--out", tmp_path / "grid")
    assert done.code == 2
    assert "--grid" in done.err
