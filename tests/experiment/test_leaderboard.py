"""The leaderboard: one protocol for all, ranks and decisions from tables, and what a part of a run leaves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import UsageError
from coterie.experiment.build import check_needs, make_problem
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.methods.registry import method_entry
from coterie.reproduce.entrants import ALONE, ENTRANTS, NEEDS_NORM
from coterie.reproduce.leaderboard import (
    NAMES,
    SCALES,
    SITUATIONS,
    STUDIES,
    TUNING_SEED,
    contests,
    decisions,
    leaderboard,
    page,
    ranking,
)
from coterie.reproduce.reading import Finished, better_off, read
from coterie.reproduce.running import sample
from coterie.testing.methods import SMALL

Command = Callable[..., Any]


def stored(name: str, values: dict[str, list[float]], worst: dict[str, list[float]] | None = None) -> dict[str, Any]:
    """A table as it is stored, with the accuracies of each method by seed."""
    kind = next(c.kind for c in SCALES["small"] if c.name == name)
    columns = [{"name": "test accuracy", "form": ".3f"}, {"name": "worst client", "form": ".3f"}]
    rows = [
        {"name": method, "cells": [{"values": found}, {"values": (worst or values)[method]}]}
        for method, found in values.items()
    ]
    about = {"scale": "small", "about": f"Made up, {kind}.", "seeds": [0, 1], "date": "2026-01-01", "corner": "method"}
    return {"name": f"leaderboard-{name}", **about, "columns": columns, "rows": rows}


def test_every_scale_has_the_same_problems_and_the_issue_list() -> None:
    names = [c.name for c in SCALES["small"]]
    assert names == [c.name for c in SCALES["paper"]] or set(names) == {c.name for c in SCALES["paper"]}
    assert {"friends", "mixture", "noisy-clients", "byzantine", "heart-disease"} < set(names)
    assert {f"groups-{i}" for i in range(1, 5)} | {"dirichlet-0.1", "dirichlet-0.5"} < set(names)
    assert {study.name for study in STUDIES} == {f"leaderboard-{name}" for name in names}
    assert len(SITUATIONS) <= 8
    assert {name for situation in SITUATIONS for name in situation.problems} <= set(names)


def test_everybody_is_tuned_with_the_same_effort_on_a_seed_of_its_own() -> None:
    for study in STUDIES:
        for table in study.scales.values():
            assert table.tuning is not None
            assert {len(grid) for grid in table.tuning.grids.values()} == {4}
            assert set(table.tuning.grids) == {row.name for row in table.rows}
            assert table.budget is not None
            assert TUNING_SEED not in table.seeds
            tried = {table.folder(trial.settings) for trial in table.trials()}
            assert len(tried) == 4 * len(table.rows)
            for trial in table.trials():
                assert trial.settings["run.budget"] == 1_000_000 * table.budget.amount


@pytest.mark.parametrize("contest", [c for c in SCALES["small"] if not c.data], ids=lambda c: c.name)
def test_every_entrant_fits_every_problem(contest: Any) -> None:
    table = next(s for s in STUDIES if s.name == f"leaderboard-{contest.name}").at("small")
    problem = make_problem(load(sets=table.settings(table.rows[0], table.columns[0], 0)))
    assert (problem.tests is not None) == (contest.kind == "everyone")
    assert (problem.selection is not None) == (contest.kind == "target")
    wanted = [name for name in ENTRANTS[contest.kind] if contest.norm or name not in NEEDS_NORM]
    assert [row.name for row in table.rows] == wanted
    for trial in table.trials()[::4]:
        config = load(sets=trial.settings)
        method = method_entry(config.run.method).make(**config.method)
        check_needs(method, problem, config.run.problem)
        method.init(problem, problem.clients)


def test_ranks_are_of_methods_with_all_problems() -> None:
    one = stored("friends", {"a": [0.9, 0.9], "b": [0.8, 0.8], "c": [0.5, 0.7]})
    two = stored("groups-1", {"a": [0.9, 0.7], "b": [0.5, 0.5], "c": [0.9]})  # a seed of c is missing
    found = ranking([one, two])
    assert found["problems"] == ["friends", "groups-1"]
    assert found["ranks"] == {"a": 1.0, "b": 2.0}
    assert found["means"] == {"a": pytest.approx(0.85), "b": pytest.approx(0.65)}
    assert found["unranked"] == ["c"]
    assert found["difference"] == pytest.approx(1.960 * (6 / 12) ** 0.5, abs=1e-3)
    assert ranking([])["ranks"] == {}


def test_the_highest_mean_stands_beside_the_best_rank() -> None:
    first = {ALONE: [0.6, 0.6], "fedavg": [0.1, 0.1], "ditto": [0.5, 0.5]}
    others = {ALONE: [0.6, 0.6], "fedavg": [0.62, 0.62], "ditto": [0.5, 0.5]}
    names = ("friends-everyone", "groups-1-everyone", "groups-2-everyone", "groups-3-everyone")
    tables = [stored(name, others if i else first) for i, name in enumerate(names)]
    line = next(line for line in decisions(tables) if line["situation"].endswith("groups"))
    assert (line["take"], line["highest"]) == ("fedavg", ALONE)  # three of four problems, and far behind on one


def test_decisions_are_drawn_from_the_results() -> None:
    values = {ALONE: [0.6, 0.6], "fedavg": [0.7, 0.7], "collaborate": [0.8, 0.8], "ditto": [0.75, 0.75]}
    worst = {ALONE: [0.1, 0.1], "fedavg": [0.2, 0.2], "collaborate": [0.3, 0.3], "ditto": [0.4, 0.4]}
    names = [name for name in NAMES if name.startswith(("dirichlet", "friends-e")) or name.endswith("-everyone")]
    lines = {line["situation"]: line for line in decisions([stored(name, values, worst) for name in names])}
    assert "one target; clients attack" not in lines  # byzantine has no results
    grouped = lines["everyone wants a model; there are groups"]
    assert (grouped["take"], grouped["second"]) == ("collaborate", "ditto")
    assert grouped["means"] == {"collaborate": 0.8, "ditto": 0.75, "fedavg": 0.7, ALONE: 0.6}
    assert lines["everyone, and the server may see sums only"]["take"] == "ditto"  # collaborate shows updates
    assert lines["everyone, and the worst client counts"]["take"] == "ditto"
    (alone,) = decisions([stored("heart-disease", {ALONE: [0.8, 0.8], "fedavg": [0.7, 0.7]})])
    assert alone["take"] == ALONE  # then collaboration does not pay
    assert alone["problems"] == "1 of 1"
    text = page("small", [stored(name, values, worst) for name in names])
    cells = ("5 of 5", "**collaborate**", "0.800", "ditto 0.750", "collaborate 0.800", "0.700", "0.600")
    line = f"| everyone wants a model; there are groups | {' | '.join(cells)} |"
    assert line in text
    assert text.count("#### ") == len(names)


def test_only_what_one_run_tells_can_be_checked() -> None:
    for study in STUDIES:
        table = study.at("small")
        values = {row.name: [[0.5] for _ in table.columns] for row in table.rows}
        result = {
            "scale": "small",
            "seeds": [0],
            "columns": [{"name": column.name} for column in table.columns],
            "rows": [{"name": name, "cells": [{"values": v} for v in found]} for name, found in values.items()],
        }
        reads = {cell.column.read for cell, _, _ in sample(study, result, 1000)}
        assert {"megabytes", "rounds"} < reads
        assert not [read for read in reads if read.startswith(("seconds", "better"))]


def test_better_off_counts_the_clients_that_gain() -> None:
    def run(*accuracy: float) -> Finished:
        return Finished({"personal": {"accuracy": list(accuracy), "rows": [1.0, 1.0, 2.0]}, "seconds": 3.5}, [], {})

    together, alone = run(0.9, 0.5, 0.7), run(0.8, 0.5, 0.9)
    assert better_off(together, alone) == pytest.approx(1 / 3)
    assert better_off(alone, alone) == 0.0
    assert better_off(together, None) is None
    assert better_off(together, Finished({}, [], {})) is None
    assert read(together, "personal:accuracy") == pytest.approx(0.7)
    assert read(together, "personal:by_rows") == pytest.approx((0.9 + 0.5 + 1.4) / 4)
    assert read(together, "personal:nothing") is None
    assert read(together, "seconds") == 3.5


def test_a_run_leaves_the_accuracy_of_every_client() -> None:
    sets = {"run.problem": "friends", "run.method": "fedavg", "run.rounds": 1, "run.baselines": []}
    config = load(sets={**sets, **{f"problem.{key}": value for key, value in SMALL["friends"].items()}})
    from coterie.experiment.build import assemble

    result = run_rounds(assemble(config), None)
    personal = result.summary["personal"]
    assert len(personal["accuracy"]) == len(personal["rows"]) == len(personal["validation_accuracy"]) == 5
    mean = sum(personal["accuracy"]) / 5
    assert mean == pytest.approx(result.summary["final"]["personal_accuracy"], abs=1e-6)
    assert min(personal["accuracy"]) == pytest.approx(result.summary["final"]["personal_accuracy_worst"], abs=1e-6)


def test_problems_without_data_are_named_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    monkeypatch.setattr("coterie.problems.data.sets.user_cache_path", lambda name: tmp_path)
    found, missing = contests("small")
    assert "heart-disease" not in [contest.name for contest in found]
    assert [text.split()[0] for text in missing] == ["heart-disease", "dirichlet-0.1", "dirichlet-0.5"]
    assert missing[0].startswith("heart-disease is left out: ")
    assert "coterie data get heart-disease" in missing[0]
    with pytest.raises(UsageError, match="coterie data get heart-disease"):
        contests("small", ["heart-disease"])
    with pytest.raises(UsageError, match="unknown problem of the leaderboard"):
        contests("small", ["friend"])
    with pytest.raises(UsageError, match="unknown scale"):
        contests("large")
    with pytest.raises(UsageError, match=r"unknown method of the leaderboard.*did you mean fedavg"):
        leaderboard("small", found, tmp_path / "out", methods=["fedavgg"])


def test_an_empty_folder_is_read(coterie: Command, tmp_path: Path) -> None:
    done = coterie("leaderboard", "--read", "--problems", "friends", "--out", tmp_path / "board")
    assert done.code == 0
    assert "There are no results yet." in done.out
    result = json.loads((tmp_path / "board/leaderboard-small.json").read_text())
    assert result == {"scale": "small", "rankings": {}, "decisions": []}


@pytest.mark.slow
def test_it_runs_in_parts_and_resumes(coterie: Command, tmp_path: Path) -> None:
    board = tmp_path / "board"
    common = ("leaderboard", "--problems", "groups-4-everyone,groups-4", "--seeds", "0", "--jobs", "1", "--out", board)
    assert coterie(*common, "--methods", "local-train,fedavg").code == 0
    before = {path: path.stat().st_mtime_ns for path in board.rglob("summary.json")}
    assert len(before) == 2 * 2 * 5
    assert coterie(*common, "--methods", "collaborate").code == 0
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert coterie("leaderboard", "--read", "--seeds", "0", "--out", board).code == 0
    result = json.loads((board / "leaderboard-small.json").read_text())
    assert result["rankings"]["everyone"]["problems"] == ["groups-4-everyone"]
    assert set(result["rankings"]["everyone"]["ranks"]) == {"local-train", "fedavg", "collaborate"}
    assert set(result["rankings"]["target"]["ranks"]) == {"local-train", "fedavg"}
    table = json.loads((board / "groups-4-everyone/leaderboard-groups-4-everyone-small.json").read_text())
    cells = {row["name"]: row["cells"] for row in table["rows"]}
    assert cells["local-train"][3]["values"] == [0.0]  # nobody is better off than alone
    assert 0.0 <= cells["collaborate"][3]["values"][0] <= 1.0
