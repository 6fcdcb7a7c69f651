"""The page of an advice: its words, its layout on a phone, and the commands that take an advice folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, browser

from coterie.advise.page import page, show
from coterie.report.terminal import console_for

Command = Callable[..., Any]


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.0123, "high": value + 0.0123}


def partner(name: str, verdict: str, gain: float) -> dict[str, Any]:
    weight = {"value": 0.5, "low": 0.25, "high": 0.75}
    known = {"name": name, "rows": 1200, "verdict": verdict, "reason": "a reason", "contribution": 0.01}
    return {**known, "gain": interval(gain), "weight": weight}


def made(**data: Any) -> dict[str, Any]:
    """An advice as advice.json holds it."""
    about = {"target": "mine.csv", "label": "price", "classes": [], "model": "logistic"}
    strategy = {"error": 0.25, "accuracy": None}
    compared = {"gain": interval(0.02), "relative": 0.1, "p_better": 0.2, "effect_size": 0.1}
    moved = {"rounds": 60, "bytes": 64_000}
    bound = {"target_rows": 60, "validation_term": 0.3, "training_term": 0.9}
    return {
        "data": {**about, "target_rows": 60, "partner_rows": 2400, **data},
        "headline": "Undecided: the error on your rows is 0.2500.",
        "worth_it": "not shown",
        "measure": "squared error",
        "partners": [partner("a-partner-with-a-long-name.csv", "helps", 0.0321), partner("<b>.csv", "harms", -0.0456)],
        "strategies": {"learned": strategy, "alone": strategy, "average": strategy},
        "comparison": {"alone": compared, "average": compared},
        "cost": {"training": moved, "screening": moved, "trainings": 16},
        "certainty": {"target_rows": 60, "rows_needed": 600, "bound": [bound] * 4},
        "contributions": {"kind": "loo", "trainings": 6, "most": 6, "bytes": 9, "agreement_with_weights": None},
        "plan": {"folds": 5, "placebos": 20, "repeats": 2, "bootstraps": 5, "level": 0.05},
        "notes": [],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "advice.json").write_text(json.dumps(made()))
    return tmp_path


def test_gains_stand_in_the_table_and_models_have_their_names() -> None:
    text = page(made())
    assert "+0.0321 [+0.0198, +0.0444]" in text
    assert "predicting price by linear regression" in text
    assert "accuracy" not in text
    assert "<b>" not in text
    text = page(made(classes=["no", "yes"]))
    assert "predicting price by logistic regression" in text
    assert ">accuracy<" in text
    assert "by networks:small." in page(made(model="networks:small"))


def test_gains_are_not_broken_in_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    console = console_for(False)
    console.width = 80
    show(console, made(), tmp_path)
    assert "-0.0456 [-0.0579, -0.0333]" in capsys.readouterr().out


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


@pytest.mark.parametrize("text", ["{", "[]", '{"data": {}}'])
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
