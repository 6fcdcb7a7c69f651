"""Model cards: what the folder says, escaped, for people and for programs."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import UsageError
from coterie.report.card import card, plain, write_card

EVIL = "<script>alert(1)</script>|[x](http://e)\n# y"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "advice" / "model"
    folder.mkdir(parents=True)
    about: dict[str, Any] = {
        "label": EVIL,
        "kind": "classification",
        "numeric": [{"name": "age", "indicator": True}, {"name": "dose", "indicator": False}],
        "categorical": [{"name": "city", "words": ["Oslo", "Rome"], "missing": True}],
        "classes": ["ill", "well"],
        "class_counts": [30, 70],
        "missing": ["99"],
        "inputs": [6],
        "model": {"name": "logistic", "outputs": 2, "shape": [6]},
        "clients": ["north.csv", "(the target)"],
    }
    summary = {
        "method": "meritfed",
        "rounds": 60,
        "seed": 3,
        "weights": [0.25, 0.75],
        "final": {"validation_accuracy": 0.875, "note": "x"},
        "platform": {"coterie": "0.1.0", "torch": "2.13.0"},
    }
    advice = {
        "headline": "Yes, train together.",
        "measure": {"name": "auc", "label": "AUC"},
        "measures": [{"name": "auc", "label": "AUC"}],
        "data": {"target_rows": 60},
        "partners": [
            {"name": "north.csv", "rows": 80, "verdict": "helps", "probability": 0.8, "reason": EVIL, "share": 0.4}
            | {"gain": {"value": 0.01, "low": 0.001, "high": 0.02}}
        ],
        "alone": {"choice": "linear", "values": {"linear": {"auc": 0.9}}},
        "delivered": {"values": {"auc": 0.91}, "shares": {"north.csv": 0.4, "you": 0.6}},
        "notes": ["north.csv: 2 rows were removed"],
    }
    for path, data in (("preprocess.json", about), ("summary.json", summary), ("../advice.json", advice)):
        (folder / path).write_text(json.dumps(data), encoding="utf-8")
    return folder


def test_the_card_holds_what_the_folder_holds(model: Path) -> None:
    paths = write_card(model.parent, now=lambda: datetime(2026, 1, 2, tzinfo=UTC))
    assert paths == [model / "model-card.md", model / "model-card.json"]
    facts = json.loads(paths[1].read_text(encoding="utf-8"))
    assert facts["written"] == "2026-01-02"
    assert facts["weights"] == {"north.csv": 0.4, "you": 0.6}
    assert facts["data"]["rows"] == {"north.csv": 80, "own rows": 60}
    assert facts["data"]["often_missing"] == ["age", "city"]
    assert facts["data"]["classes"] == {"ill": 30, "well": 70}
    assert facts["measures"] == {"validation_accuracy": 0.875}
    assert facts["advice"]["partners"][0]["verdict"] == "helps"
    text = paths[0].read_text(encoding="utf-8")
    for part in ("Yes, train together", "0.01 \\[0.001, 0.02\\]", "2 rows were removed", "| own rows | 60 |"):
        assert part in text, part
    assert "city (2 words)" in text
    assert "not chosen yet" in text


def test_texts_of_files_are_no_markup(model: Path) -> None:
    text = write_card(model)[0].read_text(encoding="utf-8")
    assert "<script" not in text
    assert "\\[x\\](http\\://e)" in text  # the brackets are text, so there is no link
    assert "\n# y" not in text
    assert plain("- http://e www.e") == "\\- http\\://e www\\.e"
    assert plain("a|b\n`c`") == "a\\|b \\`c\\`"


def test_a_run_without_advice_has_a_card_too(model: Path) -> None:
    (model.parent / "advice.json").unlink()
    (model / "summary.json").unlink()
    text = write_card(model)[0].read_text(encoding="utf-8")
    assert "The folder holds no measures." in text
    assert "What was chosen" not in text


def test_a_folder_without_a_model_and_a_damaged_one_are_errors(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no preprocess\.json"):
        write_card(tmp_path)
    (model / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match=r"summary\.json is damaged"):
        card(model)
    (model / "summary.json").unlink()
    (model / "preprocess.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="is damaged: KeyError"):
        card(model)
