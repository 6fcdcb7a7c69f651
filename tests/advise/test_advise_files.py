"""From files to advice.json and a model: one rule for every entry, bad files, and the same answer every time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import NAMES, federation, rows, settings, write

from coterie.advise.advise import Advised, advise
from coterie.advise.verdicts import VERDICTS
from coterie.errors import RunError, UsageError
from coterie.experiment.config import load
from coterie.experiment.predict import load_model, predict
from coterie.report.card import write_card

KINDS = {"north": "friend", "east": "friend", "west": "opposite"}
WORLDS = [
    pytest.param({}, id="two classes"),
    pytest.param({"classes": 3}, id="three classes"),
    pytest.param({"number": True}, id="a number"),
]


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.ensemble import models

    monkeypatch.setattr(models, "TREES", 16)
    monkeypatch.setattr(models, "PACE", 1.6)
    monkeypatch.setattr(models, "FEWEST_ROUNDS", 4)


def advised(flags: dict[str, Any], folder: Path | None = None, **given: Any) -> Advised:
    return advise(load(None, {}, flags), folder, **given)


def by_name(found: Advised) -> dict[str, dict[str, Any]]:
    return {entry["name"].removesuffix(".csv"): entry for entry in found.advice["partners"]}


def check(advice: dict[str, Any]) -> None:
    """What holds of every advice, whatever the files are."""
    json.dumps(advice, allow_nan=False)
    assert advice["worth_it"] in ("yes", "not yet", "no")
    assert advice["headline"]
    assert advice["next"]
    assert sum(advice["delivered"]["shares"].values()) == pytest.approx(1.0)
    assert (advice["delivered"]["what"] == "alone") == (set(advice["delivered"]["shares"]) == {"you"})
    for entry in advice["partners"]:
        assert entry["verdict"] in VERDICTS
        assert 0.0 <= entry["probability"] <= 1.0
        assert entry["gain"]["low"] <= entry["gain"]["value"] <= entry["gain"]["high"]
        assert entry["reason"]
        assert (entry["verdict"] == "helps") <= (entry["probability"] >= 0.5 and entry["gain"]["value"] > 0)
    if advice["worth_it"] != "no":
        assert advice["delivered"]["gain"]["value"] > 0


@pytest.mark.parametrize("world", WORLDS)
def test_an_advice_says_who_and_what_and_stores_it(world: dict[str, Any], tmp_path: Path) -> None:
    found = advised(federation(tmp_path, KINDS, **world), tmp_path / "advice")
    check(found.advice)
    assert found.advice == json.loads((tmp_path / "advice" / "advice.json").read_text())
    entries = by_name(found)
    assert entries["west"]["verdict"] in ("left out", "differs")
    assert entries["north"]["z"] < -2
    for name, stack in (("model", found.model), ("alone", None)):
        net, prepared = load_model(tmp_path / "advice" / name)
        assert prepared.form.label == "label"
        assert name == "alone" or net.shares() == stack.shares()  # type: ignore[union-attr]
    table = predict(tmp_path / "advice" / "model", tmp_path / "mine.csv")
    x = rows(60, 1, **world)[0].astype(np.float32).astype(float)
    outputs = found.model.distribution(x)
    if world.get("number"):
        shown = (
            np.array([float(row[1]) for row in table.rows]) - found.prepared.label_mean
        ) / found.prepared.label_deviation
        np.testing.assert_allclose(shown, outputs[:, 0], atol=1e-4)
    else:
        np.testing.assert_allclose([[float(v) for v in row[2:]] for row in table.rows], outputs, atol=2e-4)
    assert write_card(tmp_path / "advice")


@pytest.mark.parametrize(("kind", "world"), [("noise", {}), ("friend", {"number": True})])
def test_five_seeds_give_one_answer_where_the_case_is_clear(kind: str, world: dict[str, Any], tmp_path: Path) -> None:
    flags = federation(tmp_path, {"north": kind, "east": kind}, own=40, size=1000, **world)
    assert len({advised({**flags, "run.seed": seed}).advice["worth_it"] for seed in range(5)}) == 1


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    kinds = {"north": "friend", "west": "friend", "east": "friend"}
    flags = federation(tmp_path, kinds, own=25, size=400, number=True)
    for name in ("one", "two"):
        advised(flags, tmp_path / name)
    for file in ("advice.json", "model/model.safetensors", "alone/model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def opposite_words(folder: Path) -> None:
    x, y = rows(200, 10)
    write(folder / "sites" / "north.csv", x, y, ward=["other", "words"] * 100)


CHANGES: dict[str, Any] = {
    "units": lambda folder: write(folder / "sites" / "north.csv", rows(200, 10)[0] * 1e6, rows(200, 10)[1]),
    "noise": lambda folder: write(
        folder / "sites" / "north.csv", np.random.default_rng(0).normal(size=(200, 5)), rows(200, 10)[1]
    ),
    "outliers": lambda folder: write(
        folder / "sites" / "north.csv",
        np.where(np.arange(200)[:, None] == 3, 1e300, rows(200, 10)[0]),
        rows(200, 10)[1],
    ),
    "an empty column": lambda folder: write(
        folder / "sites" / "north.csv", rows(200, 10)[0] + [0, np.nan, 0, 0, 0], rows(200, 10)[1]
    ),
    "other words": opposite_words,
    "many rows": lambda folder: write(folder / "sites" / "north.csv", *rows(3000, 10)),
    "columns in another order": lambda folder: write(
        folder / "sites" / "north.csv", rows(200, 10)[0][:, ::-1], rows(200, 10)[1], NAMES[::-1]
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_no_partner_moves_my_own_model_by_a_bit(change: Any, tmp_path: Path) -> None:
    ward = {"ward": ["a", "b", "a"] * 20}
    federation(tmp_path, {"north": "friend"})
    write(tmp_path / "mine.csv", *rows(60, 1), **ward)
    write(tmp_path / "sites" / "north.csv", *rows(200, 10), ward=["a", "b"] * 100)
    flags = settings(tmp_path, **{"problem.keep": list(NAMES)})
    before = advised(flags, tmp_path / "before").advice
    change(tmp_path)
    after = advised(flags, tmp_path / "after").advice
    check(after)
    for file in ("model.safetensors", "preprocess.json"):
        assert (tmp_path / "before" / "alone" / file).read_bytes() == (tmp_path / "after" / "alone" / file).read_bytes()
    assert before["alone"]["choice"] == after["alone"]["choice"]
    assert before["alone"]["values"] == after["alone"]["values"]


BAD: dict[str, tuple[Any, str]] = {
    "without one of my classes": (lambda x, y: (x[y > 0], y[y > 0]), "north"),
    "of classes that I do not know": (lambda x, y: (x, y + 7), "none of its rows has a class of yours"),
    "one row": (lambda x, y: (x[:1], y[:1]), "north"),
    "three rows": (lambda x, y: (x[:3], y[:3]), "north"),
    "a constant label": (lambda x, y: (x, np.zeros_like(y)), "north"),
    "nothing known": (lambda x, y: (np.full_like(x, np.nan), y), "north"),
    "enormous": (lambda x, y: (x * 1e35, y), "north"),
    "tiny": (lambda x, y: (x * 1e-30, y), "north"),
}


@pytest.mark.parametrize(("spoil", "word"), BAD.values(), ids=BAD)
def test_a_partner_with_bad_rows_is_named_and_the_rest_is_answered(spoil: Any, word: str, tmp_path: Path) -> None:
    federation(tmp_path, {"north": "friend", "east": "friend"}, own=40)
    write(tmp_path / "sites" / "north.csv", *spoil(*rows(200, 10)))
    found = advised(settings(tmp_path, **{"problem.keep": list(NAMES), "problem.align_labels": False}))
    check(found.advice)
    north = by_name(found)["north"]
    assert north["verdict"] in ("left out", "nothing", "differs")
    assert word in str(north)
    assert by_name(found)["east"]["z"] < -2


def test_a_partner_that_lacks_a_column_does_without(tmp_path: Path) -> None:
    federation(tmp_path, {"north": "friend", "east": "friend"}, own=40)
    x, y = rows(200, 10)
    write(tmp_path / "sites" / "north.csv", x[:, 1:], y, NAMES[1:])
    found = advised(settings(tmp_path))
    check(found.advice)
    assert by_name(found)["north"]["z"] < -2
    assert any("north.csv lacks the column 'age'" in note.replace(":", "") for note in found.advice["notes"])


def test_identical_partners_are_twice_the_same(tmp_path: Path) -> None:
    federation(tmp_path, {"north": "friend", "east": "friend"}, own=40)
    (tmp_path / "sites" / "east.csv").write_bytes((tmp_path / "sites" / "north.csv").read_bytes())
    found = advised(settings(tmp_path))
    check(found.advice)
    north, east = by_name(found)["north"], by_name(found)["east"]
    assert {**north, "name": "", "share": 0, "reason": ""} == {**east, "name": "", "share": 0, "reason": ""}


def test_twenty_partners_of_which_none_matters_do_not_help(tmp_path: Path) -> None:
    federation(tmp_path, {f"s{k:02}": "noise" for k in range(20)}, own=60, size=60)
    found = advised(settings(tmp_path))
    check(found.advice)
    assert not [name for name, entry in by_name(found).items() if entry["verdict"] == "helps"]


def test_an_outlier_of_my_own_makes_no_trouble(tmp_path: Path) -> None:
    federation(tmp_path, {"north": "friend", "east": "friend"}, own=40)
    x, y = rows(40, 1)
    x[5, 0], x[:, 3] = 1e300, np.nan
    write(tmp_path / "mine.csv", x, y)
    check(advised(settings(tmp_path, **{"problem.keep": list(NAMES)})).advice)


def test_few_rows_of_a_class_are_judged_by_the_brier_score(tmp_path: Path) -> None:
    federation(tmp_path, {"north": "friend", "east": "friend"}, own=40)
    x, y = rows(400, 1)
    keep = np.append(np.flatnonzero(y == 0)[:60], np.flatnonzero(y == 1)[:8])
    write(tmp_path / "mine.csv", x[keep], y[keep])
    found = advised(settings(tmp_path))
    check(found.advice)
    assert found.advice["measure"]["name"] == "brier"
    assert "'c1' (8)" in found.advice["warnings"][0]


@pytest.mark.parametrize("measure", ["auc", "accuracy", "balanced_accuracy", "brier", "log_loss"])
def test_every_measure_can_decide(measure: str, tmp_path: Path) -> None:
    check(advised(federation(tmp_path, {"north": "friend", "east": "friend"}, own=30), measure=measure).advice)


def test_nine_thousand_rows_of_my_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.advise import decide

    monkeypatch.setattr(decide, "MOST_DEALINGS", 2)
    federation(tmp_path, {"north": "friend"}, own=9000)
    found = advised(settings(tmp_path))
    check(found.advice)
    assert found.advice["data"]["target_rows"] == 9000


def test_an_own_table_that_cannot_be_used_is_one_fault_about_it(tmp_path: Path) -> None:
    federation(tmp_path, {"north": "friend", "east": "friend"})
    for lines in (1, 2):
        text = (tmp_path / "mine.csv").read_text().splitlines()
        (tmp_path / "mine.csv").write_text("\n".join(text[:lines]) + "\n")
        with pytest.raises(UsageError) as caught:
            advised(settings(tmp_path))
        assert "1 fault found in 3 files" in str(caught.value)
        assert "mine.csv" in str(caught.value)
        assert "north.csv" not in str(caught.value)
        federation(tmp_path, {"north": "friend", "east": "friend"})


def test_an_advice_that_was_stopped_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = federation(tmp_path, {"north": "friend", "east": "friend"}, own=30)
    wanted = advised(flags, tmp_path / "whole").advice
    from coterie.advise import advise as module

    def stop(*given: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "decide", stop)
        with pytest.raises(RunError, match="stopped"):
            advised(flags, tmp_path / "out")
    assert advised(flags, tmp_path / "out").advice == wanted
    with pytest.raises(UsageError, match="--force"):
        advised(flags, tmp_path / "out")
    assert advised(flags, tmp_path / "out", force=True).advice == wanted


def test_an_unfinished_folder_of_other_settings_is_kept(tmp_path: Path) -> None:
    flags = federation(tmp_path, {"north": "friend", "east": "friend"}, own=30)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.toml").write_text("[run]\nseed = 7\n")
    with pytest.raises(UsageError, match="--force"):
        advised(flags, tmp_path / "out")


def test_words_for_missing_values_travel_with_the_model(tmp_path: Path) -> None:
    flags = federation(tmp_path, {"north": "friend", "east": "friend"}, own=40)
    advised({**flags, "problem.missing": ["55.5"]}, tmp_path / "out")
    rows = (tmp_path / "mine.csv").read_text().splitlines()[:3]
    place = rows[0].split(",").index("dose")
    shares = []
    for value in ("", "55.5"):
        cells = rows[1].split(",")
        cells[place] = value
        (tmp_path / "new.csv").write_text(f"{rows[0]}\n{','.join(cells)}\n")
        shares.append(predict(tmp_path / "out" / "model", tmp_path / "new.csv").rows)
    assert shares[0] == shares[1]
