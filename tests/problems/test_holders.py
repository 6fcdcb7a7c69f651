"""Skewed partitions, and problems whose clients are real holders: LEAF's users, the hospitals of FLamby."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import coterie
from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.catalogue.friends import friends
from coterie.problems.catalogue.groups import groups
from coterie.problems.catalogue.heart_disease import heart_disease
from coterie.problems.catalogue.hyper_representation import hyper_representation
from coterie.problems.catalogue.leaf import femnist, shakespeare
from coterie.problems.catalogue.loss_tuning import loss_tuning
from coterie.problems.catalogue.meta_learning import meta_learning
from coterie.problems.catalogue.mixture import mixture
from coterie.problems.catalogue.noisy_clients import noisy_clients
from coterie.problems.catalogue.sketch import sketch
from coterie.problems.catalogue.submodels import submodels
from coterie.problems.data import heart, sets
from coterie.problems.data.leaf import LETTERS
from coterie.problems.data.partition import apportioned, partition, thinned
from coterie.problems.files.example import write_example

LABELS = torch.arange(1000) % 10
DRAW = Draw.of(0)


def spread(parts: list[Tensor]) -> tuple[float, float]:
    """How unequal sizes are, and how far the classes of a client are from equal shares, on average."""
    sizes = torch.tensor([len(part) for part in parts], dtype=torch.float64)
    shares = [torch.bincount(LABELS[part], minlength=10).double() / len(part) for part in parts]
    return float(sizes.std() / sizes.mean()), float(torch.stack([(s - 0.1).abs().sum() for s in shares]).mean())


@pytest.mark.parametrize("name", ["dirichlet", "quantity"])
@pytest.mark.parametrize("alpha", [0.01, 0.3, 100.0])
def test_skewed_partitions_deal_every_row_once(name: str, alpha: float) -> None:
    parts = partition(name, LABELS, 12, 2, DRAW, alpha)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000))
    assert min(len(part) for part in parts) >= 2
    again = partition(name, LABELS, 12, 2, DRAW, alpha)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


def test_a_small_alpha_is_more_unequal() -> None:
    few, many = (partition("dirichlet", LABELS, 10, 2, DRAW, alpha) for alpha in (0.1, 1000.0))
    assert spread(few)[0] > 0.3 > 0.1 > spread(many)[0]
    assert spread(few)[1] > 0.8 > 0.2 > spread(many)[1]
    sizes = partition("quantity", LABELS, 10, 2, DRAW, 0.5)
    assert spread(sizes)[0] > 0.5


def test_proportions_are_those_of_the_dirichlet_distribution() -> None:
    sizes = (
        torch.tensor(
            [[len(part) for part in partition("quantity", LABELS, 4, 2, Draw.of(seed), 2.0)] for seed in range(400)]
        ).double()
        / 1000
    )
    assert torch.allclose(sizes.mean(0), torch.full((4,), 0.25, dtype=torch.float64), atol=0.02)
    variance = 0.25 * 0.75 / (4 * 2.0 + 1)  # of Dirichlet(2, 2, 2, 2)
    assert sizes.var(0).mean() == pytest.approx(variance, rel=0.15)


def test_rows_are_apportioned_by_largest_remainders() -> None:
    assert apportioned(10, torch.tensor([0.25, 0.25, 0.5])) == [3, 2, 5]
    assert apportioned(0, torch.tensor([0.5, 0.5])) == [0, 0]


def test_thinned_shards_are_parts_of_what_they_were() -> None:
    shards = [(torch.arange(100 * k, 100 * (k + 1)), LABELS[:100]) for k in range(5)]
    parts = thinned(shards, 0.3, DRAW)
    sizes = [len(y) for _, y in parts]
    assert 2 <= min(sizes) < max(sizes) <= 100
    for (x, y), (old, _) in zip(parts, shards, strict=True):
        assert bool(torch.isin(x, old).all())
        assert torch.equal(LABELS[:100][x % 100], y)
    assert thinned(shards, None, DRAW) is shards


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (friends, {"skew": 0.5}),
        (groups, {"skew": 0.5, "clients": 6, "train": 40}),
        (mixture, {"skew": 0.5, "clients": 4, "friends": 2, "rows": 40}),
        (noisy_clients, {"skew": 0.5, "clients": 5}),
        (sketch, {"partition": "dirichlet", "alpha": 0.3}),
        (submodels, {"partition": "quantity", "clients": 5, "rows": 60}),
        (hyper_representation, {"partition": "dirichlet", "clients": 5}),
        (loss_tuning, {"partition": "quantity", "clients": 5}),
        (meta_learning, {"partition": "dirichlet", "clients": 5}),
    ],
)
def test_every_image_problem_has_unequal_clients(make: Any, settings: dict[str, Any]) -> None:
    problem = make(Context(1), **settings)
    assert problem.train.ragged
    assert int(problem.train.counts.min()) >= 1


def test_an_unknown_partition_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="did you mean dirichlet"):
        partition("dirichlett", LABELS, 3, 2, DRAW)


# LEAF


def write_leaf(folder: Path, users: dict[str, tuple[list[Any], list[Any]]], test: int = 2) -> Path:
    for part, cut in (("train", slice(test, None)), ("test", slice(0, test))):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for i, (user, (x, y)) in enumerate(users.items()):  # LEAF writes several files
            table = {"users": [user], "num_samples": [len(y[cut])], "user_data": {user: {"x": x[cut], "y": y[cut]}}}
            (folder / part / f"all_data_{i}.json").write_text(json.dumps(table))
    return folder


def writers(*sizes: int) -> dict[str, tuple[list[Any], list[Any]]]:
    made = {}
    for k, n in enumerate(sizes):
        images = DRAW.client(k).uniform(n, 784)
        made[f"f{k:04}"] = (images.tolist(), [(7 * i + k) % 62 for i in range(n)])
    return made


def test_femnist_is_read_and_trained(tmp_path: Path) -> None:
    folder = write_leaf(tmp_path / "femnist", writers(8, 12, 6))
    problem = femnist(Context(0), folder=str(folder), model="logistic", target=1)
    assert problem.names == ("f0000", "f0001", "f0002")
    assert (problem.train.counts + problem.valid.counts).tolist() == [6, 10, 4]  # type: ignore[union-attr]
    assert problem.tests is not None
    assert problem.tests.counts.tolist() == [2, 2, 2]
    images = torch.tensor(writers(8, 12, 6)["f0001"][0][:2]).reshape(2, 1, 28, 28)
    assert torch.equal(problem.test.columns[0], images)  # type: ignore[union-attr]
    assert "sha256" in problem.notes[0]
    fit = coterie.fit(problem, coterie.methods.meritfed(mirror_steps=1), 1, mode="vmap")
    assert "personal_accuracy" in fit.summary["final"]
    assert femnist(Context(0), folder=str(folder), model="logistic", clients=2).clients == 2


def test_shakespeare_is_read_and_trained(tmp_path: Path) -> None:
    text = "To be, or not to be: that is the question."
    rows = [(text[i : i + 10], text[i + 10]) for i in range(20)]
    parts = {"HAMLET": rows[:12], "YORICK": rows[8:]}
    roles = {name: ([x for x, _ in part], [y for _, y in part]) for name, part in parts.items()}
    folder = write_leaf(tmp_path / "shakespeare", roles)
    problem = shakespeare(Context(0), folder=str(folder), hidden=4, layers=1)
    first = "".join(LETTERS[i] for i in problem.test.columns[0][0].tolist())  # type: ignore[union-attr]
    assert first == text[:10]
    assert len(LETTERS) == 80
    fit = coterie.fit(problem, coterie.methods.bilevel(steps=1, local_steps=1, batch=2, cap=0.9), 1)
    assert fit.summary["events"]["warning"] == 1  # vmap has no rule for an LSTM
    model = problem.task.model.to(dtype=torch.float64, device="cpu")
    wide, theta = replace(problem.task, model=model), problem.start.double()  # type: ignore[type-var]
    batch, v, h = problem.train.client(0).all(), DRAW.normal(len(theta), dtype=torch.float64), 1e-5
    slope = (wide.gradient(theta + h * v, batch) - wide.gradient(theta - h * v, batch)) / (2 * h)
    torch.testing.assert_close(wide.hvp(theta, v, batch), slope, rtol=1e-5, atol=1e-8)


USER = '{"users": ["a"], "user_data": {"a": {"x": [[0.1]], "y": %s}}}'


def written(text: str) -> Any:
    return lambda folder: (folder / "train" / "all_data_0.json").write_text(text)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (written("{"), "all_data_0.json is damaged: it is not in LEAF"),
        (written('{"users": ["a"]}'), "not in LEAF's form: KeyError"),
        (written(USER % "[1, 2]"), "user a has 1 inputs and 2 labels"),
        (written(USER % "[1]"), "rows of user a cannot be read"),
        (lambda folder: [path.unlink() for path in (folder / "test").iterdir()], r"holds no \*.json"),
        (lambda folder: write_leaf(folder, writers(2)), r"no user of .* has training and test rows"),
        (lambda folder: (folder / "train").rename(folder / "training"), "no LEAF files of femnist were found"),
    ],
)
def test_damaged_leaf_files(tmp_path: Path, spoil: Any, complaint: str) -> None:
    folder = write_leaf(tmp_path / "femnist", writers(5))
    spoil(folder)
    with pytest.raises(UsageError, match=complaint):
        femnist(Context(0), folder=str(folder))


def test_leaf_settings_out_of_range(tmp_path: Path) -> None:
    folder = str(write_leaf(tmp_path / "femnist", writers(5, 5)))
    with pytest.raises(UsageError, match=r"problem.clients is 3, but .* has 2 users"):
        femnist(Context(0), folder=folder, clients=3)
    with pytest.raises(UsageError, match=r"problem.target is 2, but there are holders 0 … 1"):
        femnist(Context(0), folder=folder, target=2)


# heart disease


def patients(n: int, seed: int) -> list[str]:
    lines = []
    for i in range(n):
        draw = DRAW.step(seed).client(i)
        fields = [int(v) for v in draw.integers(100, 14)]
        fields[2], fields[6] = 1 + fields[2] % 4, fields[6] % 3
        fields[13] = fields[13] % 3
        words = [f"{field}.0" for field in fields]
        words[11] = "?"  # ca is missing nearly everywhere, and left out
        lines.append(",".join(words))
    return lines


@pytest.fixture
def hospitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "heart-disease"
    folder.mkdir()
    for k, name in enumerate(heart.HOSPITALS):
        rows = patients(20 + 10 * k, k)
        rows[3] = rows[3].replace(rows[3].split(",")[0], "?", 1)
        (folder / f"processed.{name}.data").write_text("\n".join(rows) + "\n")
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    return folder


def test_hospitals_are_prepared_as_flamby_does(hospitals: Path) -> None:
    found = heart.heart_disease_hospitals()
    assert [len(h.train.y) + len(h.test.y) for h in found] == [19, 29, 39, 49]  # one row each is not complete
    assert [len(h.train.y) for h in found] == [12, 19, 25, 32]  # 66 %, rounded down
    for hospital in found:
        assert hospital.train.x.shape[1] == 13
        assert torch.allclose(hospital.train.x.mean(0), torch.zeros(13), atol=1e-5)
        assert torch.allclose(hospital.train.x.std(0), torch.ones(13), atol=1e-4)
        everyone = torch.cat([hospital.train.y, hospital.test.y]).double().mean()
        assert float(hospital.test.y.double().mean() - everyone) == pytest.approx(0.0, abs=0.06)  # stratified


def test_the_problem_of_hospitals(hospitals: Path) -> None:
    problem = heart_disease(Context(0), target="va")
    assert problem.names == ("Cleveland", "Hungary", "Switzerland", "Long Beach")
    assert problem.valid is not None
    assert problem.train.counts.tolist() == [9, 14, 19, 24]
    fit = coterie.fit(problem, coterie.methods.meritfed(), 2, mode="vmap")
    assert {"personal_accuracy", "test_accuracy", "validation_loss"} <= fit.summary["final"].keys()
    whole = heart_disease(Context(0), validation=0.0)
    assert whole.train.counts.tolist() == [12, 19, 25, 32]
    assert whole.target is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1,2,3\n", "line 1 has 3 fields, not 14"),
        (",".join("x" * 14) + "\n", "no number"),
        (",".join("?" * 14) + "\n", "no complete"),
    ],
)
def test_damaged_hospitals(hospitals: Path, text: str, complaint: str) -> None:
    (hospitals / "processed.va.data").write_text(text)
    with pytest.raises(UsageError, match=complaint):
        heart_disease(Context(0))


def cells(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_an_example_for_advise_has_one_hospital_as_target(hospitals: Path, tmp_path: Path) -> None:
    done = write_example(tmp_path / "mine", "heart", centre="hungarian")
    assert done.label == "disease"
    assert done.others == ("cleveland.csv", "switzerland.csv", "va.csv")
    found = heart.heart_disease_hospitals()
    assert len(cells(tmp_path / "mine" / "mine.csv")) == len(found[1].train.y)
    tested = cells(tmp_path / "mine" / "test.csv")
    assert [row["disease"] == "yes" for row in tested] == found[1].test.y.bool().tolist()
    assert {row["resting_ecg"] for row in tested} <= {"normal", "ST-T abnormality", "hypertrophy"}
    assert [len(cells(tmp_path / "mine" / "sites" / f"{h.name}.csv")) for h in (found[0], *found[2:])] == [12, 25, 32]
    with pytest.raises(UsageError, match=r"unknown centre 'zurich'"):
        write_example(tmp_path / "other", "heart", centre="zurich")


def test_an_example_without_the_data_says_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    monkeypatch.setattr(sets, "user_cache_path", lambda name: tmp_path / name)
    with pytest.raises(UsageError, match=r"coterie data get heart-disease"):
        write_example(tmp_path / "mine", "heart")
    assert not (tmp_path / "mine").exists()


REAL = {  # healthy and sick among FLamby's training and test rows
    "cleveland": ((108, 91), (56, 48)),
    "hungarian": ((107, 65), (56, 33)),
    "switzerland": ((0, 30), (1, 15)),
    "va": ((19, 66), (10, 35)),
}


@pytest.mark.data
@pytest.mark.parametrize("centre", REAL)
def test_the_rows_of_the_published_hospitals(centre: str, tmp_path: Path) -> None:
    if sets.complete(sets.known("heart-disease")) is None:
        pytest.skip(f"heart-disease is not in {' or '.join(map(str, sets.places()))}")
    write_example(tmp_path, "heart", centre=centre)
    for name, counts in zip(("mine.csv", "test.csv"), REAL[centre], strict=True):
        sick = [row["disease"] for row in cells(tmp_path / name)]
        assert (sick.count("no"), sick.count("yes")) == counts
    for other in REAL.keys() - {centre}:
        sick = [row["disease"] for row in cells(tmp_path / "sites" / f"{other}.csv")]
        assert (sick.count("no"), sick.count("yes")) == REAL[other][0]
