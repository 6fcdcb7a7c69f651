"""Reproductions: all definitions are sound, one runs, and the pages show what is stored."""

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coterie.errors import UsageError
from coterie.experiment.config import load
from coterie.experiment.processes import Job
from coterie.methods.registry import METHODS, method_entry
from coterie.report.terminal import RunsBar
from coterie.reproduce import STUDIES, Study, Table, check_stored, markdown, reproduce, study
from coterie.reproduce.adding import added
from coterie.reproduce.least import above_the_least
from coterie.reproduce.nested import SOLVERS
from coterie.reproduce.pages import cell_text
from coterie.reproduce.reading import Finished, read
from coterie.reproduce.running import chosen, jobs
from coterie.reproduce.study import Budget, Column, Curve, Row, Tuning, cells

Command = Callable[..., Any]
DOCS = Path(__file__).resolve().parents[2] / "docs"


def tables() -> Any:
    spec = importlib.util.spec_from_file_location("docs_tables", DOCS / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("one", STUDIES, ids=lambda one: one.name)
def test_every_study_can_be_configured_and_has_a_page(one: Any) -> None:
    assert {"small", "paper"} <= set(one.scales)
    assert (DOCS / "papers" / f"{one.page}.md").resolve().is_file()
    for table in one.scales.values():
        first = next(iter(cells(table)))
        assert load(sets=first.runs[0]).run.baselines == []
        names = {(row.name, column.name) for row in table.rows for column in table.columns}
        assert set(table.printed) <= names
        assert len({row.name for row in table.rows}) == len(table.rows)
        assert len({column.name for column in table.columns}) == len(table.columns)
        for cell in cells(table):
            method_entry(cell.runs[0]["run.method"])


def test_the_bilevel_studies_have_every_bilevel_solver() -> None:
    fitting = {entry.name for entry in METHODS if entry.make().fits(frozenset({"nested"}))}
    assert set(SOLVERS) == fitting


def test_exchanges_to_a_value_are_those_of_the_first_record_that_has_it() -> None:
    lines = [{"gap": g, "communication": {"rounds": 5 * i}} for i, g in enumerate((1.0, 0.2, None, 0.01, 0.3))]
    moved = {"rounds": 20, "floats_up": 3, "floats_down": 4, "bytes_up": 12, "bytes_down": 16}
    run = Finished({"communication": moved, "seconds": 1.5}, lines, {})
    assert read(run, "reach:gap:0.1") == 15.0
    assert read(run, "reach:gap:1e-3") is None
    assert (read(run, "floats"), read(run, "seconds"), read(run, "rounds")) == (7.0, 1.5, 20.0)


def test_names_are_unique() -> None:
    assert len({one.name for one in STUDIES}) == len(STUDIES)
    with pytest.raises(UsageError, match="did you mean fednest-minimax"):
        study("fednest-minimx")
    with pytest.raises(UsageError, match="unknown scale"):
        study("fednest-minimax").at("huge")
    with pytest.raises(UsageError, match="unknown row"):
        study("fednest-minimax").at("small").only(["nonsense"], [], [])


@pytest.mark.parametrize("name", ["weighted-nodes-table3", "primal-dual-figure1", "fedsep-figure2", "byzantine"])
def test_every_run_has_a_folder_of_its_own(name: str, tmp_path: Path) -> None:
    table = study(name).at("small")
    found = jobs(table, tmp_path)
    texts = {job.config.as_toml() for job in found}
    assert len(texts) == len(found)
    wanted = {load(sets=run).as_toml() for cell in cells(table) for run in cell.runs}
    assert texts == wanted


LINES = [
    {"round": t, "test_accuracy": a, "validation_accuracy": v, "validation_loss": abs(t - 9)}
    for t, a, v in ((0, 0.1, 0.2), (5, 0.6, 0.9), (10, 0.7, 0.8))
]
MOVED = {"bytes_up": 2_000_000, "bytes_down": 1_000_000, "rounds": 7}
RUN = Finished(
    {"final": {"x": 1}, "weights": [0.5, 0.3, 0.2], "communication": MOVED, "outcome": "finished"},
    LINES,
    {10: [0.1, 0.2, 0.7]},
)


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("final:test_accuracy", 0.7),
        ("final:x", 1.0),
        ("best:test_accuracy", 0.6),
        ("lowest:test_accuracy", 0.7),
        ("at:5:test_accuracy", 0.6),
        ("at:6:test_accuracy", None),
        ("tail:2:test_accuracy", 0.65),
        ("weights:1:", 0.5),
        ("weights:0:1", 0.5),
        ("most:1:", 0.3),
        ("lowest:weights:0:2", 0.3),
        ("lowest:most:0:2", 0.2),
        ("megabytes", 3.0),
        ("megabytes_up", 2.0),
        ("rounds", 7.0),
        ("final:nothing", None),
    ],
)
def test_how_values_are_read(how: str, value: float | None) -> None:
    assert read(RUN, how) == (None if value is None else pytest.approx(value))


def test_a_run_that_diverged_after_its_last_record_has_the_value_of_its_last_finite_model() -> None:
    summary = {**RUN.summary, "outcome": "diverged", "final": {"test_accuracy": 0.1}}
    assert read(RUN._replace(summary=summary), "final:test_accuracy") == 0.1


def test_cells_as_text() -> None:
    assert cell_text({"values": [0.5, 0.7]}, ".3f") == "0.600 ± 0.141"
    assert cell_text({"values": [0.5, 0.7]}, ".1f", each=True) == "0.5 / 0.7"
    assert cell_text({"values": []}, ".3f") == "–"
    assert cell_text({"values": [0.5, 0.7]}, ".1f", seeds=3) == "0.6 ± 0.1 (2 of 3)"
    assert cell_text({"values": [0.5, 0.7]}, ".1f", seeds=2) == "0.6 ± 0.1"
    assert cell_text({"mean": 0.015, "std": 4.5}, ".1e") == "1.5e-2 ± 4.5"


@pytest.mark.slow
def test_a_study_runs_and_is_read_again(coterie: Command, tmp_path: Path) -> None:
    arguments = [
        "reproduce",
        "fednest-minimax",
        "--rows",
        "FedNest;FedAvg-S",
        "--columns",
        "0;60",
        "--out",
        tmp_path / "m",
    ]
    done = coterie(*arguments, "--json")
    assert done.code == 0, done.err
    ours = {row["name"]: [cell["values"][0] for cell in row["cells"]] for row in done.json["rows"]}
    assert ours["FedNest"][0] == ours["FedAvg-S"][0] > 1.0
    assert ours["FedNest"][1] < 1e-9 < 1e-4 < ours["FedAvg-S"][1]  # linear convergence, and who stalls
    assert json.loads((tmp_path / "m" / "fednest-minimax-small.json").read_text()) == done.json
    again = coterie(*arguments, "--read", "--json")
    assert again.json == done.json
    empty = coterie("reproduce", "fednest-minimax", "--read", "--out", tmp_path / "none")
    assert empty.code == 0
    assert "| FedNest | – |" in empty.out


@pytest.mark.slow
def test_a_run_that_cannot_go_on_is_said_with_its_reason_and_leaves_a_gap(
    coterie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"run.problem": "nested-quadratic", "run.rounds": 3, "run.method": "fednest", "problem.condition": 20.0}
    rows = tuple(Row(f"l = {l}", {"method.lipschitz": l, "method.terms": 6}) for l in (0.5, 50.0))
    table = Table("", rows, (Column("loss", {}, "final:gap"),), common, (0,))
    one = Study("gap", "fednest", "A table with a gap", {"small": table, "paper": table})
    monkeypatch.setattr("coterie.reproduce.STUDIES", (one,))
    done = coterie("reproduce", "gap", "--out", tmp_path / "gap")
    assert done.code == 1
    assert "method.lipschitz = 0.5 is too small" in done.out + done.err
    assert "1 of the runs did not finish, and the table lacks them: fednest" in done.err
    cells_read = json.loads((tmp_path / "gap" / "gap-small.json").read_text())["rows"]
    assert [len(row["cells"][0]["values"]) for row in cells_read] == [0, 1]


@pytest.mark.slow
def test_stored_results_are_checked_by_running_a_sample_again(coterie: Command, tmp_path: Path) -> None:
    made = ["fednest-minimax", "--rows", "FedNest", "--columns", "0;10", "--seeds", "0,1", "--jobs", "1"]
    coterie("reproduce", *made, "--out", tmp_path / "made")
    file = tmp_path / "made" / "fednest-minimax-small.json"
    stored = json.loads(file.read_text())
    assert all(len(cell["values"]) == 2 for cell in stored["rows"][0]["cells"])
    again = ["reproduce", "check", file, "--jobs", "1", "--json", "--out", tmp_path / "again"]
    done = coterie(*again)
    assert done.code == 0, done.err
    assert [(row["seed"], row["agrees"]) for row in done.json] == [(0, True), (1, True)]
    assert [row["again"] for row in done.json] == [row["stored"] for row in done.json]
    stored["rows"][0]["cells"][1]["values"][1] += 0.1 * max(1.0, stored["rows"][0]["cells"][1]["values"][1])
    file.write_text(json.dumps(stored))
    wrong = coterie(*again)
    assert wrong.code == 1
    assert "1 of 2 stored values do not reproduce within 0.02" in wrong.err
    assert coterie(*again, "--tolerance", "0.2").code == 0
    file.write_text("{}")
    assert coterie(*again).code == 2
    assert coterie("reproduce", "fednest-minimax", file).code == 2


def test_every_stored_result_names_its_seeds_and_the_page_shows_them() -> None:
    for path in (DOCS / "results").glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        assert result["seeds"], path.name
        assert all(isinstance(seed, int) for seed in result["seeds"])
        assert f"{', '.join(map(str, result['seeds']))}" in markdown(result).splitlines()[-1]
        most = max(len(cell.get("values") or ()) for row in result["rows"] for cell in row["cells"])
        assert most <= len(result["seeds"]), path.name


def test_the_list(coterie: Command) -> None:
    listed = coterie("reproduce", "list", "--json").json
    assert [row["name"] for row in listed] == [one.name for one in STUDIES]
    assert coterie("reproduce", "nonsense").code == 2


def test_the_pages_show_what_is_stored() -> None:
    maker = tables()
    for page in maker.pages():
        text = page.read_text(encoding="utf-8")
        assert maker.filled(text) == text, f"{page.name} differs from docs/results; run python docs/tables.py"
    assert maker.shown() == {path.stem for path in maker.RESULTS.glob("*.json")}
    for path in maker.RESULTS.glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        assert result["date"] in markdown(result)
        assert result["scale"] in study(result["name"]).scales


def test_every_claim_has_a_verdict_and_stored_evidence() -> None:
    maker = tables()
    text = (DOCS / "papers" / "verdicts.md").read_text(encoding="utf-8").partition("## What each study takes")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and not line.startswith("| **")]
    claims = [row for row in rows if row[0] != "| claim"]
    assert {row[1] for row in claims} <= maker.VERDICTS.keys()
    assert f"Of {len(claims)} claims" in text
    names = {name for row in claims for name in re.findall(r"`([^`]+)`", row[3])}
    assert names <= {path.stem for path in maker.RESULTS.glob("*.json")}
    assert maker.counted("| a | holds | b | c |\n| d | in part | e | f |\n| g | in part | h | i |\n") == (
        "Of 3 claims 1 holds and 2 hold in part."
    )


def test_the_page_of_verdicts_says_what_made_each_result() -> None:
    maker = tables()
    text = (DOCS / "papers" / "verdicts.md").read_text(encoding="utf-8")
    parts = [{"seconds": 6222, "platform": {"processor": "AMD EPYC, cpu family 25, model 1"}}]
    result = {
        "name": "fednest-minimax",
        "scale": "paper",
        "rows": [{"name": "FedNest"}],
        "seeds": [0],
        "seconds": 1000,
        "date": "2026-11-18",
        "platform": {"processor": "Intel(R) Xeon(R) Processor @ 2.80GHz, cpu family 6, model 106"},
    }
    assert maker.studies() in text
    assert maker.made_by({**result, "earlier": parts}) == [
        "`coterie reproduce fednest-minimax --scale paper`",
        *("1 of 4", "0", "2.0 h", "AMD EPYC, family 25, model 1; Intel Xeon, family 6, model 106", "2026-11-18"),
    ]
    assert maker.made_by({**result, "platform": {}, "seconds": None})[3:5] == ["not kept", "not kept"]


def test_a_new_result_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = tables()
    monkeypatch.setattr(maker, "RESULTS", tmp_path)
    stored = maker.take(DOCS / "results" / "byzantine-paper.json")
    assert stored == tmp_path / "byzantine-paper.json"
    page = maker.filled("before\n<!-- result: byzantine paper -->\nold\n<!-- end of result -->\nafter\n")
    assert "old" not in page
    assert "| ipm | 0.928 ± 0.020 | 0.912 ± 0.018 |" in page
    assert maker.filled(page) == page


TUNED = Table(
    "Two methods on the quadratic.",
    tuple(Row(name, {"run.method": name}) for name in ("fedavg", "sgd-full")),
    (Column("loss", {}, "final:validation_loss"), Column("exchanges", {}, "rounds", ".0f")),
    {"run.problem": "quadratic", "run.record": 2},
    seeds=(0, 1),
    corner="method",
    budget=Budget("exchanges", 6),
    tuning=Tuning(
        {name: ({"method.step": 0.001}, {"method.step": 0.1}) for name in ("fedavg", "sgd-full")},
        {"run.seed": 9},
        read="final:validation_loss",
        higher=False,
    ),
    curves=(Curve("validation_loss", "exchanges"),),
)
STUDY = Study("tuned", "fednest", "a study for this test", {"small": TUNED})


@pytest.mark.usefixtures("workers_here")
def test_every_run_spends_the_budget_with_the_settings_that_its_grid_chose(tmp_path: Path) -> None:
    result = reproduce(STUDY, TUNED, "small", tmp_path, at_once=1)
    assert result["chosen"] == {name: {"method.step": 0.1} for name in ("fedavg", "sgd-full")}
    assert [row["cells"][1]["values"] for row in result["rows"]] == [[6.0, 6.0]] * 2
    assert result["budget"] == "6 rounds of communication"
    assert len(list((tmp_path / "trials").glob("*/summary.json"))) == 4
    assert {"torch", "processor"} <= result["platform"].keys()
    line = result["curves"][0]["lines"][0]
    assert line["x"] == [0.0, 2.0, 4.0, 6.0]
    assert line["least"][-1] <= line["y"][-1] <= line["most"][-1]
    assert (tmp_path / "tuned-small-validation_loss-exchanges-loss.svg").is_file()
    assert "Everybody spends 6 rounds of communication. Grids of 2 settings per method" in markdown(result)
    assert "missing" not in result
    again = reproduce(STUDY, TUNED, "small", tmp_path, dry=True)
    assert {**again, "date": ""} == {**result, "date": ""}
    assert [run.agrees(1e-9) for run in check_stored(STUDY, result, tmp_path, at_once=1)] == [True, True]


@pytest.mark.usefixtures("workers_here")
def test_trials_may_have_a_smaller_budget(tmp_path: Path) -> None:
    table = replace(TUNED, tuning=replace(TUNED.tuning, budget=Budget("exchanges", 2)))
    result = reproduce(STUDY, table, "small", tmp_path, at_once=1)
    trials = [json.loads(path.read_text()) for path in (tmp_path / "trials").glob("*/summary.json")]
    assert [trial["communication"]["rounds"] for trial in trials] == [2] * 4
    assert [row["cells"][1]["values"] for row in result["rows"]] == [[6.0, 6.0]] * 2
    assert "chosen by final validation loss after 2 rounds of communication" in markdown(result)


def test_steps_that_were_chosen_on_mnist_are_those_of_the_stored_result() -> None:
    stored = json.loads((DOCS / "results" / "fedsep-figure2-paper.json").read_text(encoding="utf-8"))["chosen"]
    for row in study("fedsep-figure2").at("cifar10-short").rows:
        assert row.settings["method.server_step"] == stored[row.name]["method.server_step"]


def _trial(folder: Path, outcome: str, loss: float) -> None:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"outcome": outcome, "final": {"validation_loss": loss}}))
    (folder / "metrics.jsonl").write_text(json.dumps({"round": 0, "validation_loss": loss}))


@pytest.mark.parametrize(("outcomes", "best"), [(("finished", "diverged"), 0.001), (("diverged", "diverged"), 0.1)])
def test_settings_that_diverged_are_chosen_only_where_all_did(
    outcomes: tuple[str, str], best: float, tmp_path: Path
) -> None:
    losses = {0.001: (outcomes[0], 2.0), 0.1: (outcomes[1], 1.0)}  # as if recorded before it diverged
    for trial in TUNED.trials():
        _trial(tmp_path / "trials" / TUNED.folder(trial.settings), *losses[trial.tried["method.step"]])
    assert chosen(TUNED, tmp_path).tuned == {name: {"method.step": best} for name in ("fedavg", "sgd-full")}


@pytest.mark.usefixtures("workers_here")
@pytest.mark.parametrize("dry", [False, True])
def test_runs_with_other_settings_are_refused(dry: bool, tmp_path: Path) -> None:
    table = replace(TUNED, tuning=None, budget=None, seeds=(0,), name=lambda s: str(s["run.method"]))
    table = replace(table, common={**table.common, "run.rounds": 2})
    reproduce(STUDY, table, "small", tmp_path, at_once=1)
    other = replace(table, common={**table.common, "run.rounds": 3})
    with pytest.raises(UsageError, match=r"fedavg was made with run.rounds = 2, not 3; choose another --out"):
        reproduce(STUDY, other, "small", tmp_path, at_once=1, dry=dry)


def test_a_second_value_of_the_same_runs_makes_no_runs_of_its_own(tmp_path: Path) -> None:
    methods = [Column(name, {"run.method": name}, "final:validation_loss") for name in ("fedavg", "sgd-full")]
    spent = Column("spent", methods[0].settings, "rounds", of="fedavg")
    chosen = {"fedavg": {"method.step": 0.1}}
    table = replace(TUNED, rows=(Row("all", {}),), columns=(*methods, spent), tuned=chosen)
    runs = {column.name: table.settings(table.rows[0], column, 0) for column in table.columns}
    assert runs["spent"] == runs["fedavg"] != runs["sgd-full"]
    assert len(jobs(table, tmp_path)) == 2 * len(table.seeds)


def test_each_batch_of_runs_is_counted_from_its_own_beginning(tmp_path: Path) -> None:
    said = StringIO()
    with RunsBar(Console(file=said, width=200)) as bar:
        for name in ("trials", "runs"):
            job = Job(load(), tmp_path / name)
            bar.begin([job])
            bar.over(job, {"outcome": "finished", "message": ""})
    assert said.getvalue().splitlines()[:2] == ["1 of 1: trials: finished", "1 of 1: runs: finished"]


def _runs(table: Table) -> list[dict[str, Any]]:
    return [settings for cell in cells(table) for settings in cell.runs]


def test_a_row_that_overrules_what_is_common_has_a_folder_of_its_own() -> None:
    table = replace(TUNED, tuning=None, name=None, common={**TUNED.common, "problem.clients": 4}, seeds=(0,))
    alone = replace(table, rows=(*table.rows, Row("alone", {**table.rows[0].settings, "problem.clients": 1})))
    assert len({alone.folder(settings) for settings in _runs(alone)}) == len({*map(str, _runs(alone))})


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_runs_with_different_settings_have_different_folders(study: Study) -> None:
    for table in study.scales.values():
        for runs in (_runs(table), [trial.settings for trial in table.trials()]):
            found: dict[str, dict[str, Any]] = {}
            for settings in runs:
                assert found.setdefault(table.folder(settings), settings) == settings


def test_what_has_not_been_run_is_counted(tmp_path: Path) -> None:
    nothing = reproduce(STUDY, TUNED, "small", tmp_path, dry=True)
    assert len(nothing["missing"]) == nothing["runs"] == 4
    assert "4 of 4 runs have not been made" in markdown(nothing)


@pytest.mark.usefixtures("workers_here")
def test_seeds_and_columns_are_added_to_a_stored_result(tmp_path: Path) -> None:
    whole = reproduce(STUDY, TUNED, "small", tmp_path / "whole", at_once=1)
    first = reproduce(STUDY, TUNED.only(["fedavg"], [], [0]), "small", tmp_path / "first", at_once=1)
    out = tmp_path / "later"
    later = reproduce(
        STUDY, replace(TUNED, seeds=(1,)), "small", out, at_once=1, stored={**first, "date": "2026-01-01"}
    )
    tried = {path.name.partition("-")[0] for path in (out / "trials").iterdir() if path.is_dir()}
    assert tried == {"sgd"}  # the grid of fedavg is not run again
    assert later["chosen"] == whole["chosen"]
    assert later["seeds"] == [0, 1]
    rows = {row["name"]: row["cells"] for row in later["rows"]}
    expected = {row["name"]: row["cells"] for row in whole["rows"]}
    assert rows["fedavg"] == expected["fedavg"]
    assert rows["sgd-full"][0] == {"values": expected["sgd-full"][0]["values"][1:], "seeds": [1]}
    text = markdown(later)
    assert "(seeds 0)" in text
    assert "(seeds 1)" in text
    assert "(1 of 2)" in text
    again = reproduce(STUDY, TUNED.only(["sgd-full"], [], [0]), "small", tmp_path / "last", at_once=1, stored=later)
    assert [row["cells"] for row in again["rows"]] == [row["cells"] for row in whole["rows"]]
    assert again["missing"] == []
    assert [one["seeds"] for one in again["earlier"]] == [[0], [1]]  # each with the seeds that were run for it
    assert again["new_seeds"] == [0]


@pytest.mark.usefixtures("workers_here")
def test_a_value_that_no_run_has_is_not_counted_as_missing(tmp_path: Path) -> None:
    columns = (*TUNED.columns, Column("friends' weight", {}, "final:friends_weight"))
    table = replace(TUNED, columns=columns, tuning=None, seeds=(0,))
    first = reproduce(STUDY, table, "small", tmp_path / "first", at_once=1)
    assert first["rows"][0]["cells"][2] == {"values": [], "absent": True}
    both = reproduce(STUDY, replace(table, seeds=(1,)), "small", tmp_path / "later", at_once=1, stored=first)
    assert both["missing"] == []
    text = markdown(both)
    assert "lack" not in text
    assert f"; {both['date']}. " in text  # once, where all parts are of one day


@pytest.mark.usefixtures("workers_here")
def test_values_above_the_least_are_checked_against_what_runs_record_and_not_added_to(tmp_path: Path) -> None:
    columns = (Column("F − F*, all", {}, "final:validation_loss"), Column("loss", {}, "final:validation_loss"))
    steps = [Row(f"step {step}", {"run.method": "fedavg", "method.step": step}) for step in (0.001, 0.1)]
    table = replace(TUNED, rows=tuple(steps), columns=columns, tuning=None)
    toy = Study("toy", "fednest", "a study for this test", {"small": table}, above_the_least)
    result = reproduce(toy, table, "small", tmp_path, at_once=1)
    slow, fast = (row["cells"] for row in result["rows"])
    assert fast[0]["values"] == [0.0, 0.0]
    assert slow[0]["values"] == [a - b for a, b in zip(slow[1]["values"], fast[1]["values"], strict=True)]
    assert result["least"] == fast[1]["values"]
    assert all(run.agrees(1e-12) for run in check_stored(toy, result, tmp_path, count=4, at_once=1))
    with pytest.raises(UsageError, match="above the least one of all rows"):
        reproduce(toy, table, "small", tmp_path, stored=result)


def test_rows_and_columns_stand_as_in_the_study() -> None:
    def result(row: str, *columns: str) -> dict[str, Any]:
        cells = [{"values": [1.0]}] * len(columns)
        return {"seeds": [0], "columns": [{"name": c} for c in columns], "rows": [{"name": row, "cells": cells}]}

    both = added(result("one", "b", "old"), result("two", "a", "c", "d"), ["two", "one", "a", "b", "c"])
    assert [row["name"] for row in both["rows"]] == ["two", "one"]
    assert [column["name"] for column in both["columns"]] == ["a", "b", "c", "d", "old"]


@pytest.mark.parametrize("change", [{"name": "other"}, {"scale": "paper"}, {"budget": "7 rounds"}])
def test_a_result_of_something_else_is_not_added_to(change: dict[str, str], tmp_path: Path) -> None:
    stored = {"name": "tuned", "scale": "small", "budget": str(TUNED.budget), "seeds": [0], "columns": [], "rows": []}
    with pytest.raises(UsageError, match=f"has {next(iter(change))} .* leave --add-to out"):
        reproduce(STUDY, TUNED, "small", tmp_path, stored={**stored, **change})
    assert [*tmp_path.iterdir()] == []


def test_a_file_that_is_no_result_is_not_added_to(coterie: Command, tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text('{"name": "fednest-minimax"}')
    done = coterie("reproduce", "fednest-minimax", "--add-to", str(tmp_path / "no.json"), "--out", str(tmp_path / "o"))
    assert done.code == 2
    assert "no stored result: it lacks rows, columns or seeds" in done.err
    assert not (tmp_path / "o").exists()


def test_grids_of_unequal_size_are_refused() -> None:
    with pytest.raises(ValueError, match="equal size"):
        Tuning({"a": ({}, {}), "b": ({},)}, {})


def test_data_that_are_missing_are_named_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "none"))
    monkeypatch.setattr("coterie.problems.data.sets.user_cache_path", lambda name: tmp_path / "cache")
    chosen = study("weighted-nodes-table3-cifar10")
    with pytest.raises(UsageError, match=r"data set cifar10 was not found.*coterie data get cifar10"):
        reproduce(chosen, chosen.at("paper"), "paper", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_packages_that_are_missing_are_named_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "none"))
    monkeypatch.setattr("coterie.problems.data.sets.user_cache_path", lambda name: tmp_path / "cache")
    monkeypatch.setattr("coterie.problems.models.text.find_spec", lambda name: None)
    chosen = study("meritfed-goemotions")
    with pytest.raises(UsageError, match=r"data get goemotions.*'coterie\[text\]'.*'coterie\[lora\]'"):
        reproduce(chosen, chosen.at("lora"), "lora", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_page_of_verdicts_names_results_that_are_stored() -> None:
    text = (DOCS / "papers" / "verdicts.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ") and "**" not in line]
    named = [name for row in rows[1:] for name in re.findall(r"`([^`]+)`", row[-1])]
    assert len(named) >= 15
    assert {name for name in named if not (DOCS / "results" / f"{name}.json").is_file()} == set()
