"""Data faults in generated files: each is found before training, and a healthy federation gives no alarm."""

import csv
import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.errors import UsageError
from coterie.experiment.predict import load_model
from coterie.problems import Context
from coterie.problems.files import PreparedFiles, load_files
from coterie.problems.files.example import write_example
from coterie.problems.files.faults import odd_values, proposed_coding
from coterie.problems.files.findings import BadFiles
from coterie.problems.files.prepare import RIDGE
from coterie.problems.files.reading import perhaps_thousands, with_points
from coterie.settings import StatisticsPrivacy

HEADER = ["weight", "age", "ward", "label"]
SITES = ("north", "south", "east")
Row = list[Any]


def honest(rows: int, seed: int, factor: float = 1.0) -> list[Row]:
    """A log-normal column, whole numbers, words, and a label that depends on them."""
    random = np.random.default_rng(seed)
    weight = np.exp(random.normal(4.0, 0.5, rows)) * factor
    age = random.integers(20, 90, rows)
    ward = random.choice(["a", "b", "c"], rows)
    label = np.where(weight / factor + age + 20 * random.normal(size=rows) > 115, "1", "0")
    return [[f"{w:.3f}", str(a), c, y] for w, a, c, y in zip(weight, age, ward, label, strict=True)]


def write(path: Path, rows: list[Row], header: list[str] = HEADER, delimiter: str = ",") -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])


def rows_of(path: Path) -> list[Row]:
    return list(csv.reader(path.read_text().splitlines()))[1:]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for k, name in enumerate(SITES):
        write(tmp_path / "sites" / f"{name}.csv", honest(80, k))
    write(tmp_path / "mine.csv", honest(60, 9))
    return tmp_path


def loaded(here: Path, context: Context | None = None, **settings: Any) -> PreparedFiles:
    return load_files(context or Context(), clients=f"{here}/sites/*.csv", target=f"{here}/mine.csv", **settings)


def spoil(path: Path, change: Any, header: list[str] = HEADER, delimiter: str = ",") -> None:
    write(path, [change(i, row) for i, row in enumerate(rows_of(path))], header, delimiter)


def refused(here: Path, **settings: Any) -> str:
    with pytest.raises(BadFiles) as error:
        loaded(here, **settings)
    return str(error.value)


def inputs_of(data: PreparedFiles, name: str) -> torch.Tensor:
    return data.stack.client(data.partners.index(name)).all().inputs


def test_a_healthy_federation_gives_no_alarm(here: Path) -> None:
    """Log-normal columns whose means differ by a factor of three are skewed, and honest."""
    for k, name in enumerate(SITES):
        write(here / "sites" / f"{name}.csv", honest(80, k, factor=(3.0, 1 / 3, 1.0)[k]))
    data = loaded(here)
    assert data.findings == ()
    assert data.notes == ()


def test_the_example_gives_no_alarm(tmp_path: Path) -> None:
    label = write_example(tmp_path).label
    data = loaded(tmp_path, label=label)
    assert data.findings == ()
    assert len(data.preparation.numeric) == 30


@pytest.mark.parametrize("power", [3, -3, 1, 2])
def test_another_unit_is_found_and_corrected_by_consent(here: Path, power: int) -> None:
    healthy = loaded(here)
    spoil(here / "sites" / "north.csv", lambda i, row: [repr(float(row[0]) * 10.0**power), *row[1:]])
    message = refused(here)
    times = f"about {10 ** abs(power):,} times {'larger' if power > 0 else 'smaller'} than in mine.csv"
    assert "1 fault found" in message
    assert f"north.csv  column 'weight' is {times}" in message
    assert f'problem.units={{"north.csv" = {{weight = {10.0**power:.15g}}}}}' in message
    for consent in ({"units": {"north.csv": {"weight": 10.0**power}}}, {"repair": True}):
        data = loaded(here, **consent)
        torch.testing.assert_close(inputs_of(data, "north.csv"), inputs_of(healthy, "north.csv"))
        assert any("divided by" in note for note in data.notes)
    assert loaded(here, units={"north.csv": {"weight": 1.0}}).findings == ()
    assert loaded(here, keep=["weight"]).findings == ()


@pytest.mark.parametrize(
    ("spread", "shifts", "found"),
    [
        (0.05, (0.0, 0.0, 1.0), True),
        (1.0, (0.0, 0.0, 1.0), False),  # the column varies by a decade itself
        (1.0, (0.0, 0.0, 3.0), True),
        (0.05, (0.8, 0.0, 1.0), False),  # honest partners differ by nearly as much
        (0.05, (0.8, 0.0, 2.0), True),
    ],
)
def test_a_unit_is_proposed_where_neither_the_column_nor_honest_partners_vary_as_much(
    here: Path, spread: float, shifts: tuple[float, ...], found: bool
) -> None:
    for k, (name, shift) in enumerate(
        zip(("sites/north", "sites/south", "sites/east", "mine"), (*shifts, 0.0), strict=True)
    ):
        size = 60 if name == "mine" else 80
        logs = shift + 2.0 + spread * np.random.default_rng(k).permutation(np.linspace(-1.0, 1.0, size))
        path = here / f"{name}.csv"
        write(path, [[repr(float(10.0**v)), *row[1:]] for v, row in zip(logs, rows_of(path), strict=True)])
    if found:
        assert f'{{"east.csv" = {{weight = {10.0 ** shifts[2]:.15g}}}}}' in refused(here)
    else:
        assert loaded(here).findings == ()


def test_units_of_a_number_to_predict_and_of_centred_columns(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for name in ("sites/a", "sites/b", "mine"):
        x = random.normal(size=(80, 2))
        factor = 1000.0 if name == "sites/b" else 1.0
        price = (5 + x[:, 0] + 0.1 * random.normal(size=80)) * factor
        table = np.column_stack([x[:, 0], x[:, 1] * factor, price])
        write(tmp_path / f"{name}.csv", table.tolist(), ["u", "v", "price"])
    message = refused(tmp_path, label="price")
    assert "2 faults" in message
    assert "column 'v'" in message
    assert "column 'price'" in message
    data = loaded(tmp_path, label="price", units={"b.csv": {"v": 1000.0, "price": 1000.0}})
    assert data.preparation.label_mean == pytest.approx(5, abs=0.5)


def test_unknown_files_and_columns_of_units_are_refused(here: Path) -> None:
    with pytest.raises(UsageError, match=r"'west.csv', which is none of the partners' files: east.csv"):
        loaded(here, units={"west.csv": {"weight": 10.0}})
    with pytest.raises(UsageError, match=r"'ward' is none of the columns of numbers: weight, age"):
        loaded(here, units={"east.csv": {"ward": 10.0}})


@pytest.mark.parametrize(
    ("theirs", "mine", "coding"),
    [
        ({"True", "False"}, {"0", "1"}, {"True": "1", "False": "0"}),
        ({"Yes"}, {"0", "1"}, {"Yes": "1"}),
        ({"GOOD", "BAD"}, {"good", "bad"}, {"GOOD": "good", "BAD": "bad"}),
        ({"GOOD", "good", "bad"}, {"good", "bad"}, {"GOOD": "good"}),
        ({"1", "2"}, {"0", "1"}, {"1": "0", "2": "1"}),
        ({"-1", "1"}, {"0", "1"}, {"-1": "0", "1": "1"}),
        ({"M", "B"}, {"malignant", "benign"}, {"M": "malignant", "B": "benign"}),
        ({"0", "1"}, {"True", "False"}, {"0": "False", "1": "True"}),
        ({"yes", "no", "maybe"}, {"yes", "no"}, {}),
        ({"3", "4"}, {"0", "1", "2"}, {}),
        ({"oak", "pine"}, {"0", "1"}, {}),
    ],
)
def test_codings_of_the_label(theirs: set[str], mine: set[str], coding: dict[str, str]) -> None:
    assert proposed_coding(theirs, mine) == coding


def test_another_coding_of_the_label_is_never_trained_as_other_classes(here: Path) -> None:
    healthy = loaded(here)
    spoil(here / "sites" / "east.csv", lambda i, row: [*row[:3], "True" if row[3] == "1" else "False"])
    spoil(here / "sites" / "south.csv", lambda i, row: [*row[:3], str(int(row[3]) + 1)])
    message = refused(here)
    assert "2 faults" in message
    assert "east.csv   its classes 'False', 'True' are not those of mine.csv" in message
    assert "False → 0, True → 1" in message
    assert "1 → 0, 2 → 1" in message
    for consent in ({"align_labels": True}, {"repair": True}):
        data = loaded(here, **consent)
        assert data.preparation.classes == ("0", "1")
        assert data.preparation.class_counts == healthy.preparation.class_counts
        for name in data.partners:
            k = data.partners.index(name)
            assert torch.equal(data.stack.client(k).all().labels, healthy.stack.client(k).all().labels)
    as_they_are = loaded(here, align_labels=False)
    assert as_they_are.preparation.classes == ("0", "1", "2", "False", "True")
    own = loaded(here, align_labels={"True": "0", "False": "1", "2": "0"})
    assert own.preparation.classes == ("0", "1")
    with pytest.raises(UsageError, match="leads to 'x', no class of mine"):
        loaded(here, align_labels={"True": "x"})


def test_a_partner_without_a_common_class_stops_the_run(here: Path) -> None:
    words, other = {"0": "benign", "1": "malignant"}, {"0": "No", "1": "Yes"}
    for name in ("mine.csv", *(f"sites/{site}.csv" for site in SITES)):
        coding = other if name == "sites/east.csv" else words
        spoil(here / name, lambda i, row, coding=coding: [*row[:3], coding[row[3]]])
    for consent in ({}, {"align_labels": True}, {"repair": True}):
        message = refused(here, **consent)
        assert "none of its classes 'No', 'Yes' is a class of mine.csv, which has 'benign', 'malignant'" in message
        assert 'problem.align_labels={No = "benign", Yes = "malignant"}' in message
    aligned = loaded(here, align_labels={"No": "benign", "Yes": "malignant"})
    assert aligned.preparation.classes == ("benign", "malignant")
    assert len(loaded(here, align_labels=False).preparation.classes) == 4
    spoil(here / "sites" / "north.csv", lambda i, row: [str(1000 * float(row[0])), *row[1:]])
    assert "2 faults" in refused(here)


def test_decimal_commas_in_any_file_are_read_as_numbers(here: Path) -> None:
    healthy = loaded(here)
    for path in (here / "mine.csv", here / "sites" / "north.csv"):
        rows = [[row[0].replace(".", ","), *row[1:]] for row in rows_of(path)]
        if path.name == "north.csv":
            rows[0][0] = f"{rows[0][0]}0"  # four decimals: no thousands, although the delimiter is a comma
        write(path, rows, delimiter=";" if path.name == "mine.csv" else ",")
    data = loaded(here)
    assert [(f.file, f.what) for f in data.findings] == [
        ("north.csv", "decimal commas in column 'weight': read as numbers"),
        ("mine.csv", "decimal commas in column 'weight': read as numbers"),
    ]
    assert torch.equal(data.columns[0], healthy.columns[0])


def test_what_may_be_thousands_is_not_guessed(here: Path) -> None:
    none: frozenset[str] = frozenset()
    assert with_points(["1,5", "-0,25", "3"], none) == ["1.5", "-0.25", "3"]
    assert with_points(["1,5", "2.5"], none) is None
    assert with_points(["1,234", "12,345"], none) is None
    assert perhaps_thousands(["1,234", "12"], none)
    assert not perhaps_thousands(["a,b", "12"], none)
    spoil(here / "mine.csv", lambda i, row: [f"1,{200 + i}", *row[1:]])
    assert "may stand for thousands or for decimals" in refused(here)


def dated(here: Path) -> None:
    for path in [*(here / "sites").glob("*.csv"), here / "mine.csv"]:
        rows = rows_of(path)
        days = [(date(2019, 1, 1) + timedelta(days=13 * i)).isoformat() for i in range(len(rows))]
        write(path, [[day, *row] for day, row in zip(days, rows, strict=True)], ["visit", *HEADER])


def test_dates_become_year_month_and_weekday(here: Path) -> None:
    dated(here)
    data = loaded(here)
    names = [column.name for column in data.preparation.numeric]
    assert names == ["weight", "age", "visit (year)", "visit (month)", "visit (weekday)"]
    assert data.preparation.form.features == ("weight", "age", "visit", "ward")
    scale = data.preparation.numeric[3]
    month = inputs_of(data, "north.csv")[:, 3] * scale.deviation + scale.mean
    wanted = [(date(2019, 1, 1) + timedelta(days=13 * i)).month for i in range(80)]
    torch.testing.assert_close(month, torch.tensor(wanted, dtype=torch.float32), atol=1e-4, rtol=0)
    assert any("ISO dates in column 'visit'" in note for note in data.notes)
    spoil(here / "sites" / "east.csv", lambda i, row: ["soon", *row[1:]] if i == 4 else row, ["visit", *HEADER])
    assert "east.csv  column 'visit' holds 'soon' in row 5" in refused(here)
    assert loaded(here, drop=["visit"]).findings == ()


@pytest.mark.parametrize("kind", ["words", "counter", "called"])
def test_identifiers_are_left_out_and_in_no_result(here: Path, kind: str) -> None:
    random = np.random.default_rng(3)
    for k, path in enumerate([*sorted((here / "sites").glob("*.csv")), here / "mine.csv"]):
        rows = rows_of(path)
        secret = {
            "words": [f"P{k}{i:03d}" for i in range(len(rows))],
            "counter": [str(1000 * k + 3 * i) for i in range(len(rows))],
            "called": [str(v) for v in random.permutation(9000)[: len(rows)]],
        }[kind]
        write(path, [[name, *row] for name, row in zip(secret, rows, strict=True)], ["patient_id", *HEADER])
    data = loaded(here)
    assert "column 'patient_id' different in (almost) every row" in data.notes[0]
    assert "patient_id" not in json.dumps(data.preparation.as_dict())
    assert "P0001" not in json.dumps(data.preparation.as_dict())
    if kind == "counter":
        assert "patient_id" in [column.name for column in loaded(here, keep=["patient_id"]).preparation.numeric]


def test_identifiers_that_only_a_partner_has_stay_there(here: Path) -> None:
    spoil(here / "sites" / "south.csv", lambda i, row: [*row[:2], f"secret{i}", row[3]])
    assert "south.csv  column 'ward' has 80 different words in 80 rows: an identifier?" in refused(here)


@pytest.mark.parametrize(
    ("cell", "rows", "word"),
    [("99999999", 2, "a code for no value"), ("-999", 3, "a code for no value"), ("1e18", 1, "impossible")],
)
def test_codes_for_no_value_and_impossible_numbers(here: Path, cell: str, rows: int, word: str) -> None:
    healthy = loaded(here, missing=["gone"])
    for path in (here / "mine.csv", here / "sites" / "east.csv"):
        spoil(path, lambda i, row: [cell if i < rows else row[0], *row[1:]])
    message = refused(here)
    assert "2 faults" in message
    assert f"column 'weight' holds {float(cell):.15g} in {rows} row" in message
    assert f"{word}?" in message
    assert f"problem.missing=['{float(cell):.15g}']" in message
    for consent in ({"missing": [cell]}, {"repair": True}):
        data = loaded(here, **consent)
        weight = data.preparation.numeric[0]
        assert weight.deviation == pytest.approx(healthy.preparation.numeric[0].deviation, rel=0.05)
        assert bool((inputs_of(data, "east.csv")[:rows, 0] == 0).all())
    assert loaded(here, keep=["weight"]).preparation.numeric[0].deviation > 2 * weight.deviation


def test_zeros_where_none_can_be_are_reported(here: Path) -> None:
    for path in [*(here / "sites").glob("*.csv"), here / "mine.csv"]:
        gone = {"south.csv": 30, "north.csv": 80}.get(path.name, 0)
        spoil(
            path,
            lambda i, row, gone=gone: [*row[:3], 0 if i < gone else 200 + i, row[3]],
            [*HEADER[:3], "chol", "label"],
        )
        # whole numbers that only grow would be an identifier
        rows = rows_of(path)
        write(path, [*rows[1:], rows[0]], [*HEADER[:3], "chol", "label"])
    data = loaded(here)
    assert [(f.file, f.what) for f in data.findings] == [
        ("north.csv", "column 'chol' is 0 in 80 of 80 rows: a code for no value?"),
        ("south.csv", "column 'chol' is 0 in 30 of 80 rows: a code for no value?"),
    ]
    repaired = loaded(here, repair=True)
    zeros = inputs_of(data, "south.csv")[:, 2] == inputs_of(data, "south.csv")[:, 2].min()
    assert bool((inputs_of(repaired, "south.csv")[zeros, 2] == 0).all())
    assert repaired.preparation.numeric[2].indicator


def test_heavy_tails_are_no_fault() -> None:
    random = np.random.default_rng(0)
    x = np.column_stack(
        [
            np.exp(random.normal(0, 2.5, 3000)),
            random.pareto(1.0, 3000),
            np.where(random.random(3000) < 0.99, 0.0, np.exp(random.normal(9, 1, 3000))),
            random.integers(0, 1200, 3000),
        ]
    )
    assert [column.far() for column in odd_values(x)] == [{}, {}, {}, {}]


def test_copies_of_own_rows_are_removed_and_a_copy_of_the_file_is_left_out(here: Path) -> None:
    mine = rows_of(here / "mine.csv")
    write(here / "sites" / "shuffled.csv", mine[::-1])
    (here / "sites" / "west.csv").write_bytes((here / "mine.csv").read_bytes())
    write(here / "sites" / "south.csv", [*mine[:20], *rows_of(here / "sites" / "south.csv")])
    data = loaded(here)
    assert data.partners == ("east.csv", "north.csv", "south.csv")
    assert [holder.rows for holder in data.holders] == [80, 80, 80, 60]
    told = {finding.file: finding.what for finding in data.findings}
    assert told == {
        "west.csv": "a copy of mine.csv: left out",
        "south.csv": "20 of 100 rows are also in mine.csv; they were removed",
        "shuffled.csv": "60 of 60 rows are also in mine.csv; the file is left out",
    }
    clean = here / "clean"
    clean.mkdir()
    for k, name in enumerate(SITES):
        write(clean / "sites" / f"{name}.csv", honest(80, k))
    write(clean / "mine.csv", mine)
    assert torch.equal(loaded(clean).columns[0], data.columns[0])
    for name in SITES:
        (here / "sites" / f"{name}.csv").unlink()
    with pytest.raises(UsageError, match="nobody to learn from"):
        loaded(here)


def test_equal_rows_of_a_coarse_table_are_no_copies(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    for name in ("sites/a", "sites/b", "mine"):
        write(tmp_path / f"{name}.csv", random.integers(0, 2, (60, 3)).tolist(), ["u", "v", "label"])
    data = loaded(tmp_path)
    assert data.findings == ()
    assert [holder.rows for holder in data.holders] == [60, 60, 60]


def test_rows_that_are_equal_by_chance_are_kept_and_copies_are_not(tmp_path: Path) -> None:
    """Of some four hundred possible rows, a few of 100 are there twice: a stranger shares some, a copy shares all."""
    random = np.random.default_rng(1)

    def sample(rows: int) -> list[list[Any]]:
        return random.integers(0, [40, 40, 2], (rows, 3)).tolist()

    mine = sample(100)
    assert 95 <= len({tuple(row) for row in mine}) < 100
    for name, rows in (("mine", mine), ("sites/stranger", sample(300)), ("sites/copy", mine[:60] + sample(40))):
        write(tmp_path / f"{name}.csv", rows, ["u", "v", "label"])
    data = loaded(tmp_path)
    by = {holder.name: holder.rows for holder in data.holders}
    assert by["stranger.csv"] == 300
    assert by["copy.csv"] <= 40


def test_own_and_robust_scaling(here: Path) -> None:
    write(here / "sites" / "north.csv", honest(80, 0, factor=2.5))
    own = loaded(here, scaling="own")
    for k, holder in enumerate(own.holders[:-1]):
        x = own.stack.client(k).all().inputs[:, :2].double()
        torch.testing.assert_close(x.mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-5, rtol=0)
        torch.testing.assert_close(x.std(0, correction=0), torch.ones(2, dtype=torch.float64), atol=1e-5, rtol=0)
        assert holder.rows == 80
    weights = np.array([float(row[0]) for row in rows_of(here / "mine.csv")])
    assert own.preparation.numeric[0].mean == pytest.approx(weights.mean())
    robust = loaded(here, scaling="robust").preparation.numeric[0]
    files = [here / "sites" / f"{name}.csv" for name in SITES] + [here / "mine.csv"]
    columns = [np.array([float(row[0]) for row in rows_of(path)]) for path in files]
    assert robust.mean == pytest.approx(sorted(np.median(column) for column in columns)[1])
    spread = sorted(np.subtract(*np.quantile(column, [0.75, 0.25])) for column in columns)[1]
    assert robust.deviation == pytest.approx(spread / 1.3489795)


def test_imputation_by_median_and_by_regression(tmp_path: Path) -> None:
    """Three columns, the third nearly the sum of the others: regression finds it, from sums alone."""
    random = np.random.default_rng(2)
    truth = {}
    for name in ("sites/a", "sites/b", "mine"):
        x = random.normal(size=(200, 2))
        z = x.sum(1) + 0.05 * random.normal(size=200) + 10
        gone = random.random(200) < 0.2
        truth[name] = (z, gone)
        table = [[*row, "" if g else v, int(v > 10)] for row, v, g in zip(x.tolist(), z.tolist(), gone, strict=True)]
        write(tmp_path / f"{name}.csv", table, ["u", "v", "sum", "label"])
    z, gone = truth["sites/a"]
    errors = {}
    for impute in ("mean", "median", "regression"):
        data = loaded(tmp_path, impute=impute)
        column = data.preparation.numeric[2]
        found = inputs_of(data, "a.csv")[:, 2].double().numpy() * column.deviation + column.mean
        np.testing.assert_allclose(found[~gone], z[~gone], atol=1e-4)
        errors[impute] = np.abs(found - z)[gone].mean()
        if impute == "median":
            middles = [np.median(v[~g]) for v, g in truth.values()]
            np.testing.assert_allclose(found[gone], sorted(middles)[1], atol=1e-5)
    assert errors["regression"] < 0.2 * errors["mean"]
    assert "files/column-products" in loaded(tmp_path, impute="regression").spent.by_cause


def test_slopes_of_an_imputation_are_those_of_one_ridge_regression_over_everybody(tmp_path: Path) -> None:
    """The target's columns go together in another way than the clients', and have other gaps."""
    random, tables = np.random.default_rng(4), []
    for name, mix in (("sites/a", 0.9), ("sites/b", 0.7), ("mine", -0.8)):
        u = random.normal(size=(120 if name == "mine" else 60, 3))
        x = np.stack([u[:, 0], mix * u[:, 0] + 0.3 * u[:, 1], u[:, 2] - mix * u[:, 1]], 1)
        x[random.random(x.shape) < 0.15] = np.nan
        cells = [["" if np.isnan(v) else repr(float(v)) for v in row] for row in x]
        write(tmp_path / f"{name}.csv", [[*row, i % 2] for i, row in enumerate(cells)], ["u", "v", "w", "label"])
        tables.append(x)
    numeric = loaded(tmp_path, impute="regression").preparation.numeric
    x = np.concatenate(tables)
    z = np.nan_to_num((x - np.nanmean(x, 0)) / np.nanstd(x, 0))
    there = (~np.isnan(x)).astype(float)
    covariance = (z.T @ z) / (there.T @ there)
    assert np.linalg.eigvalsh(covariance).min() > 0.0
    for j, column in enumerate(numeric):
        others = [i for i in range(3) if i != j]
        slopes = np.linalg.solve(covariance[np.ix_(others, others)] + RIDGE * np.eye(2), covariance[others, j])
        np.testing.assert_allclose(np.array(column.slopes)[others], slopes, rtol=1e-5)


def test_under_privacy_no_file_is_compared(here: Path) -> None:
    spoil(here / "sites" / "north.csv", lambda i, row: [repr(float(row[0]) * 1000), *row[1:]])
    spoil(here / "sites" / "east.csv", lambda i, row: ["99999999" if i < 3 else row[0], *row[1:]])
    write(here / "sites" / "south.csv", rows_of(here / "mine.csv"))
    context = Context(statistics=StatisticsPrivacy(1.0, {"weight": (0.0, 200.0), "age": (0.0, 100.0)}))
    data = loaded(here, context)
    assert data.findings == ()
    assert set(data.spent.by_cause) == {"private-files/column-means"}
    assert data.notes == (
        "under [privacy] no file is compared with yours: other units, codings and copies were not looked for",
    )
    with pytest.raises(UsageError, match="does not cover"):
        loaded(here, context, impute="median")
    spoil(here / "mine.csv", lambda i, row: ["99999999" if i < 3 else row[0], *row[1:]])
    with pytest.raises(BadFiles, match=r"mine\.csv  column 'weight' holds 99999999 in 3 rows"):
        loaded(here, context)
    spoil(here / "sites" / "north.csv", lambda i, row: [*row[:3], "True" if row[3] == "1" else "False"])
    repaired = loaded(here, context, repair=True)
    assert {finding.file for finding in repaired.findings} == {"mine.csv"}
    assert [holder.rows for holder in repaired.holders] == [80, 80, 60, 60], "the coding was aligned at the client"


def test_models_stored_before_still_predict(tmp_path: Path) -> None:
    """A preprocess.json of version 1 knows no fill, slopes, dates or missing words."""
    from safetensors.torch import save_file

    stored = {
        "version": 1,
        "label": "label",
        "kind": "classification",
        "numeric": [{"name": "u", "mean": 1.0, "deviation": 2.0, "indicator": False}],
        "categorical": [],
        "image": None,
        "classes": ["no", "yes"],
        "class_counts": [3, 4],
        "label_mean": 0.0,
        "label_deviation": 1.0,
        "model": {"name": "logistic", "shape": [1], "outputs": 2},
    }
    (tmp_path / "preprocess.json").write_text(json.dumps(stored))
    save_file({"1.weight": torch.ones(2, 1), "1.bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    _, prepared = load_model(tmp_path)
    found = prepared.inputs(np.array([[5.0], [np.nan]]), np.empty((2, 0)))
    assert found.tolist() == [[2.0], [0.0]]


def test_predictions_take_dates_and_missing_words_as_training_did(here: Path) -> None:
    from coterie.experiment.build import assemble
    from coterie.experiment.config import load
    from coterie.experiment.loop import run_rounds
    from coterie.experiment.predict import predict

    dated(here)
    sets = {"problem.clients": f"{here}/sites/*.csv", "problem.target": f"{here}/mine.csv"}
    sets |= {"problem.missing": ["-999"], "problem.impute": "regression"}
    flags = {"run.problem": "files", "run.rounds": 2, "run.baselines": [], "federation.mode": "vmap"}
    (here / "run").mkdir()
    run_rounds(assemble(load(sets=sets, flags=flags)), here / "run")
    rows = [["2024-05-31", cell, "40", "a", "1"] for cell in ("-999", "NA", "70,5", "70,5")]
    write(here / "new.csv", rows, ["visit", *HEADER])
    first, second, third, fourth = predict(here / "run", here / "new.csv").rows
    assert first[1:] == second[1:] != third[1:] == fourth[1:]
