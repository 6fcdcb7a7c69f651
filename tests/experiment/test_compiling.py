"""run.compile: auto compiles where it pays and writes down from which round; the same bits come again from that."""

import json
import shutil
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import coterie
from coterie.experiment import compiling
from coterie.experiment.build import assemble
from coterie.experiment.config import load, resolve
from coterie.experiment.loop import run_rounds
from coterie.experiment.run import resume, run
from coterie.methods.shared import compiled
from coterie.numerics import compiled as fusing
from coterie.numerics import programs
from coterie.numerics.programs import Graph, namespace
from coterie.numerics.tracing import Unbuildable
from coterie.testing.comparing import assert_near, assert_same

compiler = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")


class Interpreting:
    """A builder whose programs run the text of the graph; it is ready after it was asked a few times."""

    patience = 2
    made: list["Interpreting"] = []  # noqa: RUF012

    def __init__(self, graph: Graph, threads: int, note: Callable[[str], None]) -> None:
        names = namespace()
        exec(graph.text, names)
        self._forward, self._constants, self._asked = names["forward"], graph.constants, 0
        self.closed = False
        self.made.append(self)

    @property
    def busy(self) -> bool:
        self._asked += 1
        return self._asked <= self.patience

    def program(self) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        return lambda inputs: list(self._forward(None, *inputs, *self._constants))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run is long enough, and every program fast enough."""
    Interpreting.made = []
    for room in (compiled, fusing):
        monkeypatch.setattr(room, "Builder", Interpreting)
    monkeypatch.setattr(compiling, "WORTH", 0.0)
    monkeypatch.setattr(compiling, "GAIN", 1e9)


def config(rounds: int = 12, **table: Any) -> Any:
    run = {"method": "fedavg", "rounds": rounds, "threads": 1, "baselines": [], "dtype": "float64", **table}
    problem, method = {"clients": 4, "friends": 2, "model": "logistic"}, {"local_steps": 2}
    return resolve({"run": run, "problem": problem, "method": method, "federation": {"mode": "vmap"}})


def silent(name: str, is_baseline: bool) -> None:
    return None


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_short_run_is_not_compiled(tmp_path: Path) -> None:
    run(config(), tmp_path, silent)
    assert load(tmp_path / "config.toml").run.compile == "auto"
    assert not events(tmp_path)


@pytest.mark.usefixtures("eager")
def test_auto_says_from_which_round_and_the_same_bits_come_again(tmp_path: Path) -> None:
    summary = run(config(), tmp_path / "auto", silent)
    chosen = load(tmp_path / "auto" / "config.toml").run.compile
    assert chosen == compiling.WATCHED + Interpreting.patience + 2
    assert [e["event"] for e in events(tmp_path / "auto")] == ["compiled"]
    again = run(load(tmp_path / "auto" / "config.toml"), tmp_path / "again", silent)
    assert_same(summary["final"], again["final"])
    plain = run(config(compile=False), tmp_path / "plain", silent)
    assert_near(summary["final"], plain["final"], 1e-9)
    assert summary["communication"] == plain["communication"]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("choice", ["auto", True])
def test_a_damaged_program_is_a_warning_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: Any
) -> None:
    class Noting(Interpreting):
        def __init__(self, graph: Graph, threads: int, note: Callable[[str], None]) -> None:
            super().__init__(graph, threads, note)
            note("the compiled program x.so is damaged")

    monkeypatch.setattr(compiled, "Builder", Noting)
    summary = run(config(compile=choice), tmp_path, silent)
    assert summary["outcome"] == "finished"
    warned = [(e["event"], e["reason"]) for e in events(tmp_path) if e["event"] != "compiled"]
    assert warned == [("warning", "the compiled program x.so is damaged")]


@pytest.mark.usefixtures("eager")
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(config(compile=4), tmp_path / "whole", silent)
    run(config(rounds=7, compile=4), tmp_path / "part", silent)
    text = (tmp_path / "part" / "config.toml").read_text().replace("rounds = 7", "rounds = 12")
    (tmp_path / "part" / "config.toml").write_text(text)
    rest = resume(tmp_path / "part", silent)
    assert_same(whole["final"], rest["final"])


@pytest.mark.usefixtures("eager")
def test_what_cannot_be_recorded_has_its_derivatives_compiled(tmp_path: Path) -> None:
    settings = {"run": config().run.model_dump(exclude_none=True) | {"method": "local-svrg", "rounds": 3}}
    settings["run"]["compile"] = True
    more = {"problem": {"clients": 4, "friends": 2, "model": "mlp"}, "federation": {"mode": "vmap"}}
    method = {"steps": 4, "batch": 5, "refresh": 0.2, "local_steps": 2}
    fast = run_rounds(assemble(resolve({**settings, **more, "method": method})), None)
    assert len(Interpreting.made) == 2, "at both points of a step, and on all rows"
    settings["run"]["compile"] = False
    plain = run_rounds(assemble(resolve({**settings, **more, "method": method})), None)
    assert_near(fast.state, plain.state, 1e-9)


def test_a_compiler_that_fails_is_said_once_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise Unbuildable("there is no C++ compiler")

    for room in (compiled, fusing):
        monkeypatch.setattr(room, "Builder", broken)
    monkeypatch.setattr(compiling, "WORTH", 0.0)
    asked = run(config(compile=True), tmp_path / "true", silent)
    assert asked["outcome"] == "finished"
    assert [(e["event"], e["round"]) for e in events(tmp_path / "true")] == [("not compiled", 1)]
    auto = run(config(), tmp_path / "auto", silent)
    assert_same(asked["final"], auto["final"])
    assert not events(tmp_path / "auto")


def test_a_full_disk_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiled, "Builder", full)
    assert run(config(compile=True), tmp_path / "true", silent)["outcome"] == "finished"
    assert "No space left" in events(tmp_path / "true")[0]["reason"]


@pytest.mark.usefixtures("eager")
def test_the_compiler_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interpreting, "patience", 10**6)
    assert run_rounds(assemble(config()), None).summary["outcome"] == "finished"
    assert [builder.closed for builder in Interpreting.made] == [True]


class Remembering(torch.nn.Module):
    """A module of somebody else, who alone knows what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("net", "compiled"), [(torch.nn.Linear(3, 2), True), (Remembering(), False)])
def test_code_of_somebody_else_is_not_recorded_unasked(net: torch.nn.Module, compiled: bool) -> None:
    x, y = torch.eye(3), torch.tensor([0, 1, 0])
    problem = coterie.Weighting.on([(x, y)] * 3, (x, y), model=net, loss="cross_entropy")
    coterie.fit(problem, coterie.methods.fedavg(batch=2, local_steps=2), rounds=12, mode="vmap")
    assert bool(Interpreting.made) == compiled


def fitted(rounds: int, **more: Any) -> coterie.Fit:
    x, y = torch.eye(3, dtype=torch.float64), torch.tensor([0, 1, 0])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
    problem = coterie.Weighting.on([(x, y)] * 3, (x, y), model=net, loss="cross_entropy", dtype="float64")
    method = coterie.methods.fedavg(batch=2, local_steps=2)
    return coterie.fit(problem, method, rounds, mode="vmap", threads=1, **more)


@pytest.mark.usefixtures("eager")
def test_a_fit_says_from_which_round_it_was_compiled_and_can_be_told(tmp_path: Path) -> None:
    auto = fitted(12)
    chosen = auto.summary["compile"]
    assert chosen == compiling.WATCHED + Interpreting.patience + 2
    saved = tomllib.loads((auto.save(tmp_path / "saved") / "config.toml").read_text())
    assert saved["run"]["compile"] == chosen
    told, plain = fitted(12, compile=chosen), fitted(12, compile=False)
    assert_same(auto._result.state, told._result.state)
    assert (told.summary["compile"], plain.summary.get("compile")) == (chosen, None)
    Interpreting.made.clear()
    fitted(2, compile=False)
    assert not Interpreting.made
    assert fitted(2, compile=True).summary["compile"] is True
    assert len(Interpreting.made) == 1


@pytest.mark.usefixtures("eager")
def test_a_fit_that_is_resumed_keeps_the_round_from_which_it_was_compiled(tmp_path: Path) -> None:
    whole = fitted(14)
    fitted(12, out=tmp_path / "part")
    rest = fitted(14, out=tmp_path / "part")
    assert rest.summary["compile"] == whole.summary["compile"]
    assert_same(whole._result.state, rest._result.state)
    assert fitted(14, out=tmp_path / "part")._parts.config.run.compile == whole.summary["compile"]


@pytest.mark.parametrize("wrong", [0, -1, "yes", 1.5])
def test_bad_values_are_refused(wrong: object) -> None:
    with pytest.raises(Exception, match=r"run\.compile"):
        config(compile=wrong)


@compiler
@pytest.mark.slow
def test_the_real_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(programs.FOLDER, str(tmp_path / "compiled"))
    fast = run(config(compile=True), tmp_path / "fast", silent)
    again = run(config(compile=True), tmp_path / "again", silent)
    plain = run(config(compile=False), tmp_path / "plain", silent)
    assert not events(tmp_path / "fast")
    assert_same(fast["final"], again["final"])
    assert_near(fast["final"], plain["final"], 1e-9)
    assert fast["communication"] == plain["communication"]
