"""The page of an advice: its words, its layout on a phone, and the commands that take an advice folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, browser

from coterie.advise.page import VERSION, page, show
from coterie.advise.scores import EXPLAINED, scores_for
from coterie.advise.sentences import STRATEGIES, headline
from coterie.report.terminal import console_for

Command = Callable[..., Any]


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.0123, "high": value + 0.0123}


def partner(name: str, verdict: str, gain: float) -> dict[str, Any]:
    weight = {"value": 0.5, "low": 0.25, "high": 0.75}
    known = {"name": name, "rows": 1200, "verdict": verdict, "reason": "a reason", "contribution": 0.01}
    return {**known, "gain": interval(gain), "agreement": interval(0.9), "probability": 0.93, "weight": weight}


def made(**data: Any) -> dict[str, Any]:
    """An advice as advice.json holds it."""
    kind = "classification" if data.get("classes") else "regression"
    about = {"target": "mine.csv", "label": "price", "kind": kind, "classes": [], "model": "logistic"}
    scores = scores_for(2 if data.get("classes") else None)
    measures = [{**one.measure.as_dict(), "explained": EXPLAINED[one.name]} for one in scores]
    values = {one.name: 0.25 for one in scores}
    strategy = {"values": values, "gain": interval(0.02), "probability": 0.9, "picked": 7}
    moved = {"rounds": 60, "bytes": 64_000}
    bound = {"target_rows": 60, "validation_term": 0.3, "training_term": 0.9}
    partners = [partner("a-partner-with-a-long-name.csv", "helps", 0.0321), partner("<b>.csv", "harms", -0.0456)]
    advice = {
        "version": VERSION,
        "data": {**about, "target_rows": 60, "partner_rows": 2400, **data},
        "worth_it": "probably",
        "measure": measures[0],
        "measures": measures,
        "partners": partners,
        "strategies": dict.fromkeys(STRATEGIES, strategy),
        "delivered": {**strategy, "strategy": "helpers", "partners": [partners[0]["name"]]},
        "trees": {"values": values},
        "cost": {"training": moved, "screening": moved, "trainings": 16},
        "certainty": {"target_rows": 60, "rows_needed": 600, "bound": [bound] * 4},
        "contributions": {"kind": "loo", "trainings": 6, "most": 6, "bytes": 9, "agreement_with_weights": None},
        "plan": {"folds": 5, "placebos": 199, "repeats": 2, "bootstraps": 5, "level": 0.05},
        "warnings": [],
        "notes": [],
    }
    return {**advice, "headline": headline(advice)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "advice.json").write_text(json.dumps(made()))
    return tmp_path


def test_gains_stand_in_the_table_and_models_have_their_names() -> None:
    text = page(made())
    assert "+0.032 [+0.020, +0.044]" in text
    assert "93 %" in text
    assert "predicting price by linear regression" in text
    assert "accuracy" not in text
    assert "<b>" not in text
    text = page(made(classes=["no", "yes"]))
    assert "predicting price by logistic regression" in text
    assert ">accuracy<" in text
    assert ">AUC<" in text
    assert "sure that it is better" in text
    assert "by networks:small." in page(made(model="networks:small"))


def test_gains_are_not_broken_in_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    console = console_for(False)
    console.width = 80
    show(console, made(), tmp_path)
    assert "−0.046 [−0.058, −0.033]" in capsys.readouterr().out


def test_report_and_watch_take_an_advice_folder(coterie: Command, folder: Path) -> None:
    for command in ("report", "watch"):
        done = coterie(command, folder)
        assert done.code == 0, done.err
        assert f"{folder}/advice.html" in done.out
    assert (folder / "advice.html").read_text() == page(made())
    assert coterie("report", folder, "--out", folder / "elsewhere", "--json").json == {
        "report": f"{folder}/elsewhere/advice.html"
    }
    done = coterie("report", folder, folder)
    assert done.code == 1
    assert "holds an advice, not a run" in done.err


@pytest.mark.parametrize("command", ["report", "watch"])
def test_an_unfinished_advice_is_told_and_not_waited_for(coterie: Command, folder: Path, command: str) -> None:
    (folder / "advice.json").unlink()
    (folder / "advice.log").write_text("4 partners\nscreening: 4 models\n")
    done = coterie(command, folder)
    assert done.code == 2
    assert "is not finished; its last step: screening: 4 models." in done.err


def test_an_advice_of_an_earlier_version_is_told(coterie: Command, folder: Path) -> None:
    (folder / "advice.json").write_text(json.dumps({**made(), "version": 1}))
    done = coterie("report", folder)
    assert done.code == 2
    assert "another version" in done.err


@pytest.mark.parametrize("better", [0.0, 0.1])
def test_trees_that_are_better_alone_are_told(better: float) -> None:
    advice = made(classes=["no", "yes"])
    advice["trees"] = {"values": {name: value + better for name, value in advice["trees"]["values"].items()}}
    assert ("problem.model=mlp" in page(advice)) == (better > 0)


@pytest.mark.parametrize("text", ["{", "[]", '{"data": {}}', json.dumps({"version": 2, "measure": 3})])
def test_a_damaged_advice_is_told(coterie: Command, folder: Path, text: str) -> None:
    (folder / "advice.json").write_text(text)
    done = coterie("report", folder)
    assert done.code == 2
    assert "advice.json is damaged" in done.err


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_nothing_is_cut_on_a_phone(tmp_path: Path, folder: Path) -> None:
    (folder / "advice.html").write_text(page(made(classes=["no", "yes"])))
    with browser(tmp_path / "profile") as tab:
        tab.open((folder / "advice.html").as_uri(), width=390)
        assert tab.run("document.documentElement.scrollWidth") <= 390
        cut = "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).length"
        assert tab.run(cut) == 0
        assert tab.errors == []
