"""The best model is kept, a late attack costs little, and clients that do not help end without weight."""

import json
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import assert_same_results, lines
from safetensors.torch import load_file

import coterie
from coterie.errors import UsageError
from coterie.experiment import run as experiment
from coterie.experiment.build import assemble
from coterie.experiment.config import NETWORK_CLIP, Config, load
from coterie.experiment.guard import IN_A_ROW, MEASURE, WINDOW, Guard, better, comparison
from coterie.experiment.loop import Result, run_rounds
from coterie.problems.base import View

ROUNDS = 45  # by then the rises of the first rounds are out of the guard's window


def configured(**settings: Any) -> Config:
    usual = {
        "run.rounds": ROUNDS,
        "run.baselines": [],
        "run.threads": 1,
        "problem.model": "logistic",
        "problem.test": 200,
        "federation.mode": "vmap",
    }
    return load(sets={**usual, **{key.replace("__", "."): value for key, value in settings.items()}})


@cache
def run(**settings: Any) -> Result:
    return run_rounds(assemble(configured(**settings)), None)


BITE = {
    "problem__friends": 15,
    "problem__attack": "scaled",
    "problem__strength": 1000.0,
    "problem__attackers": 6,
    "problem__attack_from": ROUNDS,
    "method__step": 2.0,
}


# the rule


def after(*losses: float) -> Guard:
    guard = Guard()
    for loss in losses:
        guard = guard.after(loss)
    return guard


FALLING = [2.0 - 0.05 * t for t in range(WINDOW + 1)]  # from 2 to 1: a rise above 1.1 undoes a tenth


def test_a_rise_is_compared_with_all_that_was_gained_and_with_earlier_rises() -> None:
    guard = after(*FALLING)
    assert guard.allows(1.099)
    assert not guard.allows(1.101)
    assert not guard.allows(None)
    noisy = after(*FALLING, 1.1)  # a rise of 0.1 allows four times that
    assert noisy.allows(1.399)
    assert not noisy.allows(1.401)
    assert not noisy._replace(rises=(*noisy.rises[:-1], 0.0)).allows(1.3)


def test_a_rise_is_one_over_the_lowest_loss_and_not_over_the_last() -> None:
    assert after(2.0, 1.0, 1.5, 1.4).rises == pytest.approx((0.0, 0.5, 0.4))


def test_of_two_equally_good_rounds_the_earlier_is_the_best() -> None:
    best = None
    for number, loss in enumerate((2.0, 1.0, None, 1.0, 1.5)):
        best = better({"round": number, MEASURE: loss}, View(torch.tensor([float(number)])), best)
    assert best is not None
    assert (best.round, float(best.view.model)) == (1, 1.0)


def test_the_guard_is_silent_at_first_and_where_nothing_was_gained() -> None:
    assert after(*FALLING[:-1]).allows(1e9)
    assert after(*(2.0 + t for t in range(WINDOW + 9))).allows(1e9)
    assert Guard().allows(None)


def test_a_rise_that_comes_again_and_again_is_accepted() -> None:
    guard = after(*FALLING)
    for _ in range(IN_A_ROW):
        assert not guard.allows(1.9)
        guard = guard.refused()
    assert guard.allows(1.9)
    assert guard.after(1.9).rejected == 0


@pytest.mark.parametrize(
    ("end", "said"), [(1.09, ""), (1.11, "is 1.11, that of round 3"), (None, "is not finite, that")]
)
def test_the_summary_says_where_the_last_model_is_much_worse_than_the_best(end: float | None, said: str) -> None:
    found = comparison({MEASURE: 2.0}, {MEASURE: 1.0, "round": 3}, {MEASURE: end})
    assert (said in found) if said else not found
    assert not comparison({MEASURE: None}, {MEASURE: 1.0, "round": 3}, {MEASURE: 9.0})  # no gain to compare with
    assert not comparison({MEASURE: 2.0}, {MEASURE: None}, {MEASURE: end})


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_unit_of_the_loss_does_not_matter(scale: float) -> None:
    guard = after(*(scale * loss for loss in FALLING))
    assert guard.allows(1.099 * scale)
    assert not guard.allows(1.101 * scale)


# a late attack


def test_an_attack_in_the_last_round_is_rejected() -> None:
    honest, bitten, kept = run(problem__friends=15, method__step=2.0), run(**BITE, federation__guard=False), run(**BITE)
    accuracy = {key: result.summary["final"]["test_accuracy"] for key, result in (("honest", honest), ("kept", kept))}
    assert accuracy["kept"] > accuracy["honest"] - 0.02
    assert bitten.summary["final"]["test_accuracy"] < accuracy["honest"] - 0.05
    (event,) = [event for event in kept.events if event["event"] == "rejected round"]
    assert event["round"] == ROUNDS
    assert event["after"] > 1.4 * event["before"]
    assert kept.summary["events"]["rejected round"] == 1
    # without the guard, the best model is as good, and the summary says so
    assert bitten.summary["best"]["test_accuracy"] > accuracy["honest"] - 0.02
    assert "much worse than the best one" in bitten.summary["best"]["note"]
    assert "note" not in kept.summary["best"]


@pytest.mark.slow
def test_an_attack_that_stays_is_rejected_three_times_in_a_row_only() -> None:
    events = run(**{**BITE, "problem__attack_from": ROUNDS - 9, "run__rounds": ROUNDS - 5}).events
    rejected = [event["round"] for event in events if event["event"] == "rejected round"]
    assert rejected[:IN_A_ROW] == [ROUNDS - 9, ROUNDS - 8, ROUNDS - 7]
    assert ROUNDS - 6 not in rejected


def test_an_honest_run_is_not_touched() -> None:
    with_guard, without = run(run__rounds=WINDOW + 4), run(run__rounds=WINDOW + 4, federation__guard=False)
    assert "rejected round" not in with_guard.summary.get("events", {})
    assert torch.equal(with_guard.view.model, without.view.model)


def test_a_guarded_run_resumes_bit_by_bit(tmp_path: Path) -> None:
    late = {**BITE, "problem__attack_from": ROUNDS - 4, "run__record": 3}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    experiment.run(configured(**late), whole, unwatched)
    experiment.run(configured(**late, run__rounds=ROUNDS - 3), broken, unwatched)
    text = (broken / "config.toml").read_text().replace(f"rounds = {ROUNDS - 3}", f"rounds = {ROUNDS}")
    (broken / "config.toml").write_text(text)
    experiment.resume(broken, unwatched)
    rejected = [event["round"] for event in lines(whole / "events.jsonl") if event["event"] == "rejected round"]
    assert {ROUNDS - 4, ROUNDS - 2} <= set(rejected)  # before the break and after it
    assert (whole / "model-best.safetensors").read_bytes() == (broken / "model-best.safetensors").read_bytes()
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()
    assert [e for e in lines(broken / "events.jsonl") if e["event"] != "resumed"] == lines(whole / "events.jsonl")


def test_a_guard_without_validation_rows_at_the_server_is_refused() -> None:
    with pytest.raises(UsageError, match=r"federation.guard = true needs validation rows at the server"):
        run(federation__guard=True, federation__target=0, run__rounds=1)


# the best model

RISING = {
    "run__rounds": 12,
    "problem__friends": 15,
    "problem__attack": "sign-flip",
    "problem__attackers": 14,
    "problem__attack_from": 7,
}


def unwatched(name: str, is_baseline: bool) -> None:
    return None


def test_the_best_model_is_stored_and_named(tmp_path: Path) -> None:
    config = configured(**RISING, federation__guard=False)
    summary = experiment.run(config, tmp_path / "run", unwatched)
    best = summary["best"]["round"]
    recorded = lines(tmp_path / "run" / "metrics.jsonl")
    lowest = min(recorded, key=lambda line: line["validation_loss"])
    assert lowest["round"] == best == 6
    assert lowest["validation_loss"] == summary["best"]["validation_loss"]
    short = experiment.run(config.with_run(rounds=best), tmp_path / "short", unwatched)
    assert short["final"]["validation_loss"] == summary["best"]["validation_loss"]
    kept, last = (load_file(tmp_path / where) for where in ("run/model-best.safetensors", "short/model.safetensors"))
    assert all(torch.equal(kept[name], last[name]) for name in last)


def test_the_best_model_survives_an_interruption_after_it(tmp_path: Path) -> None:
    config = configured(**RISING, federation__guard=False)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert experiment.run(config, whole, unwatched)["best"]["round"] < 10
    experiment.run(config.with_run(rounds=10), broken, unwatched)
    text = (broken / "config.toml").read_text().replace("rounds = 10", "rounds = 12")
    (broken / "config.toml").write_text(text)
    for name in ("model-best.safetensors", "summary.json"):
        (broken / name).unlink()
    experiment.resume(broken, unwatched)
    assert_same_results(whole, broken)


def test_fit_offers_the_best_model_and_raises_an_interruption_again(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    shards = [(torch.randn(30, 2, generator=draw), torch.randint(0, 2, (30,), generator=draw)) for _ in range(3)]
    problem = coterie.Weighting.on(shards, target=shards[0], model=torch.nn.Linear(2, 2), loss="cross_entropy")
    fit = coterie.fit(problem, coterie.methods.meritfed(step=0.5), rounds=5, mode="vmap")
    best = min(fit.history, key=lambda line: line["validation_loss"])
    assert fit.summary["best"]["round"] == best["round"]
    loss = torch.nn.functional.cross_entropy(fit.best(shards[0][0]), shards[0][1])
    assert float(loss.detach()) == pytest.approx(best["validation_loss"], rel=1e-6)
    stored = json.loads((fit.save(tmp_path / "fit") / "summary.json").read_text())
    assert stored["best"] == fit.summary["best"]
    assert (tmp_path / "fit" / "model-best.safetensors").is_file()

    class Interrupting:
        def started(self, parts: Any, done: int) -> None: ...

        def recorded(self, line: dict[str, Any], view: Any) -> None:
            if line["round"] == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        def ended(self, summary: dict[str, Any]) -> None: ...

    with pytest.raises(KeyboardInterrupt, match="stopped after 2 rounds") as stop:
        coterie.fit(problem, coterie.methods.meritfed(step=0.5), rounds=5, mode="vmap", observer=Interrupting())
    assert isinstance(stop.value, coterie.Stopped)
    assert stop.value.fit.summary["rounds"] == 2


# clip on a network


def test_networks_clip_by_default_and_can_be_told_not_to() -> None:
    assert configured().federation.clip is None
    assert configured(run__engine="flower").federation.clip == NETWORK_CLIP
    assert configured(run__engine="flower", federation__clip=7.0).federation.clip == 7.0
    assert configured(run__engine="flower", federation__clip="none").federation.clip == "none"
    assert f"clip = {NETWORK_CLIP}" in configured(run__engine="flower").as_toml()


# zeros and copies


FEW = 8  # rounds, each of which halves the weight of a client that does not help


@pytest.mark.parametrize("method", ["meritfed", "primal-dual"])
@pytest.mark.parametrize(("attack", "kind"), [("zero", "zero update"), ("copy", "duplicate update")])
def test_clients_that_do_not_help_end_without_weight(method: str, attack: str, kind: str) -> None:
    few = {"run__rounds": FEW, "run__method": method, "problem__attackers": 6}
    result = run(**few, problem__attack=attack)
    weights = result.summary["weights"]
    assert sum(weights[9:]) < 0.01
    assert sum(weights) == pytest.approx(1.0)
    assert result.summary["events"] == {kind: 6 * FEW}
    if attack == "copy":
        assert {event["reason"] for event in result.events} == {"of client 0"}
    silent = run(**few, problem__attack="silent")
    found, alone = (r.summary["final"]["test_accuracy"] for r in (result, silent))
    assert found > alone - 0.05
    believed = run(**few, problem__attack=attack, federation__screen_copies=False)
    assert sum(believed.summary["weights"][9:]) > 0.3


def test_methods_that_learn_no_weights_are_not_screened() -> None:
    result = run(run__method="sgd-full", problem__attack="zero", run__rounds=3)
    assert "events" not in result.summary
