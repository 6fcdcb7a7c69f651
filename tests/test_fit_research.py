"""`coterie.fit` for research: folders, resume, starts, seeds, early stopping, schedules, tables and plots."""

import json
import math
import signal
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from doctest import DocTestFinder, DocTestRunner
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie import RunError, UsageError, facade, fitted, schedules, stop
from coterie.experiment.config import load
from coterie.experiment.run import resume, run
from coterie.experiment.tune import parse_grid
from coterie.report.results import read

meritfed, fedavg = coterie.methods.meritfed, coterie.methods.fedavg


def net(seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(4, 3)


def shards(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(12, 4, generator=generator) for _ in range(count)]
    return [(part, part[:, :3].argmax(1)) for part in x]


def made(**more: Any) -> coterie.Weighting:
    data = shards()
    given = {"target": data[0], "test": data[1], "model": net(), "loss": "cross_entropy", **more}
    return coterie.Weighting.on(data, **given)


def fit(problem: Any = None, method: Any = None, rounds: int = 4, **more: Any) -> Any:
    given = {"mode": "vmap", "threads": 1, **more}
    return coterie.fit(made() if problem is None else problem, method or meritfed(step=0.5, batch=4), rounds, **given)


def bits(result: Any) -> list[Any]:
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in result.history]
    return [lines, {k: v.tolist() for k, v in result.variables.items()}, result.ledger.as_dict()]


class Interrupt:
    """An observer that presses Ctrl-C after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def started(self, parts: Any, done: int) -> None: ...

    def recorded(self, line: dict[str, Any], view: Any) -> None:
        if line["round"] == self.after:
            raise KeyboardInterrupt

    def ended(self, summary: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    "documented",
    [coterie.Fit, coterie.Fits, fitted.Plot, facade.problem, *schedules.KINDS.values(), *stop.KINDS.values()],
    ids=lambda documented: documented.__name__,
)
def test_examples_run(documented: Any) -> None:
    names = dict(vars(sys.modules[documented.__module__]))
    (found,) = DocTestFinder(recurse=False).find(documented, documented.__name__, globs=names)
    assert found.examples
    assert DocTestRunner().run(found).failed == 0


# ---- result folders


def test_an_interrupted_fit_is_resumed_by_the_same_call_to_the_bit(tmp_path: Path) -> None:
    whole = fit()
    with pytest.raises(coterie.Stopped, match=r"the same call of coterie\.fit with out=") as stopped:
        fit(out=tmp_path / "a", observer=Interrupt(3))
    assert stopped.value.fit.summary["rounds"] == 2  # the round that was interrupted is not half there
    assert sorted(path.name for path in (tmp_path / "a" / "checkpoint").iterdir())[-1] == "00000002.safetensors"
    again = fit(out=tmp_path / "a")
    assert bits(again) == bits(whole)
    torch.testing.assert_close(again.weights_history, whole.weights_history)
    assert whole.weights_history.shape == (5, 3)
    stored = fit(out=tmp_path / "a")  # has ended: read, not trained
    assert bits(stored) == bits(whole)
    assert stored.summary == again.summary
    assert [event["event"] for event in stored._result.events if event["event"] != "bits"] == ["resumed"]
    for one, two in zip(stored.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(stored.best.weight, whole.best.weight)


def test_more_rounds_of_the_same_call_go_on(tmp_path: Path) -> None:
    fit(rounds=2, out=tmp_path / "a")
    more = fit(rounds=4, out=tmp_path / "a")
    assert bits(more) == bits(fit(rounds=4))
    assert tomllib.loads((tmp_path / "a" / "config.toml").read_text())["run"]["rounds"] == 4


def test_the_folder_is_that_of_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    result = fit(out=folder)
    found = read(folder)
    assert [line["round"] for line in found.metrics] == [0, 1, 2, 3, 4]
    assert found.summary == result.summary
    assert found.measures == result.measures
    with pytest.raises(UsageError, match=r"from Python objects, .* call coterie\.fit again .* out="):
        resume(folder, lambda name, is_baseline: None)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"method": meritfed(step=0.25, batch=4)}, r"made with method\.step = 0\.5, not 0\.25; .* another out="),
        ({"seed": 1}, r"made with run\.seed = 0, not 1"),
        ({"problem": made(l2=0.0, target=shards()[2])}, "made with a problem of other rows, or of another start"),
        ({"start": net(1)}, "made with a problem of other rows, or of another start"),
        ({"norm": 2.0}, r"federation\.norm = not set, not 2\.0"),
        ({"problem": coterie.problem("quadratic"), "method": fedavg()}, "made with"),
        ({"active": 0.5}, r"federation\.active = 1\.0, not 0\.5"),
    ],
)
def test_another_call_is_refused(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    fit(rounds=1, out=tmp_path / "a")
    with pytest.raises(UsageError, match=complaint):
        fit(**{"rounds": 1, "out": tmp_path / "a", **change})


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        fit(out=tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "mine"


def quiet(name: str, is_baseline: bool) -> None:
    return None


def test_a_named_problem_is_the_command_lines(tmp_path: Path) -> None:
    flags = {"run.problem": "quadratic", "run.method": "fedavg", "run.rounds": 4, "run.seed": 3, "run.baselines": []}
    sets = {"problem.clients": 4, "method.step": 0.1, "federation.mode": "vmap"}
    run(load(sets=sets, flags=flags), tmp_path / "cli", quiet)
    named = coterie.problem("quadratic", clients=4)
    with pytest.raises(coterie.Stopped, match=r"coterie resume"):
        coterie.fit(named, fedavg(step=0.1), 4, seed=3, mode="vmap", out=tmp_path / "py", observer=Interrupt(2))
    resume(tmp_path / "py", quiet)
    one, two = (read(tmp_path / name).metrics for name in ("cli", "py"))
    assert [{**a, "seconds": 0} for a in one] == [{**b, "seconds": 0} for b in two]
    done = coterie.fit(named, fedavg(step=0.1), 4, seed=3, mode="vmap", out=tmp_path / "py")
    assert done.summary["rounds"] == 4
    with pytest.raises(UsageError, match="did you mean quadratic"):
        coterie.problem("quadrtic")
    with pytest.raises(UsageError, match="did you mean clients"):
        coterie.problem("quadratic", client=4)


def test_what_no_file_holds_is_resumed_from_python(tmp_path: Path) -> None:
    named = coterie.problem("quadratic", clients=3)
    more: dict[str, Any] = {"mode": "vmap", "observer": Interrupt(2)}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "method": (replace(fedavg(step=0.1), name="mine"), {}),
        "schedule": (fedavg(step=lambda t: 0.1), {}),
        "stop": (fedavg(step=0.1), {"stop": lambda record: False}),
        "start": (fedavg(step=0.1), {"start": torch.ones(8)}),
    }
    for name, (method, options) in cases.items():
        with pytest.raises(coterie.Stopped, match=r"the same call of coterie\.fit"):
            coterie.fit(named, method, 3, out=tmp_path / name, **options, **more)
        del more["observer"]
        assert coterie.fit(named, method, 3, out=tmp_path / name, **options, **more).summary["rounds"] == 3
        more["observer"] = Interrupt(2)
        with pytest.raises(UsageError):
            resume(tmp_path / name, quiet)


def test_a_stored_fit_has_its_running_statistics(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    problem = made(model=net)
    fits = [fit(problem, fedavg(step=0.1, batch=4), 2, out=tmp_path / "a") for _ in range(2)]
    one, two = (result.model.state_dict() for result in fits)
    assert float(one["1.running_mean"].abs().sum()) > 0
    for name, value in one.items():
        assert torch.equal(value, two[name])
    assert fits[0].ledger.as_dict() == fits[1].ledger.as_dict()
    again = fit(problem, fedavg(step=0.1, batch=4), 1, start=fits[0].model)
    assert again.history[0]["test_loss"] == pytest.approx(fits[0].history[-1]["test_loss"], abs=1e-6)


SCRIPT = """
import os, signal, sys, torch, coterie
class Kill:
    def started(self, parts, done): pass
    def recorded(self, line, view):
        if line["round"] == 3: os.kill(os.getpid(), signal.SIG{signal})
    def ended(self, summary): pass
x = torch.ones(4, 2)
problem = coterie.Weighting.on([(x, x.sum(1))] * 2, test=(x, x.sum(1)), model=torch.nn.Linear(2, 1), loss="squared")
coterie.fit(problem, coterie.methods.fedavg(step=0.01), 6, mode="vmap", start=torch.zeros(3), out=sys.argv[1],
            observer=Kill() if len(sys.argv) > 2 else None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TERM", "KILL"])
def test_a_killed_process_is_resumed(tmp_path: Path, name: str) -> None:
    text = SCRIPT.replace("{signal}", name)
    for folder, more in (("whole", []), ("killed", ["kill"]), ("killed", [])):
        done = subprocess.run([sys.executable, "-c", text, str(tmp_path / folder), *more], capture_output=True)
        assert bool(done.returncode) == bool(more), done.stderr.decode()
        if more and name == "KILL":
            assert done.returncode == -signal.SIGKILL
    one, two = (read(tmp_path / folder).metrics for folder in ("whole", "killed"))
    assert [{**a, "seconds": 0} for a in one] == [{**b, "seconds": 0} for b in two]


# ---- starts and seeds


def test_starts_of_every_kind() -> None:
    other = net(7)
    theta = torch.cat([p.detach().reshape(-1) for p in other.parameters()])
    expected = fit(made(model=other), rounds=2)
    for start in (other, other.state_dict(), theta, lambda seed: net(seed + 7)):
        assert bits(fit(rounds=2, start=start)) == bits(expected)
    first = fit(made(model=other), fedavg(step=0.1), rounds=1)
    onwards = fit(method=fedavg(step=0.1), rounds=1, start=first)
    assert onwards.history[0]["test_loss"] == first.history[-1]["test_loss"]


def test_a_nested_problem_starts_elsewhere() -> None:
    def loss(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (batch.inputs @ y - batch.labels).square().mean() + (x.exp() * y.square()).sum()

    data = [(x, y.float()) for x, y in shards()]
    method = coterie.methods.fednest(outer_step=0.1, step=0.1, lipschitz=10.0, batch="all")

    def problem(x: Tensor, y: Tensor) -> Any:
        return coterie.Nested(loss, loss).on(data, data, x=x, y=y)

    there = {"x": torch.ones(4), "y": torch.full((4,), 0.5)}
    plain = problem(torch.zeros(4), torch.zeros(4))
    one = coterie.fit(problem(**there), method, 2, mode="vmap")
    assert bits(coterie.fit(plain, method, 2, mode="vmap", start=there)) == bits(one)
    two = coterie.fit(plain, method, 1, mode="vmap", start=one)
    assert two.history[0]["outer_loss"] == one.history[-1]["outer_loss"]


@pytest.mark.parametrize(
    ("start", "complaint"),
    [
        (torch.zeros(3), r"start has shape \(3,\), the problem's start \(15,\)"),
        ({"weight": torch.zeros(3, 4)}, "start lacks bias"),
        ({"weight": torch.zeros(4, 3), "bias": torch.zeros(3)}, r"start's weight has shape \(4, 3\)"),
        (5, "start is a int; give a module"),
        (lambda seed: None, "start is a NoneType"),
    ],
)
def test_a_start_that_does_not_fit(start: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        fit(start=start)


def test_seeds_give_stacked_arrays(tmp_path: Path) -> None:
    fits = fit(seeds=[0, 5], start=net, out=tmp_path / "s")
    assert isinstance(fits, coterie.Fits)
    assert fits.seeds == [0, 5]
    assert [bits(one) for one in fits] == [bits(fit(seed=seed, start=net(seed))) for seed in (0, 5)]
    losses = fits.stacked("test_loss")
    assert losses.shape == (2, 5)
    assert losses[1].tolist() == [line["test_loss"] for line in fits[1].history]
    np.testing.assert_allclose(fits.mean("test_loss"), losses.mean(0))
    np.testing.assert_allclose(fits.std("test_loss"), abs(losses[0] - losses[1]) / math.sqrt(2))
    assert fits.weights.shape == (2, 3)
    assert fits.weights_history.shape == (2, 5, 3)
    frame = fits.frame(pandas=False)
    assert frame["seed"].tolist() == [0] * 5 + [5] * 5
    assert (tmp_path / "s" / "seed-5" / "summary.json").is_file()
    assert np.isnan(fits[:1].std("test_loss")).all()
    with pytest.raises(UsageError, match="unknown measure 'loss'"):
        fits.stacked("loss")


def test_a_seed_that_does_not_change_the_start_says_so() -> None:
    with pytest.warns(UserWarning, match="the seeds change the draws but not the start") as warned:
        fits = fit(seeds=[0, 1], rounds=1)
    assert len(warned) == 1
    assert fits[0].history[0]["test_loss"] == fits[1].history[0]["test_loss"]
    assert any("fixes the draws" in note for note in fits[1].summary["notes"])
    assert "notes" not in fit(rounds=1).summary
    named = coterie.fit(coterie.problem("quadratic", clients=3), fedavg(step=0.1), 1, seeds=[0, 1], mode="vmap")
    assert named[0].history[0] != named[1].history[0]  # made anew for every seed


@pytest.mark.parametrize("seeds", [[], 3, [1, 1]])
def test_bad_seeds(seeds: Any) -> None:
    with pytest.raises(UsageError, match="seeds"):
        fit(seeds=seeds)


# ---- early stopping


def test_stop_by_a_rule_and_resume_does_not_go_on(tmp_path: Path) -> None:
    more: dict[str, Any] = {"rounds": 50, "method": fedavg(step=1e-9), "out": tmp_path / "a"}
    ended = fit(stop=stop.patience("validation_loss", 3, least=1e-3), **more)
    assert ended.summary["outcome"] == "finished"
    assert ended.summary["rounds"] == 3
    assert ended.summary["stopped"].startswith("validation_loss has not improved by more than 0.001 for 3 rounds")
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    assert [(e["round"], e["event"]) for e in events if e["event"] == "early stop"] == [(3, "early stop")]
    assert ended.summary["events"]["early stop"] == 1
    again = fit(stop="patience(validation_loss, 3, least=0.001)", **more)
    assert again.summary["rounds"] == 3
    assert fit(**{**more, "rounds": 5}).summary["rounds"] == 5  # without the rule it goes on


def test_a_function_of_the_record_stops() -> None:
    seen = []

    def enough(record: list[dict[str, Any]]) -> Any:
        seen.append(len(record))
        return record[-1]["round"] >= 2 and "two are enough"

    assert fit(stop=enough).summary["stopped"] == "two are enough"
    assert seen == [1, 2, 3]
    assert fit(stop=lambda record: True).summary["rounds"] == 0
    higher = fit(stop=stop.reached("test_accuracy", 0.0))
    assert higher.summary["rounds"] == 0


def test_rules() -> None:
    def lines(*values: float | None) -> list[dict[str, Any]]:
        return [{"round": 5 * t, "a": value} for t, value in enumerate(values)]

    higher = [coterie.Measure("a", better="higher")]
    assert stop.patience("a", 10).bound(higher)(lines(1.0, 2.0, 1.0)) == ""
    assert "10 rounds; its best was 2 in round 5" in stop.patience("a", 10).bound(higher)(lines(1.0, 2.0, 1.0, 1.5))
    assert stop.patience("a", 10).bound(higher)(lines(None, 1.0, 1.0)) == ""  # the first was not finite
    for measure in (*higher, coterie.Measure("a")):  # to be as good as before is no improvement
        assert "10 rounds; its best was 1 in round 0" in stop.patience("a", 10).bound([measure])(lines(1.0, 1.0, 1.0))
    assert stop.tolerance("a", 0.1, 10)(lines(1.0, 1.05)) == ""  # too short
    assert stop.tolerance("a", 0.1, 10)(lines(3.0, 1.0, 1.05, 1.08))
    assert stop.tolerance("a", 0.1, 10)(lines(1.0, 1.05, 1.08))  # just so long
    assert stop.tolerance("a", 0.1, 10)(lines(1.0, None, 1.05)) == ""
    assert stop.reached("a", 2.0).bound(higher)(lines(1.0, 2.5)).startswith("a reached 2.5")
    for made_rule in (stop.patience("a", 10, 0.5), stop.tolerance("a", 0.1), stop.reached("a", -1.5)):
        assert stop.rule(made_rule.data).data == made_rule.data


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ("patience(loss, 5)", "unknown measure in run.stop = 'patience.loss, 5.': 'loss'"),
        ("patience(validation_loss)", "does not fit patience"),
        ("patience(validation_loss, 0)", "rounds is 0; it must be a number of at least 1"),
        ("wait(validation_loss, 5)", "unknown stop rule 'wait'"),
        ("patience", "is no stop rule; write for example patience"),
        ("reached(test_loss, __import__('os'))", "is neither a number nor a name"),
        (5, "stop is 5; give"),
    ],
)
def test_a_bad_rule_is_refused_before_a_folder_is_touched(tmp_path: Path, wrong: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        fit(stop=wrong, out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_rules_are_settings_of_the_command_line(tmp_path: Path) -> None:
    flags = {"run.problem": "quadratic", "run.method": "fedavg", "run.rounds": 9, "run.baselines": []}
    config = load(sets={"run.stop": "tolerance(test_loss, 1e9, 2)", "problem.clients": 3}, flags=flags)
    with pytest.raises(UsageError, match="unknown measure"):
        run(config, tmp_path / "a", quiet)
    assert not (tmp_path / "a").exists()
    config = load(sets={"run.stop": "tolerance(validation_loss, 1e9, 2)", "problem.clients": 3}, flags=flags)
    assert run(config, tmp_path / "a", quiet)["rounds"] == 2
    assert resume(tmp_path / "a", quiet)["rounds"] == 2
    with pytest.raises(UsageError, match="unknown stop rule"):
        load(sets={"run.stop": "never(test_loss)"}, flags=flags)
    with pytest.raises(UsageError, match="which no file can hold"):
        load(sets={"run.stop": "function enough"}, flags=flags)


# ---- schedules


def test_a_schedule_gives_every_round_its_own_step() -> None:
    values = [0.5, 0.25, 0.1]
    expected = None
    for value in values:  # one round after the other, each with its own step
        last = fit(method=fedavg(step=value, batch="all"), rounds=1, start=expected)
        expected = last
    assert expected is not None

    def of_round(t: int) -> float:
        return values[t]

    for step in (values, of_round, lambda t: np.float64(values[t])):
        found = fit(method=fedavg(step=step, batch="all"), rounds=3)
        for name, value in found.variables.items():
            assert torch.equal(value, expected.variables[name])


def test_schedules_compose_with_stages_guards_and_resume(tmp_path: Path) -> None:
    method = meritfed(step="cosine(0.5, 6)", mirror_step=schedules.step(0.1, 2, 0.5), batch=4)
    assert dict(method.settings)["mirror_step"] == "step(0.1, 2, factor=0.5)"
    more = {"compress": "top-k", "ratio": 0.5, "guard": True}
    whole = fit(method=method, rounds=4, **more)
    with pytest.raises(coterie.Stopped):
        fit(method=method, rounds=4, out=tmp_path / "a", observer=Interrupt(3), **more)
    assert bits(fit(method=method, rounds=4, out=tmp_path / "a", **more)) == bits(whole)
    config = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert config["method"]["step"] == "cosine(0.5, 6)"
    constant = [bits(fit(method=meritfed(step=step, batch=4))) for step in (0.5, [0.5] * 4, "linear(0.5, 9, end=0.5)")]
    assert constant[0] == constant[1] == constant[2]


@pytest.mark.slow
def test_a_constant_schedule_changes_no_method(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent / "methods"))
    from test_conformance import FIRST, values

    from coterie.experiment.build import assemble
    from coterie.experiment.loop import run_rounds

    for case in FIRST:
        config = case.config(rounds=2)
        steps = {k: [v] * 2 for k, v in config.method.items() if k.endswith("step") and isinstance(v, float)}
        planned = replace(config, method={**config.method, **steps})
        one, two = (run_rounds(assemble(c), None).state for c in (config, planned))
        for (name, a), (_, b) in zip(values(one), values(two), strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, (case, name)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: fedavg(step=[0.1, 0.2]), r"method\.step has values for 2 rounds, but the run has 4; give 4 values"),
        (lambda: fedavg(step="cosine(0.1, 3)"), r"is 0\.0 in round 4 of 4; .* at least 4 rounds, or an end above 0"),
        (lambda: fedavg(step=lambda t: 0.1 - 0.05 * t), "function <lambda> is 0.0 in round 3 of 4"),
        (lambda: fedavg(step=lambda t: math.nan if t else 0.1), "is nan in round 2 of 4"),
        (lambda: fedavg(step=lambda t: "x" if t else 0.1), "is 'x' in round 2"),
        (lambda: fedavg(step=[0.1, -1.0, 0.1, 0.1]), r"is -1\.0 in round 2 of 4"),
        (lambda: fedavg(step=[]), "step is a list that is empty"),
        (lambda: fedavg(step="cosin(0.1, 100)"), "unknown schedule 'cosin'; did you mean cosine"),
        (lambda: fedavg(step="cosine(0.1)"), "does not fit cosine: missing 1 required"),
        (lambda: fedavg(step="cosine(0.1, 2.5)"), "rounds is 2.5; it must be a whole number at least 1"),
        (lambda: fedavg(step="cosine(0.1, __import__('os'))"), "is neither a number nor a name"),
        (lambda: fedavg(step="quickly"), "fedavg.step = 'quickly': .*valid number"),
        (lambda: fedavg(step="step(-0.1, 5)"), "start is -0.1; it must be a number above 0"),
        (lambda: fedavg(step="function decay"), "which no file can hold; call coterie.fit again"),
        (lambda: fedavg(local_steps=schedules.power(3.0)), "local_steps takes no schedule; .* that do: step"),
    ],
)
def test_a_bad_schedule_is_refused_before_the_first_round(
    tmp_path: Path, make: Callable[[], Any], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        fit(method=make(), out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_schedules_are_settings_of_the_command_line(tmp_path: Path) -> None:
    flags = {"run.problem": "quadratic", "run.method": "fedavg", "run.rounds": 3, "run.baselines": []}
    config = load(sets={"method.step": "power(0.1)", "problem.clients": 3}, flags=flags)
    assert config.method["step"] == "power(0.1)"
    assert run(config, tmp_path / "a", quiet)["outcome"] == "finished"
    assert load(tmp_path / "a" / "config.toml").method["step"] == "power(0.1)"
    short = load(sets={"method.step": [0.1, 0.1], "problem.clients": 3}, flags=flags)
    with pytest.raises(UsageError, match="values for 2 rounds, but the run has 3"):
        run(short, tmp_path / "b", quiet)
    grid = parse_grid(["method.step=cosine(0.1, 100),0.5"], lambda pairs: dict(pair.split("=", 1) for pair in pairs))
    assert grid == {"method.step": ["cosine(0.1, 100)", "0.5"]}


# ---- methods of one's own


@pytest.mark.parametrize("collection", [tuple, list, set, frozenset, iter])
def test_needs_may_be_any_collection_of_names(collection: Any) -> None:
    sound = fedavg(step=0.1)
    own = replace(sound, needs=collection(["gradient"]), alternatives=[collection(["minimax"])])
    assert (own.needs, own.alternatives) == ({"gradient"}, ({"minimax"},))
    assert fit(method=own).summary["outcome"] == "finished"
    with pytest.raises(UsageError, match="fedavg needs moonlight"):
        fit(method=replace(sound, needs=collection(["moonlight"])))


def test_a_need_that_is_one_string_is_refused() -> None:
    with pytest.raises(UsageError, match="fedavg: needs is 'gradient'; give a collection of names"):
        replace(fedavg(step=0.1), needs="gradient")


# ---- methods that write into their state


def test_a_method_that_writes_into_its_state_is_caught(tmp_path: Path) -> None:
    sound = fedavg(step=0.1)

    def spoil(fed: Any, state: Any, draw: Any) -> Any:
        after = sound.round(fed, state, draw)
        next(value for value in state if isinstance(value, Tensor)).mul_(0.5)
        return after

    with pytest.raises(RunError, match=r"fedavg wrote into its state in place \(\w+.*\); .* x = x - step \* g"):
        fit(method=replace(sound, round=spoil), out=tmp_path / "a")
    assert not list((tmp_path / "a" / "checkpoint").glob("*"))  # nothing of it was saved


# ---- tables and plots


def test_the_record_as_a_table() -> None:
    result = fit(record=2)
    frame = result.frame(pandas=False)
    assert frame["round"].tolist() == [0, 2, 4]
    assert frame["test_loss"].tolist() == [line["test_loss"] for line in result.history]
    assert frame["bytes_up"].tolist() == [line["communication"]["bytes_up"] for line in result.history]
    assert frame["exchanges"][-1] == result.ledger.total.rounds
    assert all(isinstance(column, np.ndarray) and len(column) == 3 for column in frame.values())
    line = {**result.history[1], "test_loss": None}
    odd = fitted._columns([result.history[0], line])
    assert math.isnan(odd["test_loss"][1])


def test_a_table_of_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fit(rounds=1)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert isinstance(result.frame(), dict)
    with pytest.raises(UsageError, match="pandas is not installed"):
        result.frame(pandas=True)
    monkeypatch.undo()
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    assert isinstance(result.frame(), pandas.DataFrame)


def test_plots(tmp_path: Path) -> None:
    result = fit()
    path = result.plot().save(tmp_path / "a.svg")
    assert "test accuracy against rounds" in ET.parse(path).getroot()[0].text
    assert "bytes moved" in result.plot("validation_loss", x="bytes")._repr_svg_()
    assert "weights over the rounds" in result.plot("weights")._repr_svg_()
    assert result.plot()._repr_html_().startswith("<img ")
    page = result._repr_html_()
    assert "<style" not in page  # the style stays inside of the image
    assert "test accuracy" in page
    for call, complaint in (
        (lambda: result.plot("acc"), "unknown measure 'acc'"),
        (lambda: result.plot(x="time"), "unknown axis 'time'"),
        (lambda: result.plot().save(tmp_path / "a.png"), "does not end in .svg"),
        (lambda: fit(method=fedavg(step=0.1)).plot("weights"), "learns no weights"),
    ):
        with pytest.raises(UsageError, match=complaint):
            call()
    fits = fit(seeds=[0, 1], start=net)
    assert "polygon" in fits.plot()._repr_svg_()  # a band over the seeds
    assert "±" in fits._repr_html_()
