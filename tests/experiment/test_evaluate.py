"""run.evaluate: records before the last look at a sample of the test rows; nothing else does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import assert_same_results, lines, summary_of

import coterie
from coterie.experiment import checkpoint
from coterie.experiment import run as experiment
from coterie.experiment.build import assemble
from coterie.experiment.config import Config, resolve
from coterie.experiment.loop import run_rounds
from coterie.experiment.measuring import MOST, sampled
from coterie.numerics import Draw
from coterie.problems.nested import Nested

pytestmark = pytest.mark.usefixtures("no_waiting_for_disks")
ROWS = 37


def configured(evaluate: Any, rounds: int = 4, **run: Any) -> Config:
    """A small run on digits."""
    run = {"problem": "friends", "rounds": rounds, "threads": 1, "checkpoint": 1, "baselines": [], **run}
    return resolve({"run": {**run, "evaluate": evaluate}, "federation": {"mode": "vmap"}})


def unwatched(name: str, is_baseline: bool) -> None:
    """Nobody watches."""


def without(line: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in line.items() if k not in (*names, "seconds")}


TESTED = ("test_loss", "test_accuracy")


def test_only_test_measures_before_the_last_record_are_of_a_sample(tmp_path: Path) -> None:
    some, every = tmp_path / "some", tmp_path / "every"
    experiment.run(configured(ROWS), some, unwatched)
    experiment.run(configured("all"), every, unwatched)
    pairs = list(zip(lines(some / "metrics.jsonl"), lines(every / "metrics.jsonl"), strict=True))
    for mine, whole in pairs:
        assert without(mine, *TESTED) == without(whole, *TESTED), "validation rows are used in full"
    assert [mine["test_loss"] == whole["test_loss"] for mine, whole in pairs] == [False] * 4 + [True]
    for mine, _ in pairs[:-1]:
        right = mine["test_accuracy"] * ROWS
        assert right == pytest.approx(round(right))
    one, two = summary_of(some), summary_of(every)
    assert one["final"] == two["final"]
    assert one["best"] == two["best"]
    assert (some / "model-best.safetensors").read_bytes() == (every / "model-best.safetensors").read_bytes()


def test_the_best_model_is_reported_on_all_rows() -> None:
    """Also where it is not the last one."""
    results = [run_rounds(assemble(configured(evaluate)), None) for evaluate in (ROWS, "all")]
    assert results[0].best is not None
    assert without(results[0].best.line) == without(results[1].best.line)
    parts = assemble(configured(ROWS, method="fedavg", rounds=12, seed=1))
    result = run_rounds(parts, None)
    assert result.best is not None
    theta = result.best.view.model
    assert result.best.line["test_loss"] == parts.problem.task.measure(theta, parts.problem.test, "test")["test_loss"]


def test_small_test_sets_are_evaluated_in_full_by_default() -> None:
    config = configured("auto")
    problem = assemble(config).problem
    assert problem.test.capacity <= MOST
    assert sampled(problem, config.run) is problem
    columns = tuple(c.repeat(100, *[1] * (c.dim() - 1)) for c in problem.test.columns)
    many = replace(problem.test, columns=columns, count=problem.test.count * 100, capacity=problem.test.capacity * 100)
    large = replace(problem, test=many)
    assert sampled(large, config.run).test.capacity == MOST
    assert sampled(large, configured("all").run) is large
    assert sampled(large, configured(ROWS, stop="reached(test_accuracy, 0.99)").run) is large


def test_a_sample_has_different_rows_of_the_test_set() -> None:
    problem = assemble(configured("all")).problem
    few = problem.with_test_rows(ROWS, Draw.of(0)).test.all().inputs.flatten(1)
    every = problem.test.all().inputs.flatten(1)
    found = [int((every == row).all(1).nonzero()[0, 0]) for row in few]
    assert len(few) == ROWS
    assert found == sorted(found)
    assert torch.equal(few, problem.with_test_rows(ROWS, Draw.of(0)).test.all().inputs.flatten(1))


def test_nested_problems_with_one_test_shard() -> None:
    def loss(x: Any, y: Any, batch: Any) -> Any:
        return (batch.inputs @ y - batch.labels).square().mean() + (x - y).square().sum()

    rows = (torch.randn(50, 3), torch.randn(50))
    problem = Nested(loss, loss).on([rows] * 2, x=torch.zeros(3), y=torch.zeros(3), test=rows)
    few = problem.with_test_rows(ROWS, Draw.of(0))
    assert few.test.client(0).all().inputs.shape == (ROWS, 3)
    assert problem.with_test_rows(50, Draw.of(0)) is problem
    by_client = Nested(loss, loss).on([rows] * 2, x=torch.zeros(3), y=torch.zeros(3), test=[rows] * 2)
    assert by_client.with_test_rows(ROWS, Draw.of(0)) is by_client
    fit = coterie.fit(problem, coterie.methods.fednest(), 2, evaluate=ROWS)
    whole = coterie.fit(problem, coterie.methods.fednest(), 2, evaluate="all")
    assert fit.history[0]["test_loss"] != whole.history[0]["test_loss"]
    assert fit.history[-1]["test_loss"] == whole.history[-1]["test_loss"]


def test_a_resumed_run_has_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    experiment.run(configured(ROWS), whole, unwatched)
    save, saved = checkpoint.save, []

    def interrupted(*args: Any) -> None:
        save(*args)
        saved.append(1)
        if len(saved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", interrupted)
    summary = experiment.run(configured(ROWS), broken, unwatched)
    assert summary["outcome"] == "stopped"
    monkeypatch.undo()
    parts = assemble(configured("all", rounds=summary["rounds"]))
    assert summary["final"] == run_rounds(parts, None).summary["final"], "on all rows, wherever it stopped"
    assert experiment.resume(broken, unwatched)["outcome"] == "finished"
    assert_same_results(whole, broken)


def test_evaluate_may_change_when_a_run_is_resumed() -> None:
    assert "run.evaluate" in checkpoint.MAY_CHANGE
