"""Folders that are read, and what is said of those that are not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made import make

from coterie.errors import UsageError
from coterie.report.results import MOST_NUMBERS, MOST_POINTS, read, read_all, thinned

Command = Callable[..., Any]


def test_a_run_is_read_with_its_baselines(tmp_path: Path) -> None:
    run = read(make(tmp_path / "a", baselines=("fedavg", "local-train")))
    assert (run.method, run.problem, run.seed, run.friends, run.outcome) == ("meritfed", "friends", 0, 2, "finished")
    assert run.weights is not None
    assert len(run.weights.rows) == 21
    assert sorted(run.baselines) == ["fedavg", "local-train"]
    assert run.notes == ()


def test_a_run_that_goes_on_is_read_as_far_as_it_is(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 21, "test_acc')
    with (folder / "weights.csv").open("a") as file:
        file.write("21,0.5,0.")
    run = read(folder)
    assert run.final["round"] == 20
    assert run.weights is not None
    assert run.weights.rounds[-1] == 20
    assert run.outcome == "not finished"
    assert "half a line" in " ".join(run.notes)


def test_the_last_whole_matrix_is_read(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", matrix=True, finished=False)
    with (folder / "weights.csv").open("a") as file:
        file.write("21,0,1,0,0,0,0,0\n21,1,0,1,0")
    run = read(folder)
    assert run.weights is not None
    assert run.weights.matrix is not None
    assert run.weights.matrix[0] == pytest.approx([1 / 3] * 3 + [0] * 3)


def test_long_files_are_thinned_and_keep_their_ends() -> None:
    assert thinned(5, 10) == [0, 1, 2, 3, 4]
    found = thinned(100_000)
    assert len(found) == MOST_POINTS
    assert (found[0], found[-1]) == (0, 99_999)
    assert found == sorted(set(found))
    assert 150 * thinned(1001, MOST_NUMBERS // 150)[-1]


def broken(folder: Path, name: str, text: str | None) -> Path:
    make(folder)
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    return folder


BROKEN = [
    ("config.toml", None, "config.toml is missing"),
    ("config.toml", "x = [", "config.toml is damaged"),
    ("config.toml", "[run]\nrounds = 3", "names no method"),
    ("metrics.jsonl", None, "metrics.jsonl is missing"),
    ("metrics.jsonl", "", "no recorded round yet"),
    ("metrics.jsonl", '{"round": 0}\nnonsense\n', "metrics.jsonl, line 2, is damaged"),
    ("metrics.jsonl", '{"round": NaN}\n', "NaN is not JSON"),
    ("metrics.jsonl", '{"round": "0"}\n', "round is no whole number"),
    ("weights.csv", "a,b\n1,2\n", "weights.csv is damaged"),
    ("weights.csv", "round,client_0\n0,much\n", "weights.csv is damaged"),
    ("weights.csv", "round,client_0\n0,inf\n", "finite"),
    ("events.jsonl", "[]\n", "events.jsonl, line 1,"),
    ("ledger.json", "{}", "ledger.json is damaged"),
    ("summary.json", '{"outcome": "finished"}', "summary.json is damaged"),
    ("summary.json", "[" * 100_000, "summary.json is damaged"),
]


@pytest.mark.parametrize(("name", "text", "complaint"), BROKEN)
def test_what_is_wrong_is_named_by_file(tmp_path: Path, name: str, text: str | None, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(broken(tmp_path / "bad", name, text))
    assert complaint in str(caught.value)
    assert str(tmp_path / "bad" / name) in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    folder = make(tmp_path / "bad")
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"metrics\.jsonl cannot be read"):
        read(folder)


def test_numbers_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    (folder / "metrics.jsonl").write_text('{"round": 0, "test_accuracy": 1e999}\n{"round": 1, "test_accuracy": 0.5}\n')
    assert read(folder).metrics[0]["test_accuracy"] is None


def test_others_are_still_reported(coterie: Command, tmp_path: Path) -> None:
    good, bad, none = make(tmp_path / "good"), broken(tmp_path / "bad", "metrics.jsonl", "x\n"), tmp_path / "none"
    done = coterie("report", good, bad, none, "--out", tmp_path / "out", "--json")
    assert done.code == 0
    assert done.json["runs"] == 1
    assert [word in " ".join(done.json["left_out"]) for word in ("metrics.jsonl, line 1", "no folder")] == [True, True]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "metrics.jsonl, line 1, is damaged" in page
    assert "left out" in done.err


def test_nothing_to_report_is_a_failure(coterie: Command, tmp_path: Path) -> None:
    done = coterie("report", tmp_path / "none")
    assert done.code == 1
    assert "nothing to report" in done.err
    assert not (tmp_path / "none").exists()


def test_a_folder_of_folders_stands_for_its_runs(tmp_path: Path) -> None:
    make(tmp_path / "c" / "runs" / "a")
    make(tmp_path / "c" / "runs" / "b", seed=1)
    (tmp_path / "c" / "compare.json").write_text("{}")
    runs, complaints = read_all([tmp_path / "c"])
    assert [run.seed for run in runs] == [0, 1]
    assert complaints == []
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "tune.json").write_text(json.dumps({}))
    assert "holds no run yet" in read_all([tmp_path / "empty"])[1][0]


def test_names_of_clients_are_read_and_checked(tmp_path: Path) -> None:
    assert read(make(tmp_path / "a")).client(1) == "client 1"
    folder = make(tmp_path / "b", finished=False)
    (folder / "clients.json").write_text(json.dumps(["north.csv", "bad\x1b[2J\nname.csv"]))
    run = read(folder)
    assert [run.client(k) for k in range(3)] == ["north.csv", "bad [2J name.csv", "client 2"]
    (folder / "clients.json").write_text('{"0": "north.csv"}')
    with pytest.raises(UsageError, match=r"clients\.json is damaged"):
        read(folder)
