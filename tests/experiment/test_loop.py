"""How runs end, and that an interruption at any point leaves a folder that can be resumed to the same files."""

import json
import os
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import FILES, assert_same_results, happened, lines
from safetensors.torch import load_file

from coterie.errors import RunError, UsageError
from coterie.experiment import checkpoint, loop
from coterie.experiment import run as experiment
from coterie.experiment.build import Parts, assemble
from coterie.experiment.config import Config, load, resolve
from coterie.experiment.loop import run_rounds
from coterie.experiment.records import Records
from coterie.federation import Federation
from coterie.numerics import Draw
from coterie.problems.base import View
from coterie.problems.weighting import Weighting

Contents = Callable[[Path], dict[str, str]]

pytestmark = pytest.mark.usefixtures("no_waiting_for_disks")


def configured(rounds: int = 6, by: str = "meritfed", baselines: tuple[str, ...] = (), **more: Any) -> Config:
    """A small run; more are tables."""
    run = {"method": by, "problem": "quadratic", "rounds": rounds, "threads": 1, "checkpoint": 1}
    return resolve(
        {
            "run": {**run, "baselines": list(baselines), **more.get("run", {})},
            "method": more.get("method", {}),
            "problem": {"clients": 4, "friends": 2, "dimension": 3, "rows": 8},
            "federation": {"mode": "vmap", **more.get("federation", {})},
        }
    )


def unwatched(name: str, is_baseline: bool) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run, with absent and rejected clients and two baselines."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    experiment.run(EVENTFUL, folder, unwatched)
    return folder


EVENTFUL = configured(
    baselines=("fedavg", "local-train"),
    run={"record": 2, "checkpoint": 3},
    federation={"active": 0.6, "norm": 2.5},
    method={"batch": 4, "mirror_steps": 2},
)


class Interrupts:
    """An observer that presses Ctrl-C in mid-round, or does something else, when a round is recorded."""

    def __init__(self, at: int, act: Callable[[], None] | None = None) -> None:
        self.at, self.act = at, act

    def __call__(self, name: str, is_baseline: bool) -> "Interrupts":
        return self

    def started(self, parts: Parts, done: int) -> None:
        pass

    def recorded(self, line: dict[str, Any], view: View) -> None:
        if line["round"] == self.at:
            if self.act is None:
                raise KeyboardInterrupt
            self.act()

    def ended(self, summary: dict[str, Any]) -> None:
        pass


def test_the_uninterrupted_run_has_all_that_the_others_are_compared_in(whole: Path) -> None:
    kinds = [event["event"] for event in happened(whole)]
    assert kinds.count("rejected") > 0
    assert [line["round"] for line in lines(whole / "metrics.jsonl")] == [0, 2, 4, 6]
    assert sorted(path.name for path in (whole / "baselines").iterdir()) == ["fedavg", "local-train"]
    assert [p.name for p in sorted((whole / "checkpoint").iterdir())] == [
        "00000003.safetensors",
        "00000006.safetensors",
    ]


# outcomes


def test_a_finished_run(tmp_path: Path) -> None:
    result = run_rounds(assemble(configured()), tmp_path)
    assert (result.summary["outcome"], result.summary["rounds"]) == ("finished", 6)
    assert result.history == [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert result.summary["communication"] == result.ledger.total._asdict() == result.history[-1]["communication"]
    assert json.loads((tmp_path / "summary.json").read_text()) == result.summary
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"].reshape(-1), result.view.model)


@pytest.mark.parametrize(("method", "knob"), [("meritfed", "step"), ("local-train", "step"), ("fedavg", "step")])
def test_a_diverged_run_names_the_knob_and_keeps_the_last_good_model(tmp_path: Path, method: str, knob: str) -> None:
    wild, tame = tmp_path / "wild", tmp_path / "tame"
    wild.mkdir()
    tame.mkdir()
    config = configured(200, method, method={knob: 1e3})
    summary = run_rounds(assemble(config), wild).summary
    assert summary["outcome"] == "diverged"
    good = summary["rounds"]
    assert 0 < good < 50
    assert f"round {good + 1}; the model of round {good} is kept. Lower method.{knob} (now 1000)" in summary["message"]
    run_rounds(assemble(config.with_run(rounds=good)), tame)
    assert (wild / "model.safetensors").read_bytes() == (tame / "model.safetensors").read_bytes()
    assert (wild / "metrics.jsonl").read_bytes().count(b"\n") == good + 1
    assert [line["round"] for line in lines(wild / "metrics.jsonl")] == list(range(good + 1))
    assert all(bool(torch.isfinite(t).all()) for t in load_file(wild / "model.safetensors").values())
    again = run_rounds(assemble(config), wild, resume=True).summary
    assert (again["outcome"], again["rounds"], again["message"]) == ("diverged", good, summary["message"])


@pytest.mark.parametrize(("wild", "absent", "diverged"), [(1, 0, True), (2, 2, True), (1, 2, False), (0, 2, False)])
def test_half_of_the_clients_that_are_not_finite_are_a_divergence(wild: int, absent: int, diverged: bool) -> None:
    reasons = ["not finite"] * wild + ["timeout"] * absent
    events = [{"event": "lost", "phase": "a", "client": k, "reason": reason} for k, reason in enumerate(reasons)]
    assert loop._not_finite(events, "a") is diverged
    assert not loop._not_finite(events, "b")


def _no_solution() -> object:
    return torch.linalg.solve(torch.zeros(2, 2), torch.ones(2))


UNCOMPUTABLE: dict[str, Callable[[], object]] = {
    "division": lambda: 1.0 / 0,
    "overflow": lambda: int(torch.tensor(torch.inf)),
    "no number": lambda: round(torch.tensor(torch.nan).item()),
    "torch": _no_solution,
    "numpy": lambda: np.linalg.inv(np.zeros((2, 2))),
}


def in_round(parts: Parts, at: int, act: Callable[[], object]) -> Parts:
    """The same parts, whose method does something at the end of a round."""
    method = parts.method

    def round(fed: Federation, state: Any, draw: Draw) -> Any:
        after = method.round(fed, state, draw)
        if fed.round == at:
            act()
        return after

    return parts._replace(method=replace(method, round=round))


@pytest.mark.parametrize("what", UNCOMPUTABLE)
def test_numbers_that_a_method_cannot_compute_with_end_the_run_as_failed(tmp_path: Path, what: str) -> None:
    config = configured(by="fedavg", run={"compile": False})
    result = run_rounds(in_round(assemble(config), 4, UNCOMPUTABLE[what]), tmp_path)
    assert (result.summary["outcome"], result.summary["rounds"]) == ("failed", 3)
    said = result.summary["message"]
    assert said.startswith("in round 4: after shared/local-steps, fedavg met numbers that it cannot compute with (")
    assert "federation.norm" in said
    assert [line["round"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    again = run_rounds(assemble(config), tmp_path, resume=True)
    assert (again.summary["outcome"], again.summary["rounds"]) == ("finished", 6)


def test_a_measure_that_cannot_be_computed_ends_the_run_as_failed_and_leaves_half_a_round_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, measured = assemble(configured(by="fedavg")), loop.measured
    seen: list[int] = []

    def wild(problem: Any, view: View) -> Any:
        seen.append(len(seen))
        return 1 / 0 if len(seen) == 4 else measured(problem, view)

    monkeypatch.setattr(loop, "measured", wild)
    summary = run_rounds(parts, tmp_path).summary
    assert (summary["outcome"], summary["rounds"]) == ("failed", 2)
    assert [line["round"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("error", [ValueError("of another kind"), RuntimeError("a bug"), IndexError("a bug")])
def test_any_other_error_of_a_method_goes_through(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        run_rounds(in_round(assemble(configured(by="fedavg", run={"compile": False})), 2, fail), None)


def test_rounds_without_answers_are_skipped_and_counted(tmp_path: Path) -> None:
    config = configured(federation={"norm": 1e-9}, method={"step": 0.1})  # a step that is set needs no curvatures
    parts = assemble(config)
    result = run_rounds(parts, tmp_path)
    assert (result.summary["outcome"], result.summary["rounds"]) == ("failed", 6)
    why = "no round trained anything: in round 1 no client answered shared/gradient (client 0: rejected"
    assert why in result.summary["message"]
    again = run_rounds(assemble(config), tmp_path, resume=True).summary
    assert (again["outcome"], again["message"]) == ("failed", result.summary["message"])
    events = lines(tmp_path / "events.jsonl")
    skipped = [event for event in events if event["event"] == "skipped"]
    rejected = [event for event in events if event["event"] == "rejected"]
    assert [event["round"] for event in skipped] == [1, 2, 3, 4, 5, 6]
    assert "no client answered" in skipped[0]["reason"]
    assert [(e["round"], e["client"]) for e in rejected] == [(t, k) for t in range(1, 7) for k in range(4)]
    assert "above the limit 1e-09" in rejected[0]["reason"]
    assert torch.equal(result.view.model, parts.problem.start)
    assert result.ledger.total.rounds == 6


def test_a_round_that_nobody_attends_is_skipped(tmp_path: Path) -> None:
    result = run_rounds(assemble(configured(40, federation={"active": 0.2})), tmp_path)
    empty = [event["round"] for event in lines(tmp_path / "events.jsonl") if event["event"] == "skipped"]
    assert 0 < len(empty) < 40
    assert result.summary["rounds"] == 40
    assert result.ledger.total.rounds == 40 - len(empty)


# interruptions


def test_ctrl_c_in_mid_round_saves_and_says_how_to_go_on(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    summary = experiment.run(EVENTFUL, folder, Interrupts(4))
    assert (summary["outcome"], summary["rounds"]) == ("stopped", 3)
    assert summary["message"].endswith(f"coterie resume {folder}")
    assert [line["round"] for line in lines(folder / "metrics.jsonl")] == [0, 2]
    assert "distance_to_optimum" in summary["final"]
    assert summary["final"] != {k: v for k, v in lines(folder / "metrics.jsonl")[-1].items() if k in summary["final"]}
    done = experiment.resume(folder, unwatched)
    assert done["outcome"] == "finished"
    assert_same_results(whole, folder)
    assert [e["round"] for e in lines(folder / "events.jsonl") if e["event"] == "resumed"] == [3]


def test_ctrl_c_before_the_first_round_is_done(tmp_path: Path, whole: Path) -> None:
    """The start is recorded once, not again by the resumed run."""
    recording, training = tmp_path / "recording", tmp_path / "training"
    assert experiment.run(EVENTFUL, recording, Interrupts(0))["rounds"] == 0
    assert lines(recording / "metrics.jsonl") == []
    interrupt_at(1, "round", EVENTFUL, training)
    assert [line["round"] for line in lines(training / "metrics.jsonl")] == [0]
    for folder in (recording, training):
        experiment.resume(folder, unwatched)
        assert_same_results(whole, folder)


POINTS: dict[str, tuple[Any, str]] = {
    "metrics": (Records, "metrics"),
    "weights": (Records, "weights"),
    "event": (Records, "event"),
    "flush": (Records, "flush"),
    "measure": (Weighting, "measure"),
    "round": (None, ""),
    "checkpoint": (checkpoint, "save"),
    "rename": (os, "replace"),
    "sync": (os, "fsync"),
}


def interrupt_at(count: int, point: str, config: Config, folder: Path, *, after: bool = False) -> None:
    """Run with Ctrl-C at the count-th passage of a point."""
    with pytest.MonkeyPatch.context() as patch:
        passed = 0

        def interrupted(real: Callable[..., Any]) -> Callable[..., Any]:
            def stand_in(*args: Any, **kwargs: Any) -> Any:
                nonlocal passed
                passed += 1
                if passed == count and not after:
                    raise KeyboardInterrupt
                result = real(*args, **kwargs)
                if passed == count:
                    raise KeyboardInterrupt
                return result

            return stand_in

        owner, name = POINTS[point]
        if owner is None:
            build = experiment.assemble

            def assemble_interrupted(config: Config, *more: Any) -> Parts:
                parts = build(config, *more)
                return parts._replace(method=replace(parts.method, round=interrupted(parts.method.round)))

            patch.setattr(experiment, "assemble", assemble_interrupted)
        else:
            patch.setattr(owner, name, interrupted(getattr(owner, name)))
        with suppress(RunError):  # outside of the rounds there is nobody to return a summary
            experiment.run(config, folder, unwatched)
    assert passed >= count, "the point was never passed"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_ctrl_c_anywhere(tmp_path: Path, whole: Path, point: str, count: int, after: bool) -> None:
    folder = tmp_path / "run"
    interrupt_at(count, point, EVENTFUL, folder, after=after)
    if not (folder / "config.toml").exists():
        assert (point, count) in (("rename", 1), ("sync", 1))
        experiment.run(EVENTFUL, folder, unwatched)
    experiment.resume(folder, unwatched)
    assert_same_results(whole, folder)
    assert not list(folder.rglob("*.tmp"))


def test_sigterm_is_like_ctrl_c(tmp_path: Path, whole: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    folder = tmp_path / "run"
    summary = experiment.run(EVENTFUL, folder, Interrupts(4, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert (summary["outcome"], summary["rounds"]) == ("stopped", 3)
    assert signal.getsignal(signal.SIGTERM) is before
    experiment.resume(folder, unwatched)
    assert_same_results(whole, folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("in_a_folder", [False, True])
def test_rounds_that_are_interrupted_do_not_return(tmp_path: Path, number: signal.Signals, in_a_folder: bool) -> None:
    folder = tmp_path if in_a_folder else None
    with pytest.raises(loop.Interrupted) as stop:
        run_rounds(assemble(configured()), folder, Interrupts(4, lambda: os.kill(os.getpid(), number)))
    result = stop.value.result
    assert (result.summary["outcome"], result.summary["rounds"]) == ("stopped", 3)
    assert [line["round"] for line in result.history] == [0, 1, 2, 3]
    assert str(stop.value) == (f"stopped by the user; resume with: coterie resume {folder}" if folder else "")


def held_by(run: Any) -> int:
    """How many values the loop's own containers hold."""

    def count(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(map(count, value.values()))
        return 1 + sum(map(count, value)) if isinstance(value, list | tuple | deque) else 1

    own = {k: v for k, v in vars(run).items() if k not in ("parts", "records", "observer", "compiling")}
    return count(own) + count(vars(run.compiling))


@pytest.mark.parametrize("stop", [None, "patience(objective, 1000)"])
def test_what_a_run_holds_does_not_grow_with_the_rounds_that_a_folder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str | None
) -> None:
    held, complete = {}, loop._Run.complete

    def counted(run: Any, done: Any) -> None:
        complete(run, done)
        held[done.rounds] = held_by(run)

    monkeypatch.setattr(loop._Run, "complete", counted)
    result = run_rounds(assemble(configured(40, run={"stop": stop, "compile": False})), tmp_path)
    each = 0 if stop is None else 3  # a line with the round and the measure of the rule
    assert held[40] - held[20] == 20 * each
    assert [line["round"] for line in result.history] == list(range(41))
    assert len(result.history[0]) == len(result.history[20])


def test_a_crash_keeps_what_was_done(tmp_path: Path, whole: Path) -> None:
    class Crashes(Interrupts):
        def recorded(self, line: dict[str, Any], view: View) -> None:
            if line["round"] == self.at:
                raise ZeroDivisionError

    folder = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        experiment.run(EVENTFUL, folder, Crashes(4))
    assert [path.name for path in (folder / "checkpoint").iterdir()] == ["00000003.safetensors"]
    experiment.resume(folder, unwatched)
    assert_same_results(whole, folder)


# resuming


def test_a_finished_run_is_not_run_again(tmp_path: Path, contents: Contents) -> None:
    folder = tmp_path / "run"
    summary = experiment.run(configured(baselines=("fedavg",)), folder, unwatched)
    before, times = contents(folder), {p: p.stat().st_mtime_ns for p in folder.rglob("*")}

    def watch(name: str, is_baseline: bool) -> Interrupts:
        watcher = Interrupts(0)
        watcher.started = lambda parts, done: pytest.fail("it ran")  # type: ignore[method-assign]
        return watcher

    assert experiment.resume(folder, watch) == summary
    assert contents(folder) == before
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == times


def test_more_rounds_in_config_toml_lengthen_a_finished_run(tmp_path: Path) -> None:
    long, short = tmp_path / "long", tmp_path / "short"
    experiment.run(configured(8), long, unwatched)
    experiment.run(configured(6), short, unwatched)
    text = (short / "config.toml").read_text()
    (short / "config.toml").write_text(text.replace("rounds = 6", "rounds = 8"))
    assert experiment.resume(short, unwatched)["rounds"] == 8
    assert_same_results(long, short)


@pytest.mark.parametrize("baseline", ["fedavg", "local-train"])
def test_resuming_in_the_middle_of_a_baseline(tmp_path: Path, whole: Path, baseline: str) -> None:
    folder = tmp_path / "run"

    def watch(name: str, is_baseline: bool) -> Interrupts | None:
        return Interrupts(4) if name == baseline else None

    summary = experiment.run(EVENTFUL, folder, watch)
    assert summary["outcome"] == "stopped"
    assert summary["message"].endswith(f"coterie resume {folder}")
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "finished"
    assert json.loads((folder / "baselines" / baseline / "summary.json").read_text())["rounds"] == 3
    ran: list[str] = []

    def noted(name: str, is_baseline: bool) -> Interrupts:
        watcher = Interrupts(-1)
        watcher.started = lambda parts, done: ran.append(f"{name} after {done}")  # type: ignore[method-assign]
        return watcher

    done = experiment.resume(folder, noted)
    assert done["outcome"] == "finished"
    assert ran == (["fedavg after 3", "local-train after 0"] if baseline == "fedavg" else ["local-train after 3"])
    assert_same_results(whole, folder)


def test_baselines_are_compared_in_the_summary(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    assert list(summary["baselines"]) == ["fedavg", "local-train"]
    for name, one in summary["baselines"].items():
        own = json.loads((whole / "baselines" / name / "summary.json").read_text())
        assert one == {k: own[k] for k in ("outcome", "final", "communication", "seconds")}
        assert load(whole / "baselines" / name / "config.toml").run.method == name
    assert summary["baselines"]["local-train"]["communication"]["bytes_up"] == 0


def test_a_damaged_newest_checkpoint_costs_some_rounds_and_nothing_else(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    config = EVENTFUL.with_run(checkpoint=1)
    experiment.run(config, folder, Interrupts(4, lambda: (_ for _ in ()).throw(KeyboardInterrupt)))
    newest = max((folder / "checkpoint").iterdir())
    assert newest.name == "00000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-5])
    summary = experiment.resume(folder, unwatched)
    assert "00000003.safetensors: it is" in summary["notes"][0]
    noted = [e for e in lines(folder / "events.jsonl") if e["event"] == "resumed"]
    assert noted[0]["round"] == 2
    assert "00000003.safetensors" in noted[0]["reason"]
    for name in FILES:
        assert (whole / name).read_bytes() == (folder / name).read_bytes()
    assert lines(whole / "metrics.jsonl") == lines(folder / "metrics.jsonl")


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run interrupted after round 3."""
    folder = tmp_path / "stopped"
    experiment.run(configured(), folder, Interrupts(4))
    return folder


def cut(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])

    return apply


def edited(name: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return apply


def all_checkpoints(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for path in (folder / "checkpoint").iterdir():
            path.write_bytes(change(path.read_bytes()))

    return apply


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (all_checkpoints(lambda data: data[: len(data) // 2]), "no checkpoint in .* can be used .*Start again"),
        (all_checkpoints(lambda data: data[:-1] + bytes([data[-1] ^ 1])), "its checksum does not match"),
        (all_checkpoints(lambda data: b""), "it is cut off"),
        (edited("config.toml", "seed = 0", "seed = 1"), "made with run.seed = 0, but config.toml says 1"),
        (edited("config.toml", "mirror_steps = 10", "mirror_steps = 9"), "made with method.mirror_steps = 10"),
        (edited("config.toml", 'dtype = "float32"', 'dtype = "float64"'), "made with run.dtype = 'float32'"),
        (edited("config.toml", "version = 1", "version = 2"), "version 2; this coterie reads up to 1"),
        (edited("config.toml", "rounds = 6", "rounds = six"), "not valid TOML"),
        (cut("metrics.jsonl"), "metrics.jsonl is .* bytes long, but the checkpoint was made at"),
        (cut("weights.csv"), "weights.csv is .* bytes long, but the checkpoint was made at"),
        (edited("metrics.jsonl", '{"round": 1', '{"round"  1'), "metrics.jsonl is damaged"),
        (edited("metrics.jsonl", '{"round": 1', '["round", 1'), "metrics.jsonl is damaged"),
        (edited("summary.json", '"outcome"', '"outcame"'), "summary.json is damaged .*delete it and resume"),
        (edited("summary.json", "{", ""), "summary.json is damaged"),
    ],
)
def test_a_damaged_folder_is_refused_and_left_as_it_is(
    stopped: Path, contents: Contents, damage: Callable[[Path], None], complaint: str
) -> None:
    damage(stopped)
    before = contents(stopped)
    with pytest.raises(UsageError, match=complaint) as error:
        experiment.resume(stopped, unwatched)
    assert "\n" not in str(error.value)
    assert contents(stopped) == before


def test_without_checkpoints_a_run_begins_anew(stopped: Path, tmp_path: Path) -> None:
    for path in (stopped / "checkpoint").iterdir():
        path.unlink()
    summary = experiment.resume(stopped, unwatched)
    experiment.run(configured(), tmp_path / "whole", unwatched)
    assert_same_results(tmp_path / "whole", stopped)
    assert "no checkpoint: the run, recorded up to round 3, starts over" in summary["notes"][0]
    (event,) = [event for event in lines(stopped / "events.jsonl") if event["event"] == "resumed"]
    assert (event["round"], event["reason"]) == (0, summary["notes"][0])


def test_what_is_no_result_folder_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        experiment.resume(tmp_path / "none", unwatched)
    with pytest.raises(UsageError, match=r"no result folder: it has no config.toml. Start one with `coterie run"):
        experiment.resume(tmp_path, unwatched)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    complaints: list[str] = []

    def intrude() -> None:
        with pytest.raises(UsageError, match="another coterie is at work") as error:
            experiment.resume(folder, unwatched)
        complaints.append(str(error.value))

    assert experiment.run(configured(), folder, Interrupts(2, intrude))["outcome"] == "finished"
    assert len(complaints) == 1


# nothing is overwritten


@pytest.mark.parametrize(
    "wrong",
    [
        configured(federation={"count": 9}),
        configured(federation={"target": 7}),
        configured(run={"device": "tpu"}),
    ],
)
def test_settings_that_do_not_fit_are_found_before_force_empties_a_folder(
    tmp_path: Path, contents: Contents, wrong: Config
) -> None:
    folder = tmp_path / "run"
    experiment.run(configured(2), folder, unwatched)
    before = contents(folder)
    with pytest.raises(UsageError):
        experiment.run(wrong, folder, unwatched, force=True)
    assert contents(folder) == before
    with pytest.raises(UsageError):
        experiment.run(wrong, tmp_path / "new", unwatched)
    assert not (tmp_path / "new").exists()


def test_a_baseline_that_does_not_fit_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Weighting, "offers", frozenset({"gradient"}))
    config = configured(by="fedavg", baselines=("local-train",))
    with pytest.raises(UsageError, match=r"local-train needs target; problem quadratic offers gradient.*fedavg"):
        experiment.run(config, tmp_path / "run", unwatched)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("interval", "saved"), [(0.0, [1, 2, 3, 4, 5, 6]), (1e9, [6])])
def test_checkpoints_are_written_by_the_clock_unless_rounds_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: float, saved: list[int]
) -> None:
    rounds: list[int] = []
    real = checkpoint.save

    def save(folder: Path, state: Any, progress: Any, settings: Any) -> None:
        rounds.append(progress.rounds)
        real(folder, state, progress, settings)

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(loop, "INTERVAL", interval)
    experiment.run(configured(run={"checkpoint": "auto"}), tmp_path / "auto", unwatched)
    assert rounds == saved
    experiment.run(configured(), tmp_path / "each", unwatched)
    assert_same_results(tmp_path / "auto", tmp_path / "each")


def test_a_disk_that_fills_ends_the_run_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"

    def fill() -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)

    with pytest.raises(RunError, match=r"cannot be written: No space left on device. What was saved before is intact"):
        experiment.run(configured(), folder, Interrupts(4, fill))
    monkeypatch.undo()
    assert max(path.name for path in (folder / "checkpoint").iterdir()) == "00000003.safetensors"
    experiment.resume(folder, unwatched)
    experiment.run(configured(), tmp_path / "whole", unwatched)
    assert_same_results(tmp_path / "whole", folder)


def test_a_checkpoint_folder_that_cannot_be_made(tmp_path: Path) -> None:
    tmp_path.joinpath("checkpoint").write_text("in the way")
    with pytest.raises(RunError, match=r"the folder .*checkpoint cannot be made"):
        run_rounds(assemble(configured()), tmp_path)


def test_a_method_that_gives_up_ends_with_an_outcome_and_a_folder(coterie: Callable[..., Any], tmp_path: Path) -> None:
    """ℓ far below the Hessian's norm: the series diverges, which FedNest notices."""
    folder = tmp_path / "run"
    settings = ["--set", "method.lipschitz=0.01", "--set", "method.terms=30"]
    done = coterie("run", "--problem", "nested-quadratic", "--method", "fednest", *settings, "--out", folder)
    assert done.code == 1
    assert "method.lipschitz" in done.out + done.err
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["outcome"], summary["rounds"]) == ("failed", 0)
    assert (folder / "model.safetensors").is_file()
