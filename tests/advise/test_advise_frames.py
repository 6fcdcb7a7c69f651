"""`coterie.advise` with tables that a program holds: read as files are, never written, and the same answer."""

import json
from datetime import date, timedelta
from doctest import DocTestFinder, DocTestRunner
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import coterie
from coterie.advise.advise import Advised
from coterie.advise.answer import Advice, advise
from coterie.ensemble.stack import Stack
from coterie.problems import Context
from coterie.problems.files import load_files
from coterie.problems.files.frames import Held, collected, holding, source
from coterie.problems.files.reading import Frame, Unreadable, numbers


class Columns:
    """What pandas' and polars' frames have in common: columns, and one of them by its name."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns
        self.columns = list(columns)

    def __getitem__(self, name: str) -> np.ndarray:
        values = self._columns[name]
        if isinstance(values, np.ndarray):
            return values
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array


def table(n: int, seed: int, *, flipped: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    x[::9, 1] = np.nan
    ill = (np.nansum(x, 1) > 0) ^ flipped
    days = [date(2024, 1, 1) + timedelta(days=int(k)) for k in rng.integers(0, 300, n)]
    cities = [None if k == 0 else ("Rome", "Oslo")[k % 2] for k in rng.integers(0, 8, n)]
    return {"a": x[:, 0], "b": x[:, 1], "city": cities, "day": days, "ok": rng.random(n) < 0.5, "y": ill.astype(int)}


def write(columns: dict[str, Any], path: Path) -> None:
    def text(value: Any) -> str:
        return "" if value is None or value != value else str(value)

    rows = [",".join(columns), *(",".join(map(text, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def tables() -> dict[str, dict[str, Any]]:
    made = {name: table(50, seed, flipped=name == "west") for seed, name in enumerate(("north", "east", "west"))}
    return {"mine": table(40, 9), **made}


@pytest.fixture(scope="module")
def advice(tables: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Advice:
    file = tmp_path_factory.mktemp("files") / "west.csv"
    write(tables["west"], file)
    partners = {"north": Columns(tables["north"]), "east": tables["east"], "west": file}
    return coterie.advise(Columns(tables["mine"]), partners, "y")


def test_the_name_is_a_package_and_can_be_called() -> None:
    assert isinstance(coterie.advise, ModuleType)
    assert coterie.advise.advise.Advised is Advised
    assert list(signature(coterie.advise).parameters)[:3] == ["mine", "partners", "label"]
    with pytest.raises(coterie.UsageError, match="partners is empty; give a dict of tables by name"):
        coterie.advise({}, {}, "y")


def test_tables_are_prepared_as_their_files_would_be(tables: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    for name, columns in tables.items():
        write(columns, tmp_path / f"{name}.csv")
    pattern, mine = str(tmp_path / "[!m]*.csv"), str(tmp_path / "mine.csv")
    from_files = load_files(Context(3), clients=pattern, target=mine, label="y")
    partners = {name: Columns(tables[name]) for name in ("east", "north", "west")}
    held = collected(tables["mine"], partners, "y")
    with holding(held):
        from_tables = load_files(Context(3), clients=held.clients, target=held.target, label="y")
    assert from_tables.preparation == from_files.preparation
    for one, other in zip(from_tables.columns, from_files.columns, strict=True):
        assert one.equal(other)
    assert from_tables.partners == ("east", "north", "west")
    with pytest.raises(coterie.UsageError, match="there is no file mine"):
        load_files(Context(3), clients=held.clients, target=held.target, label="y")


def test_the_advice_answers(advice: Advice, tables: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    verdicts = {partner.name: partner.verdict for partner in advice.partners}
    assert list(verdicts) == ["north", "east", "west"]
    assert verdicts["west"] in ("left out", "differs")
    assert sum(advice.shares.values()) == pytest.approx(1.0, abs=1e-5)
    assert set(advice.shares) <= {"you", "together", *verdicts}
    for partner in advice.partners:
        assert partner.low <= partner.gain <= partner.high
        assert partner.share == advice.shares.get(partner.name, 0.0)
    assert advice.worth_it in ("yes", "not yet", "no")
    assert str(advice).startswith(advice.answer.split(":")[0])
    assert "west" in str(advice)
    assert advice.answer in repr(advice)


def test_its_predictions_are_those_of_the_saved_model(
    advice: Advice, tables: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    new = table(30, 77)
    write(new, tmp_path / "new.csv")
    folder = advice.save(tmp_path / "saved")
    assert json.loads((folder / "advice.json").read_text())["partners"][2]["name"] == "west"
    assert "<svg" in (folder / "advice.html").read_text()
    from coterie.experiment.predict import predict

    stored = predict(folder / "model", tmp_path / "new.csv")
    shares = advice.predict_proba({name: values for name, values in new.items() if name != "y"})
    np.testing.assert_allclose(shares, [[float(p) for p in row[2:]] for row in stored.rows], atol=1e-6)
    classes = advice.predict(Columns(new))
    assert classes.dtype.kind == "i"
    assert advice.classes is not None
    assert advice.classes.tolist() == [0, 1]
    assert [str(k) for k in classes] == [row[1] for row in stored.rows]
    assert isinstance(advice.model, Stack)
    with pytest.raises(coterie.UsageError, match="saved"):
        advice.save(folder)


def test_its_page_is_shown_in_a_frame(advice: Advice) -> None:
    html = advice._repr_html_()
    assert html.startswith("<iframe ")
    assert html.count("<") == 2  # all of the page is text of one attribute
    assert "&lt;svg" in html


def test_no_row_is_written(advice: Advice, tables: dict[str, dict[str, Any]]) -> None:
    needle = f"{float(tables['mine']['a'][0]):.6f}"[:7]
    for file in Path(advice.folder).rglob("*"):
        assert not file.is_file() or needle.encode() not in file.read_bytes(), file


def test_the_faults_of_tables_are_reported_together_and_by_name(tables: dict[str, dict[str, Any]]) -> None:
    north = {name: values for name, values in tables["north"].items() if name != "y"}
    with pytest.raises(coterie.UsageError) as caught:
        coterie.advise(tables["mine"], {"north": north, "east": {**tables["east"], "a": ["high"] * 50}}, "y")
    text = str(caught.value)
    assert "2 faults found in 3 files; nothing was trained" in text
    assert "north  lacks the label column 'y' of mine" in text
    assert "east   column 'a' holds 'high' in row 1" in text
    assert caught.value.__notes__ == ["In Python, problem.NAME of this message is the keyword NAME of coterie.advise."]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"mine": 3}, "mine  a int is no table"),
        ({"mine": "nowhere.csv"}, "mine  there is no file nowhere.csv"),
        ({"partners": {"mine": {}}}, "'mine' stands for your own rows"),
        ({"partners": []}, "partners is a list; give a dict"),
        ({"partners": {"n": {"a": [[1], [2, 3]], "y": [0, 1]}}}, "n  column 'a' holds a list in row 1"),
        ({"partners": {"n": {"a": [1.0], "y": [0, 1]}}}, r"its arrays differ in length: a \(1,\), y \(2,\)"),
        ({"partners": {"n": {"a": np.zeros(2, "m8[s]"), "y": [0, 1]}}}, "for example of days"),
        ({"partners": {"n": {"a": 1.0, "y": 2.0}}}, "is one float, not one value per row"),
        ({"partners": {"n": {1: [0.0], "1": [0.0]}}}, "column names occur twice: '1'"),
        ({"clients": "sites/*.csv"}, "give clients as partners"),
        ({"colour": 3}, "unknown key"),
    ],
)
def test_a_wrong_argument_is_explained(tables: dict[str, dict[str, Any]], given: dict[str, Any], match: str) -> None:
    usual = {"mine": tables["mine"], "partners": {"n": tables["north"]}}
    with pytest.raises(coterie.UsageError, match=match):
        coterie.advise(**{**usual, "label": "y", **given})


def test_an_estimator_of_ones_own_takes_part_and_cannot_be_stored(
    tables: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    pipeline = make_pipeline(StandardScaler(), KNeighborsClassifier(9))
    found = coterie.advise(tables["mine"], {"north": tables["north"], "east": tables["east"]}, "y", models=[pipeline])
    assert "model 3" in found.data["alone"]["values"]
    assert not hasattr(pipeline[0], "mean_"), "what was given is copied, not fitted"
    assert set(found.predict(tables["north"])) <= {0, 1}
    np.testing.assert_allclose(found.predict_proba(tables["north"]).sum(1), 1.0)
    with pytest.raises(
        coterie.UsageError, match=r"estimators of your program and cannot be stored; use advice\.predict"
    ):
        found.save(tmp_path / "saved")


def test_an_estimator_that_only_its_own_columns_please_is_told_of_times(tables: dict[str, dict[str, Any]]) -> None:
    times = {name: {**table, "died": [1] * len(table["y"]), "y": 1 + table["y"]} for name, table in tables.items()}
    with pytest.raises(coterie.UsageError, match="models of your own cannot take part for a time with an event"):
        coterie.advise(times["mine"], {"north": times["north"]}, "y", event="died", models=[KNeighborsClassifier()])


def test_a_column_that_cannot_be_read_may_be_dropped() -> None:
    made = source({"a": [1.0, 2.0], "b": [[1], [2, 3]]}, "n", drop=("b",))
    assert isinstance(made, Frame)
    assert made.block["b"] == [None, None]


def test_values_are_read_as_csv_would_have_them() -> None:
    made = source(
        {
            "flag": np.array([True, False]),
            "moment": np.array(["2024-05-31T10:00", "NaT"], dtype="datetime64[ns]"),
            "whole": np.array([1, 2], dtype=np.int8),
            "mixed": [1, "one"],
            "x": np.arange(4.0).reshape(2, 2),
        },
        "n",
        "flag",
    )
    assert isinstance(made, Frame)
    assert made.block["flag"] == ["True", "False"]
    assert made.block["moment"] == ["2024-05-31T10:00:00", None]
    assert made.block["mixed"] == ["1", "one"]
    assert np.array_equal(made.block["whole"], [1.0, 2.0])
    assert [name for name in made.block if name.startswith("x")] == ["x0", "x1"]
    assert made.labels == {"True": True, "False": False}


def test_a_lazy_table_is_refused() -> None:
    class Lazy:
        columns = ("a",)

        def collect(self) -> None: ...

    with pytest.raises(Unreadable, match="a Lazy holds no rows yet"):
        source(Lazy(), "n")


def frame_of(package: str, columns: dict[str, Any]) -> Any:
    frames = pytest.importorskip(package, reason=f"{package} is not installed")
    return frames.DataFrame(columns)


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_frames_are_read_as_their_columns(package: str, tables: dict[str, dict[str, Any]]) -> None:
    frame = frame_of(package, tables["mine"])
    plain = source(tables["mine"], "n", "y")
    found = source(frame, "n", "y")
    assert isinstance(plain, Frame)
    assert isinstance(found, Frame)
    for name, values in plain.block.items():
        if name == "day":
            assert [str(day)[:10] for day in found.block[name]] == [str(day)[:10] for day in values]
        else:
            np.testing.assert_array_equal(found.block[name], values)
    assert found.labels == plain.labels


def test_pandas_own_types_are_read() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame(
        {
            "stage": pandas.Categorical([1, 2, None]),
            "count": pandas.array([1, None, 3], dtype="Int64"),
            "when": pandas.to_datetime(["2024-01-02", None, "2024-01-03"], utc=True),
            "word": pandas.array(["a", None, "c"], dtype="string"),
        },
        index=[7, 8, 9],
    )
    made = source(frame, "n")
    assert isinstance(made, Frame)
    assert made.categories == ("stage",)
    np.testing.assert_array_equal(numbers(made.block["count"], frozenset())[0], [1.0, np.nan, 3.0])
    assert made.block["word"] == ["a", None, "c"]
    assert [None if day is None else day[:10] for day in made.block["when"]] == ["2024-01-02", None, "2024-01-03"]


def test_held_labels_prefer_the_targets_values() -> None:
    goal, partner = source({"y": np.array([0, 1])}, "mine", "y"), source({"y": np.array([0.0, 2.0])}, "n", "y")
    labels = Held((partner,), goal, ("n", "mine")).labels()
    assert {word: (type(value).__name__, int(value)) for word, value in labels.items()} == {
        "0": ("int64", 0),
        "1": ("int64", 1),
        "2": ("float64", 2),
    }


@pytest.mark.parametrize("documented", [advise, source], ids=lambda function: function.__name__)
def test_examples_of_docstrings_run(documented: Any) -> None:
    (found,) = DocTestFinder(recurse=False).find(documented, documented.__name__, globs={"source": source})
    assert found.examples
    assert DocTestRunner().run(found).failed == 0
