"""Comparisons: what is planned, run, gone on with, and said of it."""

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import RunError, UsageError
from coterie.experiment.build import assemble
from coterie.experiment.compare import Case, paired_tests, plan, summarise
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.experiment.processes import Job, rounds_done, run_all
from coterie.experiment.run import resume, run
from coterie.measures import named

Command = Callable[..., Any]


def quiet(name: str, is_baseline: bool) -> None:
    return None


def base(**run: Any) -> Any:
    return load(None, {}, {"run.problem": "quadratic", **{f"run.{key}": value for key, value in run.items()}})


def test_a_plan_has_every_method_and_seed_at_its_own_settings() -> None:
    cases = plan(base(rounds=3), ["meritfed", "fedavg"], [0, 7], {"fedavg": {"step": 0.25}})
    assert [case.name for case in cases] == ["meritfed-0", "fedavg-0", "meritfed-7", "fedavg-7"]
    assert cases[1].config.method["step"] == 0.25
    assert {case.config.run.seed for case in cases} == {0, 7}
    assert all(case.config.run.baselines == [] for case in cases)
    assert all(case.config.problem == cases[0].config.problem for case in cases)


@pytest.mark.parametrize(
    ("methods", "seeds", "settings", "complaint"),
    [
        (["meritfd"], [0], {}, "did you mean meritfed"),
        (["fedavg", "fedavg"], [0], {}, "named twice"),
        (["fedavg"], [], {}, "needs methods and seeds"),
        (["fedavg"], [0], {"fedavg": {"step": -1.0}}, r"method\.step"),
        (["meritfed", "heterofl"], [0], {}, "heterofl needs"),
    ],
)
def test_what_cannot_be_run_is_found_before_anything_runs(
    methods: list[str], seeds: list[int], settings: Any, complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        plan(base(), methods, seeds, settings)


def test_where_one_method_serves_everyone_all_do() -> None:
    settings = load(None, {"problem.clients": 6, "problem.train": 20}, {"run.problem": "groups", "run.rounds": 1})
    cases = plan(settings, ["collaborate", "fedavg", "ditto"], [0])
    assert [case.config.problem["everyone"] for case in cases] == [True] * 3
    assert cases[2].config.method["everyone"] is True


def done(
    method: str, seed: int, value: float, outcome: str = "finished", moved: int = 10
) -> tuple[Case, dict[str, Any]]:
    summary: dict[str, Any] = {"outcome": outcome, "rounds": 5, "seconds": 1.0, "message": ""}
    summary |= {"final": {"test_accuracy": value}, "measures": [named("test_accuracy").as_dict()]}
    return Case(method, seed, base()), {**summary, "communication": {"bytes_up": moved, "bytes_down": moved}}


def test_the_table_has_means_ranks_and_tests() -> None:
    runs = [done("a", s, 0.8 + 0.01 * s) for s in range(3)] + [done("b", s, 0.7 + 0.02 * s) for s in range(3)]
    result = summarise(runs)
    a, b = result["rows"]
    assert a["mean"] == pytest.approx(0.81)
    assert a["std"] == pytest.approx(0.01)
    assert (a["rank"], b["rank"]) == (1.0, 2.0)
    assert a["bytes"] == 20
    test = result["tests"]["comparisons"][0]
    assert test["difference"] == pytest.approx(0.09)
    assert test["p_exact"] == 0.25
    assert test["p_t"] < 0.01
    assert "cannot fall below p = 0.25" in result["tests"]["note"]
    assert "6 seeds can" in result["tests"]["note"]


def test_runs_that_did_not_finish_are_counted_and_left_out() -> None:
    runs = [done("a", 0, 0.8), done("a", 1, 0.9), done("b", 0, 0.5), done("b", 1, 0.0, "diverged")]
    result = summarise(runs)
    assert result["outcome"] != "finished"
    assert [row["unfinished"] for row in result["rows"]] == [0, 1]
    assert result["rows"][1]["values"] == {"0": 0.5}
    assert result["tests"]["comparisons"][0]["pairs"] == 1
    assert summarise([done("a", 0, 0.1, "diverged")])["measure"] is None


def test_one_seed_shows_one_seed() -> None:
    assert "one seed" in paired_tests({"a": {0: 1.0}, "b": {0: 0.5}})["note"]
    assert "does not" in paired_tests({"a": dict.fromkeys(range(6), 1.0), "b": dict.fromkeys(range(6), 0.5)})["note"]


def test_exchanges_end_a_run_with_the_round_that_reaches_them(tmp_path: Path) -> None:
    summary = run(base(method="bilevel", rounds=50, exchanges=12), tmp_path, quiet)
    each = summary["communication"]["rounds"] / summary["rounds"]
    assert summary["outcome"] == "finished"
    assert each > 1
    assert 12 <= summary["communication"]["rounds"] < 12 + each
    assert resume(tmp_path, quiet) == summary


def test_a_budget_ends_a_run_with_the_round_that_reaches_it(tmp_path: Path) -> None:
    config = base(method="fedavg", rounds=50, budget=1000, record=7)
    each = run_rounds(assemble(base(method="fedavg", rounds=1)), None).summary["communication"]
    one = each["bytes_up"] + each["bytes_down"]
    summary = run(config, tmp_path / "a", quiet)
    assert summary["outcome"] == "finished"
    assert summary["rounds"] == -(-1000 // one) < 50
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["round"] == summary["rounds"]  # the last round is recorded, whatever run.record is
    before = (tmp_path / "a" / "summary.json").stat().st_mtime_ns
    assert resume(tmp_path / "a", quiet) == summary  # it is finished
    assert (tmp_path / "a" / "summary.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("limit", ["budget", "exchanges"])
def test_a_budget_that_a_round_uses_up_exactly_ends_the_run(limit: str) -> None:
    config = base(method="fedavg", rounds=3, baselines=[])
    moved = run_rounds(assemble(config), None).summary["communication"]
    whole = moved["rounds"] if limit == "exchanges" else moved["bytes_up"] + moved["bytes_down"]
    for more, rounds in ((0, 3), (1, 4)):
        ended = run_rounds(assemble(config.with_run(rounds=9, **{limit: whole + more})), None).summary
        assert (ended["outcome"], ended["rounds"]) == ("finished", rounds)


def test_a_method_that_moves_nothing_runs_all_its_rounds(tmp_path: Path) -> None:
    summary = run(base(method="local-train", rounds=4, budget=1), tmp_path / "a", quiet)
    assert summary["rounds"] == 4


@pytest.mark.usefixtures("workers_here")
def test_a_run_of_a_batch_that_diverged_is_not_made_again(tmp_path: Path) -> None:
    job = Job(load(None, {"method.step": 1e9}, {"run.problem": "quadratic", "run.method": "fedavg"}), tmp_path / "a")
    (summary,) = run_all([job])
    written = (job.folder / "summary.json").stat().st_mtime_ns
    assert summary["outcome"] == "diverged"
    assert run_all([job]) == [summary]
    assert (job.folder / "summary.json").stat().st_mtime_ns == written


@pytest.mark.usefixtures("workers_here")
def test_the_command_compares_resumes_and_writes_tables(coterie: Command, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    arguments = ["compare", "--problem", "quadratic", "--rounds", 4, "--out", folder, "--json"]
    first = coterie(*arguments, "--methods", "meritfed,fedavg", "--seeds", "0,1", "--set", "fedavg.step=0.05")
    assert first.code == 0, first.err
    assert first.json["methods"] == ["meritfed", "fedavg"]
    assert load(folder / "runs" / "fedavg-1" / "config.toml").method["step"] == 0.05
    for name in ("compare.json", "table.md", "table.tex", "table.csv", "report.html"):
        assert (folder / name).stat().st_size > 0
    assert len(list(csv.reader((folder / "table.csv").read_text().splitlines()))) == 5
    assert "The comparison" in (folder / "report.html").read_text()

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")}
    (folder / "runs" / "fedavg-1" / "summary.json").unlink()  # as if interrupted
    again = coterie(*arguments, "--methods", "meritfed,fedavg", "--seeds", "0,1", "--set", "fedavg.step=0.05")
    assert again.code == 0, again.err
    assert again.json["rows"][0]["values"] == first.json["rows"][0]["values"]
    assert again.json["rows"][1]["values"] == first.json["rows"][1]["values"]
    kept = [path for path in before if path.parent.name != "fedavg-1"]
    assert [path.stat().st_mtime_ns for path in kept] == [before[path] for path in kept]

    other = coterie(*arguments, "--methods", "meritfed,fedavg", "--seeds", "0,1", "--set", "fedavg.step=0.5")
    assert other.code == 2
    assert "was made with method.step = 0.05, not 0.5" in other.err


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_whatever_ends_it_ends_the_runs_with_their_state_saved(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "c"
    words = ["compare", "--problem", "quadratic", "--methods", "fedavg", "--seeds", "0", "--rounds", "1000000"]
    command = [sys.executable, "-m", "coterie", *words, "--set", "run.checkpoint=10", "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: rounds_done(folder / "runs" / "fedavg-0") >= 10 or process.poll() is not None)
        process.send_signal(number)
        _, complaint = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    summary = folder / "runs" / "fedavg-0" / "summary.json"
    if number == signal.SIGINT:
        assert process.returncode == 1
        assert f"Resume it with: coterie resume {folder}" in complaint
    else:
        wait_for(summary.exists)
    told = json.loads(summary.read_text())
    assert told["outcome"] == "stopped"
    assert told["rounds"] >= 10


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.1)


def test_bad_commands_are_explained(coterie: Command, tmp_path: Path) -> None:
    for arguments, complaint in (
        (["--seeds", "zero"], "no list of whole numbers"),
        (["--set", "method.step=1"], "of which method?"),
        (["--methods", "nonsense"], "unknown method"),
    ):
        found = coterie("compare", "--problem", "quadratic", "--out", tmp_path / "c", *arguments)
        assert found.code == 2
        assert complaint in found.err
    assert not (tmp_path / "c").exists()


def test_a_worker_that_fails_is_named_and_others_can_go_on(tmp_path: Path) -> None:
    good = Job(base(method="fedavg", rounds=2), tmp_path / "good")
    bad = Job(base(method="fedavg", rounds=2), tmp_path / "bad")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.toml").write_text("x = [")
    with pytest.raises((RunError, UsageError), match="bad"):
        run_all([good, bad], at_once=1)
    assert rounds_done(tmp_path / "good") == 2
    assert rounds_done(tmp_path / "none") == 0


def test_a_worker_whose_parent_has_ended_before_it_began_makes_no_run(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    gone.wait()
    config = tmp_path / "config.toml"
    config.write_text(load(sets={"run.problem": "quadratic", "run.rounds": 10**7, "run.baselines": []}).as_toml())
    subprocess.run(  # which never ends where the worker makes the run
        [sys.executable, "-P", "-m", "coterie.experiment.worker", str(gone.pid)],
        input=json.dumps({"config": str(config), "folder": str(tmp_path / "run")}) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    summary = tmp_path / "run" / "summary.json"
    assert not summary.exists() or json.loads(summary.read_text())["outcome"] == "stopped"
