"""Own files as a problem: reading, federated scaling and categories, and how rows are laid out."""

import csv
import gzip
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coterie.consent import allowing
from coterie.errors import UsageError
from coterie.federation.ledger import Entry
from coterie.problems import Context
from coterie.problems.files import files, tables
from coterie.problems.files.prepare import Moments
from coterie.problems.files.problem import shuffled

HEADER = ("age", "dose", "colour", "label")
COLOURS = ("red", "green", "blue")


def a_table(rows: int, seed: int, *, offset: float = 0.0, missing: bool = False) -> list[list[Any]]:
    random = np.random.default_rng(seed)
    table: list[list[Any]] = []
    for i in range(rows):
        age, dose = offset + random.normal(50, 10), random.normal(0, 1e-3)
        colour = COLOURS[int(random.integers(3))]
        label = "yes" if age - offset + 5 * (colour == "red") + 5 * random.normal() > 52 else "no"
        gone = missing and i % 5 == 0
        table.append(["NA" if gone else f"{age:.17g}", f"{dose:.17g}", "" if gone else colour, label])
    return table


def write(path: Path, rows: list[list[Any]], header: tuple[str, ...] = HEADER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for k, rows in enumerate((10, 60, 35)):
        write(tmp_path / "sites" / f"s{k}.csv", a_table(rows, k, offset=1e6, missing=k == 1))
    write(tmp_path / "mine.csv", a_table(40, 9, offset=1e6))
    return tmp_path


def the(folder: Path, **settings: Any) -> Any:
    return files(Context(), clients=f"{folder}/sites/*.csv", target=f"{folder}/mine.csv", **settings)


def column(folder: Path, j: int) -> list[str]:
    """What somebody who saw all files would read, clients first."""
    paths = [*sorted((folder / "sites").glob("*.csv")), folder / "mine.csv"]
    return [row[j] for path in paths for row in list(csv.reader(path.read_text().splitlines()))[1:]]


def test_federated_scaling_is_central_scaling(folder: Path) -> None:
    """At an offset of 10⁶, where sums of squares would have lost six digits, and with missing values."""
    stored = the(folder).artifacts["preprocess.json"]
    for j, found in enumerate(stored["numeric"]):
        central = np.array([float(v) for v in column(folder, j) if v != "NA"])
        assert found["mean"] == pytest.approx(central.mean(), rel=1e-12)
        assert found["deviation"] == pytest.approx(central.std(), rel=1e-6)
    assert [found["indicator"] for found in stored["numeric"]] == [True, False]


def test_moments_merge_in_any_grouping() -> None:
    x = torch.randn(101, 3, dtype=torch.float64) * 1e-3 + 1e6
    whole = Moments.of(x)
    for cut in (1, 50, 100):
        merged = Moments.of(x[:cut]).merged(Moments.of(x[cut:]))
        torch.testing.assert_close(tuple(merged), tuple(whole), rtol=1e-6, atol=0)
    empty = Moments.of(torch.full((4, 3), torch.nan, dtype=torch.float64))
    torch.testing.assert_close(tuple(empty.merged(whole)), tuple(whole), rtol=1e-12, atol=0)


def test_what_scaling_moved_is_in_the_ledger(folder: Path) -> None:
    problem = the(folder)
    moved = {cause.rpartition("/")[2]: entry for cause, entry in problem.spent.by_cause.items()}
    numbers, clients = 2, 3
    assert moved["column-moments"]._replace(points=0) == Entry(
        1, 3 * numbers * clients, 0, 8 * 3 * numbers * clients, 0
    )
    scaled = {"column-moments", "dictionary-size", "category-counts"}
    assert set(moved) == scaled | {"column-quantiles", "shared-rows"}
    assert moved["category-counts"].rounds == 1


def test_categories_are_those_of_all_files(folder: Path) -> None:
    problem = the(folder)
    stored = problem.artifacts["preprocess.json"]
    assert stored["categorical"] == [{"name": "colour", "words": ["blue", "green", "red"], "missing": True}]
    labels = column(folder, 3)
    assert dict(zip(stored["classes"], stored["class_counts"], strict=True)) == {
        word: labels.count(word) for word in ("no", "yes")
    }


def test_inputs_are_what_the_page_says(folder: Path) -> None:
    """Scaled numbers, 0 where missing, an indicator, then one column a category and one for none."""
    problem = the(folder)
    ages = column(folder, 0)
    scale = problem.artifacts["preprocess.json"]["numeric"][0]
    x = problem.train.client(1).all().inputs
    assert x.shape[1] == 2 + 1 + 3 + 1
    for i in range(60):
        age = ages[10 + i]
        wanted = 0.0 if age == "NA" else (float(age) - scale["mean"]) / scale["deviation"]
        assert float(x[i, 0]) == pytest.approx(wanted, abs=1e-5)
        assert float(x[i, 2]) == float(age == "NA")
        assert x[i, 3:].tolist() == [float(column(folder, 2)[10 + i] == c) for c in ("blue", "green", "red", "")]


def test_the_targets_rows_are_split_by_class_and_every_row_is_used_once(folder: Path) -> None:
    problem = the(folder, own=0.5, test=0.25)
    assert problem.names == ("s0.csv", "s1.csv", "s2.csv", "(the target)")
    own, valid = problem.train.client(3).all(), problem.target.valid.all()
    tested = problem.test.all()
    assert (len(own.labels), len(valid.labels), len(tested.labels)) == (20, 10, 10)
    rows = torch.cat([own.inputs, valid.inputs, tested.inputs])
    assert len(rows.unique(dim=0)) == 40
    shares = [float(part.labels.double().mean()) for part in (own, valid, tested)]
    assert max(shares) - min(shares) <= 0.2
    learns_alone = problem.target.train.all().inputs
    torch.testing.assert_close(learns_alone, torch.cat([own.inputs, valid.inputs]))


def test_where_everyone_is_a_target_each_has_rows_of_its_own_for_each_purpose(folder: Path) -> None:
    problem = the(folder, everyone=True, own=0.5, test=0.2)
    assert problem.names[-1] == "mine.csv"
    last = len(problem.names) - 1
    parts = [
        [stack.client(k).all() for k in range(last + 1)] for stack in (problem.train, problem.valid, problem.tests)
    ]
    train, valid, tests = (part[last].inputs for part in parts)
    assert torch.equal(problem.target.train.all().inputs, train)
    one_target = the(folder, own=0.5, test=0.2)
    for each in (problem, one_target):  # the same rows, whoever else is a target
        assert torch.equal(each.target.valid.all().inputs, valid)
        assert torch.equal(each.test.all().inputs, tests)
    for k, rows in enumerate((10, 60, 35, 40)):
        found = [tuple(row) for part in parts for row in part[k].inputs.tolist()]
        assert len(found) == len(set(found)) == rows


def test_any_stretch_of_an_order_has_its_share_of_each_class() -> None:
    from coterie.numerics import Draw

    labels = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    order = shuffled(labels, Draw.of(3), True)
    assert sorted(order.tolist()) == list(range(100))
    for start in range(0, 100, 20):
        counts = torch.bincount(labels[order[start : start + 20]], minlength=3)
        assert (counts - torch.tensor([12, 6, 2])).abs().max() <= 1


def test_columns_may_stand_in_any_order(folder: Path) -> None:
    before = the(folder)
    path = folder / "sites" / "s2.csv"
    rows = list(csv.reader(path.read_text().splitlines()))[1:]
    write(path, [row[::-1] for row in rows], HEADER[::-1])
    torch.testing.assert_close(the(folder).train.columns[0], before.train.columns[0])


@pytest.mark.parametrize("form", ["tsv", "semicolon", "gz", "npz", "quoted"])
def test_other_forms_of_the_same_table_give_the_same_inputs(folder: Path, form: str) -> None:
    before = the(folder)
    path = folder / "sites" / "s2.csv"
    text = path.read_text()
    if form == "tsv":
        path.write_text(text.replace(",", "\t"))
    elif form == "semicolon":
        path.write_text(text.replace(",", ";"))
    elif form == "quoted":
        path.write_text("\n".join(",".join(f'"{v}"' for v in line.split(",")) for line in text.splitlines()))
    elif form == "gz":
        with gzip.open(folder / "sites" / "s2.csv.gz", "wt") as file:
            file.write(text)
        path.unlink()
    else:
        table = list(zip(*list(csv.reader(text.splitlines()))[1:], strict=True))
        arrays = [np.array(table[0], dtype=float), np.array(table[1], dtype=float), table[2], table[3]]
        np.savez(folder / "sites" / "s2.npz", **dict(zip(HEADER, map(np.array, arrays), strict=True)))
        path.unlink()
    after = files(Context(), clients=f"{folder}/sites/*", target=f"{folder}/mine.csv")
    torch.testing.assert_close(after.train.columns[0], before.train.columns[0])


def test_parquet_and_a_datasets_folder(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet and Arrow need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    before = the(folder)
    for name, form in (("s1", "parquet"), ("s2", "datasets")):
        path = folder / "sites" / f"{name}.csv"
        columns = list(zip(*list(csv.reader(path.read_text().splitlines()))[1:], strict=True))
        numbers = [[None if v == "NA" else float(v) for v in column] for column in columns[:2]]
        words = [[v or None for v in column] for column in columns[2:]]
        table = pyarrow.table(dict(zip(HEADER, [*numbers, *words], strict=True)))
        path.unlink()
        if form == "parquet":
            parquet.write_table(table, path.with_suffix(".parquet"))
            continue
        path.with_suffix("").mkdir()
        (path.with_suffix("") / "dataset_info.json").write_text("{}")
        with pyarrow.ipc.new_stream(path.with_suffix("") / "data-00000-of-00001.arrow", table.schema) as stream:
            stream.write_table(table)
    after = files(Context(), clients=f"{folder}/sites/*", target=f"{folder}/mine.csv")
    torch.testing.assert_close(after.train.columns[0], before.train.columns[0])


def test_folders_of_pictures(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="picture folders need pillow")
    random = np.random.default_rng(0)
    for holder, count in (("sites/a", 6), ("sites/b", 5), ("mine", 12)):
        for word, bright in (("dark", 40), ("light", 200)):
            (tmp_path / holder / word).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(bright - 20, bright + 20, (8, 8)).astype(np.uint8)
                image.fromarray(pixels).save(tmp_path / holder / word / f"{i}.png")
    problem = files(Context(), clients=f"{tmp_path}/sites/*", target=f"{tmp_path}/mine", model="cnn")
    assert problem.artifacts["preprocess.json"]["classes"] == ["dark", "light"]
    x, y = problem.train.client(0).all().columns
    assert x.shape[0] == 12
    assert y.tolist() == [0] * 6 + [1] * 6


def test_pictures_in_npz(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name, rows in (("a", 12), ("b", 9), ("mine", 30)):
        pictures = random.integers(0, 255, (rows, 8, 8)).astype(np.uint8)
        np.savez(tmp_path / f"{name}.npz", x=pictures, label=np.arange(rows) % 3)
    problem = files(Context(), clients=f"{tmp_path}/?.npz", target=f"{tmp_path}/mine.npz", model="mlp")
    assert problem.train.columns[0].shape[1:] == (1, 8, 8)
    assert float(problem.train.columns[0].max()) <= 1.0
    assert problem.clients == 3


def test_a_number_to_predict(tmp_path: Path) -> None:
    """The label is scaled too, by its federated mean and deviation; a linear model finds the line."""
    from coterie.experiment.build import assemble
    from coterie.experiment.config import load
    from coterie.experiment.loop import run_rounds

    random = np.random.default_rng(0)
    for name, rows in (("a", 200), ("b", 100), ("mine", 60)):
        x = random.normal(size=(rows, 2))
        y = 1000 + 30 * x[:, 0] - 10 * x[:, 1] + random.normal(size=rows)
        write(tmp_path / f"{name}.csv", np.column_stack([x, y]).tolist(), ("u", "v", "price"))
    sets = {"problem.clients": f"{tmp_path}/?.csv", "problem.target": f"{tmp_path}/mine.csv", "problem.label": "price"}
    flags = {"run.problem": "files", "run.rounds": 60, "run.baselines": [], "federation.mode": "vmap"}
    result = run_rounds(assemble(load(sets={**sets, "problem.model": "linear", "problem.l2": 0.0}, flags=flags)), None)
    assert result.summary["final"]["test_loss"] < 0.01  # ½ (1/32)², and what 60 rounds leave
    stored = files(Context(), **{k.partition(".")[2]: v for k, v in sets.items()}).artifacts["preprocess.json"]
    assert stored["kind"] == "regression"
    assert stored["label_mean"] == pytest.approx(1000, abs=5)


def test_balance_makes_every_class_count_the_same(folder: Path) -> None:
    plain, balanced = the(folder, l2=0.0), the(folder, l2=0.0, balance=True)
    stored = plain.artifacts["preprocess.json"]
    theta, rows = torch.zeros_like(plain.start), plain.train.client(1)
    total = sum(stored["class_counts"])
    labels = rows.all().labels
    weights = torch.tensor([total / (2 * count) for count in stored["class_counts"]])[labels]
    wanted = float(np.log(2) * weights.mean())
    assert float(balanced.task.full_loss(theta, rows)) == pytest.approx(wanted, rel=1e-5)
    assert balanced.task.classes == 2


def factory(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 3), nn.Tanh(), nn.Linear(3, outputs))


def test_a_network_of_ones_own(folder: Path) -> None:
    with allowing([__name__]):
        problem = the(folder, model=f"{__name__}:factory")
    assert problem.start.numel() == 7 * 3 + 3 + 3 * 2 + 2


def test_large_files_are_mapped_and_give_the_same_rows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = the(folder)
    monkeypatch.setattr(tables, "MAPPED", 0)
    cache = tmp_path / "cache"
    mapped = the(folder, cache=str(cache))
    assert all(torch.equal(a, b) for a, b in zip(held.train.columns, mapped.train.columns, strict=True))
    assert cache.is_dir()
    assert not list(cache.iterdir()), "scratch files outlive nobody"


STREAM = """
import resource, sys, torch
torch.set_num_threads(1)
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
sets = {"problem.clients": "sites/*.csv", "problem.target": "mine.csv", "problem.cache": "cache"}
flags = {"run.problem": "files", "run.rounds": 20, "run.baselines": [], "federation.mode": "vmap"}
result = run_rounds(assemble(load(sets=sets, flags=flags)), None)
assert result.summary["outcome"] == "finished"
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_a_million_rows_of_fifty_columns_train_in_less_than_a_gigabyte(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    header = ",".join([*(f"x{j}" for j in range(50)), "label"]) + "\n"

    def block(rows: int) -> str:
        table = random.normal(size=(rows, 50)).round(4).tolist()
        return "".join(",".join(map(repr, row)) + (",yes\n" if row[0] > 0 else ",no\n") for row in table)

    (tmp_path / "sites").mkdir()
    with (tmp_path / "sites" / "huge.csv").open("w") as file:
        file.write(header)
        some = block(10_000)
        for _ in range(100):
            file.write(some)
    (tmp_path / "sites" / "tiny.csv").write_text(header + block(10))
    (tmp_path / "mine.csv").write_text(header + block(100))
    done = subprocess.run(
        [sys.executable, "-c", STREAM], cwd=tmp_path, capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert int(done.stdout) < 1000


def test_the_unit_of_the_peak_is_what_the_test_above_takes_it_for() -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    assert 50 < peak < 50_000


def test_files_are_needed() -> None:
    with pytest.raises(UsageError, match=r"problem\.clients='sites/\*\.csv'.*coterie data example"):
        files(Context())


def test_a_gzipped_table_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.problems.files import reading, sizes

    monkeypatch.setattr(sizes, "SMALL", 1 << 16)
    bomb, honest = tmp_path / "bomb.csv.gz", tmp_path / "honest.csv.gz"
    bomb.write_bytes(gzip.compress(b"a,b\n" + b"0" * (1 << 22)))
    rows = b"".join(b"%d,%d\n" % (i, i * i) for i in range(20_000))
    honest.write_bytes(gzip.compress(b"a,b\n" + rows))
    with pytest.raises(reading.Unreadable, match="more than 200 times its size"):
        list(reading.blocks_of(bomb))
    assert sum(len(block["a"]) for block in reading.blocks_of(honest, ["a", "b"])) == 20_000
