"""Advice while partners keep their rows: the bits of one process, and whoever does not answer is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hospitals import hospitals
from test_sites import study_of

from coterie.advise import advise as module
from coterie.ensemble.stack import ARRAYS
from coterie.experiment.config import Config, load
from coterie.study import advice
from coterie.study.advice import advise_trial


def settings(**flags: Any) -> dict[str, Any]:
    return {"run.threads": 1, "run.baselines": [], **flags}


def study(folder: Path, **flags: Any) -> tuple[Config, Path]:
    mine, _ = hospitals(folder)
    pattern = str(folder / "sites" / "*.csv")
    known = {"run.problem": "study", "run.engine": "embedded", "problem.folder": str(study_of(folder, mine).folder)}
    return load(None, {}, settings(**known, **{"problem.sites": pattern}, **flags)), mine


def test_the_advice_of_a_study_is_that_of_one_process_to_the_last_bit(tmp_path: Path) -> None:
    config, mine = study(tmp_path)
    found = advise_trial(config, tmp_path / "advice")
    where = {"clients": str(tmp_path / "sites" / "*.csv"), "target": str(mine), "label": "sick"}
    here = load(None, {}, settings(**{"run.problem": "files", **{f"problem.{k}": v for k, v in where.items()}}))
    wanted = module.advise(here, tmp_path / "here").advice
    for name in ("model", "alone"):
        bits = [(tmp_path / folder / name / ARRAYS).read_bytes() for folder in ("advice", "here")]
        assert bits[0] == bits[1]
    for theirs, ours in zip(found["partners"], wanted["partners"], strict=True):
        assert theirs["name"] == ours["name"].removesuffix(".csv")
        assert {**theirs, "name": ""} == {**ours, "name": ""}
    for key in ("worth_it", "alone", "curve", "measure", "plan"):
        assert found[key] == wanted[key], key
    assert found["delivered"]["gain"] == wanted["delivered"]["gain"]


def test_a_site_that_does_not_answer_is_named_and_the_rest_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = {"federation.retries": 0, "federation.timeout": 0.2, "federation.patience": 0.2}
    config, _ = study(tmp_path, **patient)
    ask = advice.ask

    def leaving(fed: Any, mine: Any) -> Any:
        fed.engine.transport.here.pop("north")
        return ask(fed, mine)

    monkeypatch.setattr(advice, "ask", leaving)
    found = advise_trial(config, tmp_path / "advice")
    by_name = {entry["name"]: entry for entry in found["partners"]}
    assert set(by_name) == {"east", "north", "south"}
    assert (by_name["north"]["verdict"], by_name["north"]["reason"]) == ("left out", "it did not answer")
    assert by_name["east"]["z"] is not None


def spoilt(change: Callable[[list[torch.Tensor]], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second site's message is another one than was asked for."""
    received, count = module.received, 0

    def hostile(tensors: Any, *rest: Any) -> Any:
        nonlocal count
        count += 1
        return received(tuple(change(list(tensors))) if count == 2 else tensors, *rest)

    monkeypatch.setattr(module, "received", hostile)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:-1],
        lambda t: [t[0] * float("nan"), *t[1:]],
        lambda t: [t[0][:, :1], *t[1:]],
        lambda t: [t[0] * 1e300, *t[1:]],
    ],
    ids=["a part less", "not numbers", "a narrow model", "too large"],
)
def test_a_site_with_another_message_is_left_out(change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(change, monkeypatch)
    config, _ = study(tmp_path)
    found = advise_trial(config, tmp_path / "advice")
    by_name = {entry["name"]: entry for entry in found["partners"]}
    assert by_name["north"]["verdict"] == "left out"
    assert by_name["east"]["z"] is not None
