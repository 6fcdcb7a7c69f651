"""With [privacy], what problem `files` learns from the clients' rows is bounded, noisy and counted; no word leaves."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from coterie.advise.advise import advise
from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import Config, load
from coterie.experiment.loop import run_rounds
from coterie.federation.stages.privacy import composed, epsilon
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.files import files
from coterie.problems.files.prepare import federation_of
from coterie.problems.files.private import bounded_means, column_means, layout_of, learnt_privately
from coterie.problems.files.tables import Options, expand, read
from coterie.settings import StatisticsPrivacy

HEADER = ("age", "dose", "ward", "label")
BOUNDS = {"age": [0.0, 100.0], "dose": [-1.0, 1.0]}
PATIENT = "Erika Mustermann"
REASON = "needs coterie[privacy]"


def a_table(rows: int, seed: int, *, secret: bool = False) -> list[list[Any]]:
    random = np.random.default_rng(seed)
    table: list[list[Any]] = []
    for i in range(rows):
        age, dose = random.normal(50, 10), random.normal(0.2, 0.3)
        ward = ("north", "south")[int(random.integers(2))]
        table.append([f"{age:.6g}", "NA" if i % 4 == 0 else f"{dose:.6g}", ward, "yes" if age > 50 else "no"])
    if secret:
        table[3][2], table[5][3] = PATIENT, "a class of one client"
    return table


def write(path: Path, rows: list[list[Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([HEADER, *rows])
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for k in range(6):
        write(tmp_path / "sites" / f"s{k}.csv", a_table(30 + 5 * k, k, secret=k == 2))
    write(tmp_path / "mine.csv", a_table(60, 9))
    return tmp_path


def configured(folder: Path, **more: Any) -> Config:
    sets = {
        "run.problem": "files",
        "problem.clients": f"{folder}/sites/*.csv",
        "problem.target": f"{folder}/mine.csv",
        "run.baselines": [],
        "run.rounds": 3,
        "run.threads": 1,
        "federation.mode": "sequential",
        "privacy.clip": 1.0,
        "privacy.noise": 4.0,
        "privacy.bounds": BOUNDS,
    }
    return load(sets={**sets, **more})


def private_problem(folder: Path, noise: float, **more: Any) -> Any:
    context = Context(statistics=StatisticsPrivacy(noise, BOUNDS, **more))
    return files(context, clients=f"{folder}/sites/*.csv", target=f"{folder}/mine.csv")


def tables_of(folder: Path) -> Any:
    return read(*expand(f"{folder}/sites/*.csv", f"{folder}/mine.csv"), Options("label"))


# what leaves a client


def test_no_word_that_only_a_client_has_is_in_any_result(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason=REASON)
    out = tmp_path / "out"
    out.mkdir()
    parts = assemble(configured(folder))
    run_rounds(parts, out)
    told = "".join(path.read_text("utf-8") for path in out.iterdir() if path.suffix in {".json", ".jsonl", ".csv"})
    assert "north" in told
    assert PATIENT not in told
    assert "a class of one client" not in told
    assert not any(PATIENT in note or "one client" in note for note in parts.problem.notes)


def test_the_statistics_are_counted(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason=REASON)
    result = run_rounds(assemble(configured(folder, **{"privacy.statistics": 2.0})), tmp_path)
    spent = result.summary["privacy"]
    whole = epsilon(composed([(4.0, 3), (2.0, 1)]), 1, 1e-5)
    assert spent["epsilon"] == pytest.approx(whole, rel=1e-12)
    assert spent["epsilon_statistics"] == pytest.approx(epsilon(2.0, 1, 1e-5), rel=1e-12)
    assert result.history[0]["epsilon"] == spent["epsilon_statistics"], "before the first round they are all there is"
    assert json.loads((tmp_path / "summary.json").read_text())["privacy"] == spent


def test_without_a_setting_of_their_own_statistics_are_as_noisy_as_an_update(folder: Path) -> None:
    pytest.importorskip("dp_accounting", reason=REASON)
    summary = run_rounds(assemble(configured(folder)), None).summary["privacy"]
    assert summary["epsilon"] == pytest.approx(epsilon(4.0, 3 + 1, 1e-5), rel=1e-12)


def test_a_clients_contribution_is_bounded_whatever_its_rows(folder: Path) -> None:
    """The largest change when one client is replaced by zeros, which is its length, is the radius at most, and
    rows at the bounds reach it: the radius is no larger than it must be."""
    extreme: list[list[Any]] = [["1e9", "-1e9", "north", "yes"]] * 20
    write(folder / "sites" / "s0.csv", extreme)
    write(folder / "sites" / "s1.csv", [["", "", "", "no"], *extreme])
    tables = tables_of(folder)
    layout = layout_of(tables, StatisticsPrivacy(1.0, BOUNDS))
    rows = federation_of(tables).gather(column_means, layout.shared, draw=Draw.of(0)).rows  # before any clipping
    lengths = rows.norm(dim=1)
    assert bool((lengths <= layout.radius * (1 + 1e-12)).all())
    assert float(lengths[0]) == pytest.approx(layout.radius, rel=1e-12)
    assert layout.radius == pytest.approx(math.sqrt(2 * 5 / 4 + 2))


def test_noise_has_the_radius_times_the_multiplier(folder: Path) -> None:
    tables = tables_of(folder)
    layout = layout_of(tables, StatisticsPrivacy(3.0, BOUNDS))
    exact = bounded_means(tables, layout, 0.0, 0)[0]
    noise = torch.stack([bounded_means(tables, layout, 3.0, seed)[0] - exact for seed in range(60)])
    scale = 3.0 * layout.radius
    assert float(noise.std()) == pytest.approx(scale, rel=4 / math.sqrt(2 * noise.numel()))
    assert abs(float(noise.mean())) < 4 * scale / math.sqrt(noise.numel())
    across = torch.corrcoef(noise.transpose(0, 1).flatten(1))
    assert float((across - torch.eye(len(across))).abs().max()) < 5 / math.sqrt(noise[:, 0].numel())


def test_another_release_has_other_noise(folder: Path) -> None:
    """Twice the noise multiplier with one seed: if the noise were the same, the two would give the rows' means away."""
    tables = tables_of(folder)
    layout = layout_of(tables, StatisticsPrivacy(1.0, BOUNDS))
    exact, one, two = (bounded_means(tables, layout, noise, 0)[0] for noise in (0.0, 1.0, 2.0))
    cosine = torch.corrcoef(torch.stack([(one - exact).flatten(), (two - exact).flatten()]))[0, 1]
    assert abs(float(cosine)) < 5 / math.sqrt(exact.numel())


def test_nothing_else_is_asked_of_the_clients(folder: Path) -> None:
    moved = private_problem(folder, 1.0).spent.by_cause
    assert list(moved) == ["private-files/column-means"]
    (entry,) = moved.values()
    assert entry.rounds == 1


# what is learnt of it


def test_little_noise_gives_the_statistics_of_the_mean_client(folder: Path) -> None:
    prepared, _ = learnt_privately(tables_of(folder), StatisticsPrivacy(1e-9, BOUNDS), 0)
    each = []
    for path in [*sorted((folder / "sites").glob("*.csv")), folder / "mine.csv"]:
        with path.open(encoding="utf-8") as file:
            column = np.array([float(row["dose"]) if row["dose"] != "NA" else np.nan for row in csv.DictReader(file)])
        there = ~np.isnan(column)
        clipped = np.where(there, column.clip(-1, 1), 0.0)
        each.append([there.mean(), clipped.mean(), (clipped**2).mean()])
    present, first, second = np.mean(each, axis=0)
    dose = prepared.numeric[1]
    assert dose.mean == pytest.approx(first / present, abs=1e-6)
    assert dose.deviation == pytest.approx(math.sqrt(second / present - (first / present) ** 2), abs=1e-6)
    assert [column.indicator for column in prepared.numeric] == [False, True]


def test_much_noise_falls_back_to_the_declared_range(folder: Path) -> None:
    prepared, _ = learnt_privately(tables_of(folder), StatisticsPrivacy(1e6, BOUNDS), 0)
    age = prepared.numeric[0]
    assert age.mean == pytest.approx(50.0, abs=0.1)
    assert age.deviation == pytest.approx(50.0 / math.sqrt(3), rel=1e-3)
    counts = np.array(prepared.class_counts)
    assert counts.min() > 0
    assert counts.max() - counts.min() <= 2


def test_declared_words_are_kept_above_a_noisy_threshold(folder: Path) -> None:
    """Of declared words the clients' noisy shares decide; a word that nobody has is rarely kept, 5 % in all."""
    words = [f"unused {i}" for i in range(40)]
    for k in range(6):
        rows = a_table(30, k)
        write(folder / "sites" / f"s{k}.csv", [[*row[:2], "west", row[3]] for row in rows])
    tables = tables_of(folder)
    kept = []
    for seed in range(60):
        statistics = StatisticsPrivacy(0.1, BOUNDS, {"ward": ["west", *words]})
        kept.append(set(learnt_privately(tables, statistics, seed)[0].worded[0].words))
    assert all({"north", "south", "west"} <= found for found in kept)
    wrong = sum(bool(found & set(words)) for found in kept)
    assert wrong <= 60 * 0.05 + 4 * math.sqrt(60 * 0.05 * 0.95)


def test_the_threshold_is_that_of_the_noise(folder: Path) -> None:
    layout = layout_of(tables_of(folder), StatisticsPrivacy(0.5, BOUNDS))
    clients = 6
    spread = 0.5 * layout.radius * math.sqrt(clients) / (clients + 1)
    tested = 2 + 4 + 2
    assert layout.threshold(0.5, clients) == pytest.approx(spread * norm.isf(0.05 / tested), rel=1e-12)


def test_rows_of_classes_that_are_not_declared_stay_unused_at_their_client(folder: Path) -> None:
    problem = private_problem(folder, 1.0)
    sizes = problem.train.counts.tolist()
    assert sizes[:6] == [30, 35, 40 - 1, 45, 50, 55]
    assert int(problem.train.columns[-1].min()) >= 0
    declared = private_problem(folder, 1e-9, categories={"label": ["a class of one client"]})
    assert declared.train.counts.tolist()[2] == 40
    write(folder / "sites" / "s0.csv", [["50", "0", "north", "other"]] * 9)
    with pytest.raises(UsageError, match=r"s0\.csv has no row of a declared class.*privacy\.categories"):
        private_problem(folder, 1.0)


# what is refused


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"privacy.bounds": None}, r"privacy\.bounds lacks the columns 'age', 'dose'.*problem\.drop"),
        ({"privacy.bounds": {"age": [0.0, 1.0]}}, r"privacy\.bounds lacks the column 'dose'"),
        ({"privacy.bounds": {**BOUNDS, "hight": [0.0, 1.0]}}, r"privacy\.bounds.*'hight'"),
        ({"privacy.bounds": {**BOUNDS, "age": [5.0, 5.0]}}, r"privacy = .*bounds of 'age' are \[5, 5\]"),
        ({"privacy.bounds": {**BOUNDS, "age": [5.0]}}, r"privacy\.bounds"),
        ({"privacy.categories": {"age": ["x"]}}, r"privacy\.categories.*'age'"),
        ({"privacy.noise": 0.0, "privacy.statistics": 1.0}, r"privacy\.noise"),
    ],
)
def test_what_cannot_be_private_is_refused_with_the_remedy(folder: Path, more: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        assemble(configured(folder, **more))


def test_bounds_are_refused_where_nothing_would_use_them() -> None:
    with pytest.raises(UsageError, match=r"privacy\.bounds.*problem files.*quadratic"):
        assemble(load(sets={"run.problem": "quadratic", "privacy.clip": 1.0, "privacy.bounds": {"x": [0.0, 1.0]}}))


def test_advise_does_not_pretend_to_be_private(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"advise.*\[privacy\].*Leave it out"):
        advise(configured(folder))


def test_clipping_alone_claims_nothing_and_says_so(folder: Path) -> None:
    summary = run_rounds(assemble(configured(folder, **{"privacy.noise": 0.0, "privacy.bounds": None})), None).summary
    assert summary["privacy"]["epsilon"] is None
    assert any(text.startswith("statistics") for text in summary["privacy"]["not_covered"])
