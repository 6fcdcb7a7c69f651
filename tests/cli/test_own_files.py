"""advise, predict and data example on the command line; every kind of bad file is explained before any training."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.advise.verdicts import VERDICTS
from coterie.problems.files.problem import ME

EXAMPLES = Path(__file__).parents[2] / "examples"
Command = Callable[..., Any]
FILES = ("--problem", "files", "--set", "problem.clients=sites/*.csv", "--set", "problem.target=mine.csv")


def rows_of(count: int, seed: int) -> list[list[Any]]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 2)).round(3)
    return [[*row, "abc"[i % 3], "yes" if row[0] > 0 else "no"] for i, row in enumerate(x.tolist())]


def write(path: str, rows: list[list[Any]], header: tuple[str, ...] = ("u", "v", "kind", "label")) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with three sound files."""
    monkeypatch.chdir(tmp_path)
    write("sites/a.csv", rows_of(30, 1))
    write("sites/b.csv", rows_of(30, 2))
    write("mine.csv", rows_of(30, 3))
    return tmp_path


def lacks_columns() -> None:
    write("sites/a.csv", [row[1:] for row in rows_of(30, 1)], ("v", "kind", "label"))
    write("sites/b.csv", [[*row, 1] for row in rows_of(30, 1)], ("u", "v", "kind", "label", "w"))


def other_types() -> None:
    write("sites/a.csv", [["high", *row[1:]] if i == 4 else row for i, row in enumerate(rows_of(30, 1))])


def decimal_commas() -> None:
    """In all numbers but one, which nobody can read for sure."""
    text = Path("sites/a.csv").read_text().replace(",", ";").replace(".", ",")
    Path("sites/a.csv").write_text(text + "1.5;0,5;a;yes\n")


def label_gaps() -> None:
    write("sites/b.csv", [[*row[:3], ""] if i in (6, 9) else row for i, row in enumerate(rows_of(30, 1))])


def no_label_column() -> None:
    write("sites/b.csv", [row[:3] for row in rows_of(30, 1)], ("u", "v", "kind"))


def small_target() -> None:
    write("mine.csv", rows_of(9, 3))


def one_class_target() -> None:
    write("mine.csv", [[*row[:3], "yes"] for row in rows_of(30, 3)])


def not_utf8() -> None:
    Path("sites/a.csv").write_bytes(Path("sites/a.csv").read_bytes().replace(b"abc"[:1] + b",", b"\xe9,", 1))


def empty_files() -> None:
    Path("sites/a.csv").write_text("")
    Path("sites/b.csv").write_text("u,v,kind,label\n")


def ragged() -> None:
    with Path("sites/a.csv").open("a") as file:
        file.write("1,2,3,4,5\n")


def identifier() -> None:
    write("sites/a.csv", [[*row[:2], f"id{i}", row[3]] for i, row in enumerate(rows_of(300, 3))])


def two_headers() -> None:
    write("sites/a.csv", rows_of(30, 1), ("u", "u", "kind", "label"))


def nul_in_a_label() -> None:
    write("mine.csv", [[*row[:3], "yes\0"] if i == 6 else row for i, row in enumerate(rows_of(30, 3))])


def nul_in_a_word() -> None:
    write("sites/a.csv", [[*row[:2], "\0b", row[3]] if i == 3 else row for i, row in enumerate(rows_of(30, 3))])


def nul_in_a_number() -> None:
    write("sites/b.csv", [["1\0", *row[1:]] if i == 2 else row for i, row in enumerate(rows_of(30, 3))])


def nul_in_a_name() -> None:
    write("sites/b.csv", rows_of(30, 1), ("u\0", "v", "kind", "label"))


def bad_npz() -> None:
    Path("sites/a.csv").rename("sites/a.npz")
    Path("sites/b.csv").rename("sites/b.xls")


BAD: list[tuple[Callable[[], None], list[str]]] = [
    (lacks_columns, ["2 faults found in 3 files", "a.csv  lacks the column 'u'", "b.csv  has the column 'w'", "drop"]),
    (other_types, ["a.csv", "column 'u' holds 'high' in row 5", "problem.categorical", "problem.missing"]),
    (decimal_commas, ["a.csv", "a decimal comma?"]),
    (label_gaps, ["b.csv", "the label 'label' is missing in 2 rows, first in row 7", "delete those rows"]),
    (no_label_column, ["b.csv", "lacks the label column 'label'"]),
    (small_target, ["mine.csv", "the target has 9 rows; at least 20", "±33 %"]),
    (one_class_target, ["mine.csv", "all rows have the class 'yes'", "two classes"]),
    (not_utf8, ["a.csv", "not UTF-8: byte 0xe9", "iconv"]),
    (empty_files, ["2 faults", "a.csv  the file is empty", "b.csv  the table has column names but no rows"]),
    (ragged, ["a.csv", "line 32 has 5 fields, the header 4"]),
    (identifier, ["a.csv", "column 'kind' has 300 different words", "problem.drop=['kind']"]),
    (nul_in_a_label, ["mine.csv  column 'label' in row 7 holds a NUL character", "plain UTF-8"]),
    (nul_in_a_word, ["a.csv  column 'kind' in row 4 holds a NUL character"]),
    (nul_in_a_number, ["b.csv  column 'u' in row 3 holds a NUL character"]),
    (nul_in_a_name, ["b.csv  the line of column names holds a NUL character"]),
    (two_headers, ["a.csv", "column names occur twice: 'u'"]),
]


@pytest.mark.parametrize(("spoil", "words"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_bad_files_are_explained_before_anything_is_trained(
    coterie: Command, here: Path, spoil: Callable[[], None], words: list[str]
) -> None:
    spoil()
    done = coterie("run", *FILES, "--out", "runs/never")
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert "nothing was trained" in done.err
    for word in words:
        assert word in done.err
    assert not Path("runs").exists()


def test_files_of_unknown_forms(coterie: Command, here: Path) -> None:
    bad_npz()
    done = coterie("run", *FILES, "--set", "problem.clients=sites/*")
    assert done.code == 2
    assert "a.npz  no readable NPZ" in done.err
    assert "b.xls  the ending .xls is not known" in done.err


def test_all_that_is_wrong_is_told_at_once(coterie: Command, here: Path) -> None:
    other_types()
    label_gaps()
    small_target()
    done = coterie("run", *FILES)
    assert "3 faults found in 3 files" in done.err
    assert all(name in done.err for name in ("a.csv", "b.csv", "mine.csv"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["problem.clients=other/*.csv"], ["no file matches 'other/*.csv'"]),
        (["problem.clients=sites"], ["names the folder sites", "'sites/*.csv'"]),
        (["problem.target=yours.csv"], ["there is no file yours.csv"]),
        (["problem.label=lable"], ["mine.csv", "no column 'lable'", "'label'", "Set problem.label"]),
        (["problem.model=mpl"], ["unknown model 'mpl'", "mlp"]),
        (["problem.model=cnn"], ["model cnn needs images"]),
        (["problem.model=no_such_module:make"], ["no_such_module cannot be imported"]),
        (["problem.model=os:nothing"], ["os has no 'nothing'"]),
        (["problem.model=os.path:join"], ["os.path:join failed when called with shape"]),
        (["problem.model=builtins:print"], ["returned a NoneType, not a torch.nn.Module"]),
        (["problem.model=own:misfit"], ["the model does not take inputs of shape"]),
        (["problem.loss=cross_entropi"], ["unknown loss 'cross_entropi'", "cross_entropy"]),
        (["problem.own=0.8", "problem.test=0.2"], ["leave 0% of the target's rows"]),
        (["problem.drop=['w']"], ["name 'w', which is no column"]),
        (["problem.kind=regression"], ["column 'label' holds 'yes' in row", "numbers"]),
        (["problem.kind=regression", "problem.balance=true", "problem.label=u"], ["problem.balance weighs classes"]),
    ],
)
def test_bad_settings_are_explained(coterie: Command, here: Path, settings: list[str], words: list[str]) -> None:
    text = "from torch import nn\ndef misfit(shape, outputs):\n    return nn.Linear(99, outputs)\n"
    Path("own.py").write_text(text)
    allowed = [word for name in ("no_such_module", "os", "builtins", "./own.py") for word in ("--allow-code", name)]
    done = coterie("run", *FILES, *allowed, *(word for setting in settings for word in ("--set", setting)))
    assert done.code == 2
    for word in words:
        assert word in done.err
    assert "Traceback" not in done.err


def test_what_is_odd_but_not_wrong_is_noted(coterie: Command, here: Path) -> None:
    from coterie.problems import Context
    from coterie.problems.files import files

    write("sites/a.csv", [[*row[:3], "yes"] for row in rows_of(30, 1)])
    write("sites/b.csv", [[*row[:3], "maybe" if i < 3 else row[3]] for i, row in enumerate(rows_of(30, 1))])
    write("mine.csv", [[*row[:2], "z" if i == 0 else row[2], row[3]] for i, row in enumerate(rows_of(30, 3))])
    notes = " / ".join(files(Context(), clients="sites/*.csv", target="mine.csv").notes)
    assert "a.csv has rows of one class only ('yes')" in notes
    assert "b.csv has classes that mine.csv never has: 'maybe'" in notes
    assert "only mine.csv has the words 'z' in column 'kind'" in notes


@pytest.fixture
def advice(coterie: Command, here: Path) -> Any:
    """An advice on a small example."""
    assert coterie("data", "example", "ex", "--friends", 1, "--strangers", 1, "--own", 30).code == 0
    where = ("--clients", "ex/sites/*.csv", "--target", "ex/mine.csv", "--label", "diagnosis")
    done = coterie("advise", *where, "--json")
    assert done.code == 0, done.err
    return done.json


def test_from_files_to_a_page_a_model_and_predictions(coterie: Command, advice: Any, here: Path) -> None:
    folder = Path("runs/advice")
    assert json.loads((folder / "advice.json").read_text()) == advice
    text = (folder / "advice.html").read_text()
    for partner in advice["partners"]:
        assert partner["name"] in text
        assert partner["verdict"] in VERDICTS
    assert advice["headline"].split(".")[0] in text.replace("&#x27;", "'")
    assert "http://" not in text
    assert "https://" not in text
    assert sum(advice["delivered"]["shares"].values()) == pytest.approx(1.0)
    assert advice["cost"]["exchanges"] == 1
    assert (folder / "model-card.md").is_file() or (folder / "model" / "model-card.md").is_file()

    done = coterie("predict", folder / "model", "ex/mine.csv")
    assert done.code == 0
    table = list(csv.DictReader(done.out.splitlines()))
    assert len(table) == 30
    for row in table:
        assert float(row["p(benign)"]) + float(row["p(malignant)"]) == pytest.approx(1.0, abs=1e-5)
    assert coterie("predict", folder / "model", "ex/mine.csv", "--out", "out.csv").code == 0
    assert Path("out.csv").read_text() == done.out

    for path, word in (("nothing.csv", "there is no file"), ("sites/a.csv", "lacks the columns 'mean_radius'")):
        bad = coterie("predict", folder / "model", path)
        assert bad.code == 2
        assert word in bad.err
    assert "no preprocess.json" in coterie("predict", "ex", "ex/mine.csv").err


def test_partners_have_their_names_in_tables_and_reports(coterie: Command, here: Path) -> None:
    Path("sites/b.csv").rename("sites/[b]<b>.csv")
    done = coterie("run", *FILES, "--rounds", 2, "--set", "run.baselines=[]", "--out", "r")
    assert done.code == 0, done.err
    assert "[b]<b>.csv" in done.out
    summary = json.loads(Path("r/summary.json").read_text())
    assert summary["names"] == json.loads(Path("r/clients.json").read_text()) == ["[b]<b>.csv", "a.csv", ME]
    assert Path("r/weights.csv").read_text().startswith("round,client_0,client_1,client_2\n")
    assert coterie("report", "r").code == 0
    text = Path("r/report.html").read_text()
    assert "a.csv" in text
    assert "[b]&lt;b&gt;.csv" in text
    assert "<b>" not in text
    assert "client 0" not in text


def test_unseen_words_at_prediction_are_told(coterie: Command, here: Path) -> None:
    assert coterie("run", *FILES, "--rounds", 2, "--set", "run.baselines=[]", "--out", "r").code == 0
    write("new.csv", [[0.1, "NA", "purple"], [0.2, 0.3, "a"]], ("u", "v", "kind"))
    done = coterie("predict", "r", "new.csv")
    assert done.code == 0
    assert "words that no training file had: 'purple'" in done.err
    assert len(done.out.splitlines()) == 3
    write("new.csv", [[0.1, 1, "a"], [0.2, 0.3, "a\0"]], ("u", "v", "kind"))
    done = coterie("predict", "r", "new.csv")
    assert done.code == 2
    assert "new.csv: column 'kind' in row 2 holds a NUL character" in done.err


def test_an_example_is_never_overwritten(coterie: Command, here: Path) -> None:
    assert coterie("data", "example", "ex").code == 0
    assert "holds an example already" in coterie("data", "example", "ex").err
    assert "10 are needed" in coterie("data", "example", "ex2", "--friends", 90).err
    assert "unknown example 'wines'" in coterie("data", "example", "ex3", "--data", "wines").err


def test_advise_needs_files(coterie: Command, here: Path) -> None:
    assert "problem files needs your data" in coterie("advise").err
    Path("c.toml").write_text("[run]\nproblem = 'friends'\n")
    assert "advise works on problem files, not friends" in coterie("advise", "c.toml").err


@pytest.mark.parametrize(
    "setting",
    [
        "run.engine=flower",
        "run.record=5",
        'run.log=["tensorboard"]',
        "federation.compress=top-k",
        "federation.quorum=2",
        "faults.crash=0.1",
        "engine.workers=2",
    ],
)
def test_advise_refuses_what_it_would_ignore(coterie: Command, here: Path, setting: str) -> None:
    where = ("--clients", "sites/*.csv", "--target", "mine.csv", "--label", "label")
    done = coterie("advise", *where, "--set", setting, "--out", "advice")
    assert done.code == 2
    assert f"advise does not use these settings: {setting.partition('=')[0]} = " in done.err
    assert not Path("advice").exists()
