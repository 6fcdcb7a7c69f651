"""The benchmark of four hospitals: its arithmetic, and on the real data what docs/heart.md says."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks import heart

from coterie.problems.data import sets


def need_data() -> None:
    if sets.complete(sets.known("heart-disease")) is None:
        pytest.skip(f"heart-disease is not in {' or '.join(map(str, sets.places()))}")


def test_accuracy_has_wilsons_interval_and_auc_needs_two_of_each() -> None:
    sick = np.array([True] * 8 + [False] * 2)
    found = heart.judged(np.where(sick, 0.9, 0.6), sick)
    assert found["accuracy"] == 0.8
    assert (found["low"], found["high"]) == pytest.approx((0.4902, 0.9433), abs=1e-3)
    assert found["auc"] == 1.0
    assert heart.judged(np.full(9, 0.9), sick[:9])["auc"] is None


def test_the_table_has_one_row_per_model_and_the_reason_of_a_refusal() -> None:
    tested = {"all pooled": {"accuracy": 0.75, "low": 0.5, "high": 0.9, "auc": None}}
    text = heart.shown([{"centre": "switzerland", "refused": "nothing\n  to tell apart", "tested": tested}])
    assert "| switzerland | refused: nothing to tell apart |" in text
    assert "| scikit-learn, all pooled | 0.750 [0.50, 0.90] (–) |" in text
    assert "| FLamby, FedYogi | 0.738 |" in text


@pytest.mark.data
def test_switzerland_gets_no_advice(tmp_path: Path) -> None:
    need_data()
    found = heart.centre(tmp_path / "switzerland", "switzerland")
    assert "all rows have the class 'yes'; there is nothing to tell apart" in found["refused"]
    assert (found["tested_rows"], found["tested_healthy"]) == (16, 1)
    page = (Path(__file__).parent.parent / "docs" / "heart.md").read_text(encoding="utf-8")
    assert "all rows have the class 'yes'; there is nothing to tell apart" in page


@pytest.mark.data
@pytest.mark.slow
def test_no_hospital_has_a_clear_gain(tmp_path: Path) -> None:
    need_data()
    found = {name: heart.centre(tmp_path / name, name) for name in ("cleveland", "hungarian", "va")}
    assert {name: one["answer"] for name, one in found.items()} == {
        "cleveland": "no",
        "hungarian": "no",
        "va": "not yet",
    }
    for name in ("cleveland", "hungarian"):
        assert found[name]["headline"].startswith("No: use your own model"), name
        assert found[name]["cross_validated"]["delivered"] == found[name]["cross_validated"]["alone"], name
