"""The grid of public tables: the truth about partners, records that are not made twice, and the arithmetic of show."""

import csv
import json
from collections import Counter
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.tables import adapter, faults, references, runs, summary
from benchmarks.tables.__main__ import THREADS, main
from benchmarks.tables.scenario import CANDIDATES, CELLS, altered, fitted, scenario
from benchmarks.tables.sources import SOURCES, Source, Table, table
from sklearn.metrics import roc_auc_score

ROWS = 1500  # of the table that is run


def made(kind: str = "classification", rows: int = 4500, classes: int = 2) -> Table:
    """A table with a known rule; one column of words, some cells empty."""
    draw = np.random.default_rng(3)
    x = draw.normal(20.0, 3.0, (rows, 3))
    score = x[:, 0] - x[:, 1] + draw.normal(0.0, 1.0, rows)
    edges = np.quantile(score, np.arange(1, classes) / classes)
    labels = score if kind == "regression" else np.array([f"class{k}" for k in np.searchsorted(edges, score)])
    x[::50, 2] = np.nan
    words = np.array(["a", "b", None], dtype=object)[draw.integers(0, 3, rows)]
    columns = {"x 0": x[:, 0], "x 1": x[:, 1], "x 2": x[:, 2], "word": words, "y": labels}
    return table("made", kind, "y", columns)  # type: ignore[arg-type]


def keys(rows: Table) -> set[float]:
    return set(rows.numbers[:, 0].tolist())


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_partners_are_what_the_truth_says(kind: str) -> None:
    whole = made(kind)
    labels = dict(zip(whole.numbers[:, 0].tolist(), whole.labels.tolist(), strict=True))
    drawn = scenario(whole, "mixed", 150, 7)
    assert drawn.own.rows == 150
    assert drawn.test.rows >= 1000
    wanted = [one for one in CELLS["mixed"] if kind == "classification" or one[0] != "prevalence"]
    assert Counter((one.truth, one.rows) for one in drawn.partners) == Counter(wanted)
    assert [one.file for one in drawn.partners] == [f"site-{k + 1:02d}.csv" for k in range(len(wanted))]
    holders = [drawn.own, drawn.test, *(one.clean for one in drawn.partners)]
    assert sum(len(keys(one)) for one in holders) == len(set.union(*map(keys, holders))), "a row has two holders"
    for one in drawn.partners:
        if one.truth == "unit":
            continue
        true = np.array([labels[key] for key in one.table.numbers[:, 0].tolist()])
        kept = (one.table.labels == true).mean()
        assert (kept == 1.0) == (one.truth in ("friend", "prevalence", "shift"))
        if one.truth == "permuted":
            assert sorted(one.table.labels) == sorted(true)


def test_noise_flips_shifts_and_units() -> None:
    draw = np.random.default_rng(0)
    rows = made(classes=3).take(np.arange(600))
    for name, share in (("noise10", 0.1), ("noise30", 0.3), ("noise50", 0.5)):
        assert (altered(rows, name, 600, draw)[0].labels != rows.labels).mean() == pytest.approx(share)
    assert (altered(rows, "flipped", 600, draw)[0].labels != rows.labels).all()
    numbers = made("regression").take(np.arange(600))
    noisy = altered(numbers, "noise30", 600, draw)[0].labels - numbers.labels
    assert noisy.std() == pytest.approx(2 * numbers.labels.std(), rel=0.1)
    mirrored = altered(numbers, "flipped", 600, draw)[0].labels
    assert np.corrcoef(mirrored, numbers.labels)[0, 1] == pytest.approx(-1.0)
    assert mirrored.mean() == pytest.approx(numbers.labels.mean())
    rare = rows._replace(labels=np.where(np.arange(600) % 5 == 0, "rare", "common").astype(object))
    assert (altered(rare, "prevalence", 200, draw)[0].labels == "rare").mean() > 0.35
    shifted, _ = altered(rows, "shift", 200, draw)
    above = (shifted.numbers > np.nanmedian(rows.numbers, axis=0)).mean(0)
    assert above.max() > 0.75
    wrong, column = altered(rows, "unit", 600, draw)
    j = rows.number_names.index(column)
    known = ~np.isnan(rows.numbers[:, j])
    assert np.allclose(wrong.numbers[known, j], 1000.0 * rows.numbers[known, j])


def test_everything_derives_from_the_seed(tmp_path: Path) -> None:
    for name, split in (("a", 1), ("b", 1), ("c", 2)):
        scenario(made(), "mixed", 80, split).write(tmp_path / name)
    texts = [[path.read_text() for path in sorted((tmp_path / name).rglob("*.csv"))] for name in "abc"]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    orders = {tuple(one.truth for one in scenario(made(), "mixed", 80, split).partners) for split in range(3)}
    assert len(orders) == 3, "names must not tell who is who"


def test_small_tables_get_smaller_or_fewer_partners() -> None:
    def needed(chosen: tuple[tuple[str, int], ...]) -> int:
        return sum(rows * CANDIDATES.get(kind, 1) for kind, rows in chosen)

    assert fitted(CELLS["mixed"], 10_000) == CELLS["mixed"]
    for available in (1447, 700, 220, 95):
        chosen = fitted(CELLS["mixed"], available)
        assert needed(chosen) <= available
        assert [kind for kind, _ in chosen] == [kind for kind, _ in CELLS["mixed"]][: len(chosen)]
        assert all(rows >= (80 if len(chosen) > 5 else 40) for _, rows in chosen)
    with pytest.raises(ValueError, match="too few"):
        fitted(CELLS["mixed"], 20)
    assert {one.truth for one in scenario(made(classes=4), "useless", 150, 0).partners} == {"permuted"}


def test_csv_holds_numbers_words_and_gaps(tmp_path: Path) -> None:
    drawn = scenario(made(), "friends", 150, 0)
    drawn.write(tmp_path)
    lines = list(csv.DictReader((tmp_path / "mine.csv").read_text().splitlines()))
    assert list(lines[0]) == ["x_0", "x_1", "x_2", "word", "y"]
    assert [float(line["x_0"]) for line in lines] == drawn.own.numbers[:, 0].tolist()
    assert {line["word"] for line in lines} == {"a", "b", ""}
    assert sum(line["x_2"] == "" for line in lines) == int(np.isnan(drawn.own.numbers[:, 2]).sum())


def test_planted_faults_count_as_found_only_if_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = made(rows=ROWS)
    assert faults.tried(rows, "none", 150, 0) == (None, [])
    assert faults.tried(rows, "unit × 1000", 150, 0) == (True, [])
    assert faults.tried(made("regression", ROWS), "classes in other capitals", 150, 0) == (None, [])
    monkeypatch.setattr(adapter, "questioned", lambda *arguments: [("site-02.csv", "column 'x_0' is odd")])
    found, others = faults.tried(rows, "unit × 1000", 150, 0)
    assert not found
    assert others == ["site-02.csv: column 'x_0' is odd"]
    monkeypatch.setitem(SOURCES, "made", Source(lambda name: rows, "", "made up"))
    text = faults.shown(["made"], 150, range(2))
    assert "| unit × 1000 | 0.000 (0/2) | 0/2 |" in text
    assert text.endswith("without a fault\n\n- 2 × made, none: column 'x_N' is odd")


@pytest.mark.parametrize("name", [name for name in faults.FAULTS if name != faults.NO_FAULT])
def test_every_fault_changes_files(name: str, tmp_path: Path) -> None:
    drawn = scenario(made(rows=ROWS), "friends", 150, 0)
    drawn.write(tmp_path)
    before = {path: path.read_text() for path in tmp_path.rglob("*.csv")}
    planted = faults.FAULTS[name](tmp_path, drawn, np.random.default_rng(0))
    assert planted is not None
    changed = [path.name for path in tmp_path.rglob("*.csv") if before.get(path) != path.read_text()]
    assert changed == [planted.file] if planted.file else len(changed) == len(before)


def test_measures_agree_with_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    shares, truth = draw.dirichlet(np.ones(3), 200).round(2), draw.integers(0, 3, 200)
    areas = [roc_auc_score(truth == k, shares[:, k]) for k in range(3)]
    assert references.auc(shares, truth) == pytest.approx(np.mean(areas))
    assert references.auc(shares[:, :2], truth > 0) == pytest.approx(roc_auc_score(truth > 0, shares[:, 1]))
    found = references.measures(np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]), deviation=2.0)
    assert found == pytest.approx({"r2": 0.5, "mae": 1 / 3, "mse": 1 / 12})
    assert references.better("brier", 0.1, 0.3) == pytest.approx(0.2)
    assert references.better("auc", 0.9, 0.8) == pytest.approx(0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored run of a generated table, with few rounds."""
    out, threads = tmp_path_factory.mktemp("grid"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in THREADS:
            patch.setenv(name, "1")
        patch.setitem(SOURCES, "made", Source(lambda name: made(rows=ROWS), "", "made up"))
        try:
            main(
                [
                    "run",
                    "--tables",
                    "made",
                    "--cells",
                    "mixed",
                    *("--splits", "1", "--own", "80", "--quick", "--out", str(out)),
                ]
            )
        finally:
            torch.set_num_threads(threads)
    return out


def test_a_run_holds_truth_verdicts_and_scores(folder: Path) -> None:
    (record,) = runs.stored(folder)
    assert record["error"] == ""
    assert record["unit_fault"]["found"]
    drawn = scenario(made(rows=ROWS), "mixed", 80, 0)
    assert [(one["file"], one["truth"]) for one in record["partners"]] == [(p.file, p.truth) for p in drawn.partners]
    assert all(one["verdict"] in adapter.VERDICTS for one in record["partners"])
    assert set(record["partner_gains"]) == {one.file for one in drawn.partners}
    assert set(record["scores"]) == {"delivered", *summary.REFERENCES}
    assert record["scores"]["friends"]["auc"] > 0.95
    (interval, *_) = record["intervals"]
    lead = record["scores"]["delivered"]["auc"] - record["scores"]["coterie alone"]["auc"]
    assert interval["true"] == pytest.approx(lead)


def test_what_is_stored_is_not_run_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = folder.glob("*.json")
    before = path.read_text()
    calls: list[runs.Run] = []

    def recorded(run: runs.Run, **options: Any) -> dict[str, Any]:
        calls.append(run)
        return json.loads(before) | run._asdict()

    monkeypatch.setattr(runs, "measured", recorded)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    wanted = list(runs.grid(["made"], ["mixed"], [80], range(2), [0]))
    assert runs.perform(wanted, folder) == 1
    assert [run.split for run in calls] == [1]
    assert path.read_text() == before
    assert len(runs.stored(folder)) == 2
    (folder / calls[0].file).unlink()


def test_an_advice_that_fails_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise ValueError("no such luck")

    monkeypatch.setattr(adapter, "advise", fails)
    found = runs.measured(runs.Run("made", "one", 80, 0), table=made(rows=ROWS), quick=True)
    assert found["error"] == "ValueError: no such luck"
    assert [one["verdict"] for one in found["partners"]] == [None] * 10
    assert "scores" not in found


def test_a_missing_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SOURCES, "absent", Source(lambda name: made(), "no_such_package", "not there"))
    for name in THREADS:
        monkeypatch.setenv(name, "1")
    main(["run", "--tables", "absent", "--out", str(tmp_path)])
    assert "absent is skipped: pip install no_such_package pandas" in capsys.readouterr().out


def told(truth: str, verdict: str, rows: int = 200, file: str = "") -> dict[str, Any]:
    return {"file": file or f"{truth}{rows}", "truth": truth, "rows": rows, "verdict": verdict}


def record(*partners: dict[str, Any], **changes: Any) -> dict[str, Any]:
    scores = {"delivered": 0.9, "coterie alone": 0.85, "alone": 0.88, "helpers": 0.93}
    plain = {
        "table": "t",
        "cell": "mixed",
        "own": 150,
        "split": 0,
        "seed": 0,
        "kind": "classification",
        "error": "",
        "seconds": 2.0,
        "answer": "yes",
        "delivered": "learned",
        "unit_fault": None,
        "partners": list(partners),
        "scores": {name: {"auc": value} for name, value in scores.items()},
        "partner_gains": {one["file"]: {"auc": 0.01} for one in partners},
        "intervals": [{"measure": "brier", "gain": [0.1, 0.05, 0.15], "true": 0.08, "test_error": 0.0}],
    }
    return plain | changes


def test_recall_precision_and_alarms() -> None:
    records = [
        record(
            told("friend", "helps"), told("friend", "may help", 80), told("permuted", "helps"), told("flipped", "harms")
        ),
        record(told("friend", "harms"), told("noise50", "no use"), split=1),
        record(told("friend", "helps", file="x"), own=600),
        record(told("permuted", "helps"), cell="useless"),
    ]
    rows = {what: found for what, _, found in summary.must_show(records)}
    assert rows["friends that are said to help, 150 own rows"] == "0.333 (1/3)"
    assert rows["… of 80 rows"] == "0.000 (0/1)"
    assert rows["precision against permuted and noise ≥ 30 %"] == "0.667 (2/3)"
    assert rows["permuted and noise ≥ 30 % that are said to help"] == "0.667 (2/3)"
    assert rows["friends that are said to harm"] == "0.250 (1/4)"
    assert rows["flipped labels that are said to harm"] == "1.000 (1/1)"
    assert "| friend | 4 | 2 | 1 | 0 | 1 |" in summary.by_verdict(records)


def test_coverage_and_leads() -> None:
    outside = {"measure": "brier", "gain": [0.1, 0.05, 0.15], "true": 0.2, "test_error": 0.06}
    records = [record(), record(intervals=[outside], table="u")]
    assert summary.coverage(records) == (1, 2)
    assert summary.coverage(records, with_test_error=True) == (2, 2)
    assert summary.ahead(records[0], "alone", "helpers") == pytest.approx(-0.03)
    assert summary.leads([records[0], record(scores=None)], "coterie alone") == pytest.approx([0.05])
    worse = record(scores={"delivered": {"auc": 0.8}, "alone": {"auc": 0.9}}, table="u")
    found = {what: value for what, _, value in summary.must_show([record(), worse])}
    assert found["… − scikit-learn's alone, mean (worst cell)"] == "– (–)"  # the last row of that name is of R²
    assert summary.by_cell([record(), worse]).splitlines()[2].count("-0.0400 (-0.1000)") == 1
    assert isnan(summary.Share(0, 0).value)


def test_stability_and_calibration() -> None:
    first = record(told("friend", "helps", file="a"), told("permuted", "harms", file="b"))
    other = record(told("friend", "may help", file="a"), told("permuted", "harms", file="b"), seed=1)
    elsewhere = record(told("friend", "may help", file="a"), split=1)
    assert summary.stability([first, other, elsewhere]) == (1, 2)
    sure = record({**told("friend", "helps", file="a"), "probability": 0.97})
    wrong = record({**told("friend", "helps", file="a"), "probability": 1.0}, partner_gains={"a": {"auc": -0.01}})
    assert summary.calibration([sure, wrong, first]) == [("0.95 – 1", (1, 2))]


def test_errors_are_shown_and_counted() -> None:
    failed = record(told("friend", None), error="RunError: diverged", scores=None, intervals=[])  # type: ignore[arg-type]
    del failed["scores"]
    text = summary.text([record(told("friend", "helps")), failed])
    assert "| runs that ended with an error | 0 | 0.500 (1/2) |" in text
    assert "- t, mixed, 150 own rows, split 0: RunError: diverged" in text
    assert "Stated probability" not in text
