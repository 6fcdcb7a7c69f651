"""The page of an advice: its words, its layout on a phone, and the commands that take an advice folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, browser

from coterie.advise.page import MARKS, VERSION, page, show
from coterie.advise.scores import EXPLAINED, scores_for
from coterie.advise.sentences import headline, next_step
from coterie.advise.verdicts import VERDICTS
from coterie.report.terminal import console_for

Command = Callable[..., Any]


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.0123, "high": value + 0.0123}


def partner(name: str, verdict: str, gain: float, **more: Any) -> dict[str, Any]:
    known = {"name": name, "rows": 1200, "verdict": verdict, "reason": "a reason", "probability": 0.93, "share": 0.0}
    return {**known, "gain": interval(gain), "z": -4.0, "differs": [], **more}


def made(worth: str = "yes", *, classes: int = 0, alone: bool = False, vetoed: bool = False) -> dict[str, Any]:
    """An advice as advice.json holds it."""
    scores = scores_for(classes or None)
    measures = [
        {
            **{key: getattr(one.measure, key) for key in ("name", "label", "better", "scale", "rows", "unit")},
            "explained": EXPLAINED[one.name],
        }
        for one in scores
    ]
    values = {one.name: 0.25 for one in scores}
    first = partner("a-partner-with-a-long-name.csv", "helps", 0.0321, share=0.0 if alone else 0.4)
    partners = [first, partner("<b>.csv", "left out", 0.0, z=None, probability=0.0)]
    shares = {"you": 1.0} if alone else {"you": 0.5, first["name"]: 0.4, "together": 0.1}
    advice = {
        "version": VERSION,
        "worth_it": "no" if alone else worth,
        "seed": 0,
        "measure": measures[0],
        "measures": measures,
        "data": {"target": "mine.csv", "target_rows": 60, "partner_rows": 2400, "columns": 5, "label": "price"}
        | {"kind": "classification" if classes else "regression", "classes": classes},
        "partners": partners,
        "delivered": {
            "what": "alone" if alone else "with partners",
            "shares": shares,
            "members": [{"holder": "you", "kind": "linear", "weight": 1.0}],
            "values": values,
            "gain": interval(0.0 if alone else 0.02),
            "probability": 0.96,
            "gain_over_own_stack": interval(0.01),
            "vetoed": vetoed,
        },
        "alone": {"choice": "linear", "values": dict.fromkeys(("linear", "trees", "stack"), values)},
        "curve": [] if alone else [{"rows": 60 * k, "gain": 0.02 / k, "error": 0.01} for k in (1, 2, 5)],
        "plan": {"dealings": 2, "folds": 5},
        "cost": {"exchanges": 1, "bytes": 64_000},
        "warnings": [],
        "notes": [],
    }
    return {"headline": headline(advice), "next": next_step(advice), **advice}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "advice.json").write_text(json.dumps(made()))
    return tmp_path


def test_gains_stand_in_the_table() -> None:
    text = page(made())
    assert "+0.032 [+0.020, +0.044]" in text
    assert "93 %" in text
    assert "accuracy" not in text
    assert "<b>" not in text
    text = page(made(classes=2))
    assert ">accuracy<" in text
    assert ">AUC<" in text


def test_every_verdict_has_a_mark() -> None:
    assert set(MARKS) == set(VERDICTS)
    for verdict in VERDICTS:
        advice = made()
        advice["partners"] = [partner("a.csv", verdict, 0.01)]
        assert verdict in page(advice)


def test_the_answer_comes_first_with_its_number_and_interval() -> None:
    name = "a-partner-with-a-long-name.csv"
    figures = "R² 0.250 against 0.250 alone (gain +0.020, 95 % interval +0.008 to +0.032)"
    assert made()["headline"] == f"Yes: train with {name}. {figures}."
    assert made("not yet")["headline"] == f"Not yet clear. With {name}: {figures}; chance is not ruled out."
    assert made(alone=True)["headline"] == (
        "No: use your own model (R² 0.250); no partner's models tell more about your rows than yours do."
    )
    assert "not predicted clearly better" in made(alone=True, vetoed=True)["headline"]


def test_the_next_step_is_one_sentence_that_fits_the_answer() -> None:
    steps = [made()["next"], made("not yet")["next"], made(alone=True)["next"]]
    assert "Use the model in model/," in steps[0]
    assert "60 rows" in steps[1]
    assert "Use your own model" in steps[2]
    assert all(step.endswith(".") for step in steps)
    advice = made()
    advice["partners"][0]["differs"] = [{"text": "column 'dose' seems to have another unit", "undone": True}]
    assert (
        next_step(advice) == f"Clear up with {advice['partners'][0]['name']}: column 'dose' seems to have another unit."
    )


def test_gains_are_not_broken_in_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    console = console_for(False)
    console.width = 80
    show(console, made(), tmp_path)
    assert "+0.032 [+0.020, +0.044]" in capsys.readouterr().out


def test_report_takes_an_advice_folder(coterie: Command, folder: Path) -> None:
    done = coterie("report", folder)
    assert done.code == 0, done.err
    assert f"{folder}/advice.html" in done.out
    assert (folder / "advice.html").read_text() == page(made())
    assert coterie("report", folder, "--out", folder / "elsewhere", "--json").json == {
        "report": f"{folder}/elsewhere/advice.html"
    }
    done = coterie("report", folder, folder)
    assert done.code == 1
    assert "holds an advice, not a run" in done.err


def test_an_advice_of_an_earlier_version_is_told(coterie: Command, folder: Path) -> None:
    (folder / "advice.json").write_text(json.dumps({**made(), "version": 1}))
    done = coterie("report", folder)
    assert done.code == 2
    assert "another version" in done.err


@pytest.mark.parametrize("text", ["{", "[]", '{"data": {}}', json.dumps({"version": VERSION, "measure": 3})])
def test_a_damaged_advice_is_told(coterie: Command, folder: Path, text: str) -> None:
    (folder / "advice.json").write_text(text)
    done = coterie("report", folder)
    assert done.code == 2
    assert "advice.json is damaged" in done.err


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_nothing_is_cut_on_a_phone(tmp_path: Path, folder: Path) -> None:
    (folder / "advice.html").write_text(page(made(classes=2)))
    with browser(tmp_path / "profile") as tab:
        tab.open((folder / "advice.html").as_uri(), width=390)
        assert tab.run("document.documentElement.scrollWidth") <= 390
        cut = "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).length"
        assert tab.run(cut) == 0
        assert tab.errors == []
