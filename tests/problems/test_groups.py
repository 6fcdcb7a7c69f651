"""`groups`: who is a friend, what each group draws and sees, and that nothing leaks into validation or test."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_data import covtype_text, write, write_cifar_binary, write_mnist
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Batch
from coterie.numerics import Draw
from coterie.problems import Context, Weighting
from coterie.problems.base import View
from coterie.problems.catalogue.groups import PLANS, groups
from coterie.problems.catalogue.registry import problem_entry
from coterie.problems.data import sets
from coterie.problems.tasks.personal import group_weights
from coterie.settings import checked

SEED = Context(seed=4)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "home"))
    monkeypatch.setattr(sets, "user_cache_path", lambda _: tmp_path / "cache")
    return tmp_path / "home"


def shard(problem: Weighting, k: int) -> Batch:
    return problem.train.client(k).all()


def validation(problem: Weighting) -> Batch:
    assert problem.target is not None
    assert problem.target.valid is not None
    return problem.target.valid.all()


def held_out(problem: Weighting) -> Batch:
    assert problem.test is not None
    return problem.test.all()


def frequencies(labels: Tensor, data: str) -> list[float]:
    """How often each merged class occurs."""
    merged = PLANS[data].merged
    return [float(torch.isin(labels, torch.tensor(classes)).double().mean()) for classes in merged]


def fingerprints(x: Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in x}


def test_it_is_registered_with_its_defaults() -> None:
    entry = problem_entry("groups")
    settings = checked(entry.make, "problem", {})
    problem = entry.make(Context(0), **settings)
    assert problem.clients == 15
    assert problem.friends == 5
    assert {"target", "friends", "gradient", "hvp"} <= problem.offers
    assert problem.train.counts.tolist() == [100] * 15
    assert len(validation(problem).labels) == 60
    assert len(held_out(problem).labels) == 300


@pytest.mark.parametrize("setting", [1, 2, 3, 4])
@pytest.mark.parametrize(("target", "friends"), [("minority", 5), ("majority", 10)])
def test_friends_come_first_and_draw_like_the_target(target: Any, friends: int, setting: int) -> None:
    problem = groups(SEED, setting=setting, target=target, train=400, test=400, validation=200)
    assert problem.friends == friends
    plan = PLANS["digits"]
    other = plan.majority if target == "minority" else plan.minority
    own = plan.shares(target)
    back = plan.relabelled(10).argsort()  # true classes of permuted labels
    for k in range(15):
        group = target if k < friends else {"minority": "majority", "majority": "minority"}[target]
        labels = shard(problem, k).labels
        labels = back[labels] if group == "majority" and setting in (2, 4) else labels
        assert frequencies(labels, "digits") == pytest.approx(own if k < friends else other, abs=0.09)
    for part in (validation(problem), held_out(problem)):
        labels = back[part.labels] if target == "majority" and setting in (2, 4) else part.labels
        assert frequencies(labels, "digits") == pytest.approx(own, abs=0.12)


def test_a_large_draw_has_the_papers_probabilities() -> None:
    for data in ("digits", "covtype", "cifar10"):
        plan = PLANS[data]
        assert sum(plan.minority) == pytest.approx(1.0)
        assert sum(plan.majority) == pytest.approx(1.0)
        assert sorted(c for classes in plan.merged for c in classes) == list(range(7 if data == "covtype" else 10))
    problem = groups(SEED, clients=2, train=50_000)
    assert frequencies(shard(problem, 0).labels, "digits") == pytest.approx(PLANS["digits"].minority, abs=0.01)
    assert frequencies(shard(problem, 1).labels, "digits") == pytest.approx(PLANS["digits"].majority, abs=0.01)


@pytest.mark.parametrize(
    ("data", "cycle"), [("mnist", [2, 0, 1, 5]), ("fashion-mnist", [2, 0, 1, 5]), ("cifar10", [1, 0, 2, 5])]
)
def test_the_permutations_are_the_printed_ones(data: str, cycle: list[int]) -> None:
    labels = PLANS[data].relabelled(10)
    expected = torch.arange(10)
    for old, new in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        expected[old] = new
    assert torch.equal(labels, expected)


@pytest.mark.parametrize("target", ["minority", "majority"])
def test_settings_differ_only_in_what_the_majority_sees(target: Any) -> None:
    one, two, three, four = (groups(SEED, setting=s, target=target, train=50, model="mlp") for s in (1, 2, 3, 4))
    renamed = PLANS["digits"].relabelled(10)
    holders = [lambda p, k=k: shard(p, k) for k in range(15)] + [validation, held_out]
    first_stranger = one.friends or 0
    for k, holder in enumerate(holders):
        majority = (k < first_stranger or k >= 15) == (target == "majority")
        a, b, c, d = (holder(problem) for problem in (one, two, three, four))
        assert torch.equal(b.labels, renamed[a.labels] if majority else a.labels)
        assert torch.equal(b.inputs, a.inputs)
        assert torch.equal(c.labels, a.labels)
        turned = {n: torch.rot90(a.inputs, n, (2, 3)) for n in (1, -1)}
        assert any(torch.equal(c.inputs, t) for t in turned.values()) == majority
        assert majority or torch.equal(c.inputs, a.inputs)
        assert torch.equal(d.inputs, c.inputs)
        assert torch.equal(d.labels, b.labels)


def test_the_direction_of_the_turn_is_drawn_once_a_seed() -> None:
    directions = set()
    for seed in range(8):
        plain, turned = (groups(Context(seed), setting=s, clients=3, train=20, model="mlp") for s in (1, 3))
        ways = [
            {n for n in (1, -1) if torch.equal(shard(turned, k).inputs, torch.rot90(shard(plain, k).inputs, n, (2, 3)))}
            for k in (1, 2)
        ]
        assert ways[0] == ways[1]
        directions |= ways[0]
    assert directions == {1, -1}


@pytest.mark.parametrize("target", ["minority", "majority"])
def test_no_client_holds_a_row_of_validation_or_test(target: Any) -> None:
    problem = groups(SEED, target=target)
    trained = set().union(*(fingerprints(shard(problem, k).inputs) for k in range(15)))
    assert not trained & fingerprints(validation(problem).inputs)
    assert not trained & fingerprints(held_out(problem).inputs)
    assert not fingerprints(validation(problem).inputs) & fingerprints(held_out(problem).inputs)


def test_rows_repeat_only_where_a_class_is_too_small() -> None:
    problem = groups(SEED)
    for k in range(15):
        assert len(fingerprints(shard(problem, k).inputs)) == 100
    assert len(fingerprints(held_out(problem).inputs)) == 300
    crowded = groups(SEED, clients=2, train=3000)
    _, times = torch.unique(shard(crowded, 0).inputs.flatten(1), dim=0, return_counts=True)
    assert int(times.max()) > 1


def test_clients_draw_independently_of_how_many_there_are() -> None:
    few, many = groups(SEED, clients=4, minority=2), groups(SEED, clients=9, minority=2)
    for k in range(4):
        assert torch.equal(shard(few, k).inputs, shard(many, k).inputs)


def test_the_seed_decides_and_the_dtype_is_kept() -> None:
    first, again, other = groups(Context(0)), groups(Context(0)), groups(Context(1))
    assert torch.equal(first.train.columns[0], again.train.columns[0])
    assert torch.equal(first.start, again.start)
    assert not torch.equal(first.train.columns[0], other.train.columns[0])
    wide = groups(Context(0, torch.float64))
    assert wide.train.columns[0].dtype == wide.start.dtype == torch.float64


def test_a_third_of_the_clients_is_the_minority() -> None:
    for clients, few in ((1, 1), (2, 1), (6, 2), (15, 5), (20, 6)):
        assert groups(SEED, clients=clients, train=10).friends == few
    assert groups(SEED, clients=6, minority=4, target="majority", train=10).friends == 2


def test_the_friends_data_suit_the_target_and_the_strangers_do_not() -> None:
    """A model of the friends' pooled rows beats one of the strangers' rows on the target's test set."""
    problem = groups(SEED, setting=4)
    friends, strangers = (_trained(problem, range(*ids)) for ids in ((0, 5), (5, 15)))
    assert friends > 0.85
    assert strangers < 0.6


def _trained(problem: Weighting, ids: range, steps: int = 150) -> float:
    x, y = (torch.cat([c for k in ids for c in (shard(problem, k).columns[i],)]) for i in (0, 1))
    theta = problem.start
    for t in range(steps):
        rows = Draw.of(0).step(t).integers(len(y), 50)
        theta = theta - 0.3 * problem.task.gradient(theta, Batch((x[rows], y[rows])))
    assert problem.test is not None
    return problem.task.measure(theta, problem.test, "test")["test_accuracy"]


# ---------------------------------------------------------------- other data sets, in small


SMALL: dict[str, Any] = {"clients": 3, "train": 12, "validation": 8, "test": 10}


@pytest.mark.parametrize("data", ["mnist", "fashion-mnist"])
def test_it_runs_on_idx_images(home: Path, data: Any) -> None:
    write_mnist(home / data)
    problem = groups(SEED, data=data, setting=4, **SMALL)
    assert problem.train.columns[0].shape == (36, 7, 7, 1, 16)  # prepared for the network: patches of 16
    assert float(problem.train.columns[0].max()) <= 1.0
    assert problem.task.model.size == 363


def test_it_runs_on_cifar(home: Path) -> None:
    write_cifar_binary(home / "cifar10")
    problem = groups(SEED, data="cifar10", setting=3, target="majority", **SMALL)
    assert problem.train.columns[0].shape == (36, 8, 8, 3, 16)
    assert problem.task.model.size == 1488


def test_it_runs_on_covtype_with_logistic_regression(home: Path) -> None:
    write(home / "covtype" / "covtype.data", covtype_text(210).encode(), packed=True)
    problem = groups(SEED, data="covtype", setting=2, **SMALL)
    assert problem.task.model.size == 55 * 7
    assert not problem.task.mixes_rows
    assert float(problem.train.columns[0].abs().max()) < 10.0


@pytest.mark.parametrize("setting", [3, 4])
def test_what_is_no_image_cannot_be_turned(home: Path, setting: int) -> None:
    write(home / "covtype" / "covtype.data", covtype_text().encode())
    with pytest.raises(UsageError, match=r"covtype has none; use setting 1 or 2, or problem.data"):
        groups(SEED, data="covtype", setting=setting, **SMALL)


def test_a_network_for_images_needs_images(home: Path) -> None:
    write(home / "covtype" / "covtype.data", covtype_text(210).encode())
    with pytest.raises(UsageError, match="model cnn needs images"):
        groups(SEED, data="covtype", model="cnn", **SMALL)


def test_missing_data_are_an_error_with_a_remedy(home: Path) -> None:
    with pytest.raises(UsageError, match="coterie data get cifar10"):
        groups(SEED, data="cifar10")


def test_impossible_groups_are_refused() -> None:
    with pytest.raises(UsageError, match=r"problem.minority is 16, but there are only 15"):
        groups(SEED, minority=16)
    with pytest.raises(UsageError, match="no majority to belong to"):
        groups(SEED, clients=1, target="majority")
    with pytest.raises(UsageError, match=r"lower problem.validation"):
        groups(SEED, validation=20_000)
    with pytest.raises(UsageError, match=r"problem.setting = 5"):
        checked(groups, "problem", {"setting": 5})


# ---------------------------------------------------------------- the real thing


@pytest.mark.data
@pytest.mark.parametrize("data", ["mnist", "fashion-mnist", "cifar10", "covtype"])
def test_the_papers_sizes_on_the_published_data(data: Any) -> None:
    if sets.complete(sets.known(data)) is None:
        pytest.skip(f"{data} is not in {' or '.join(str(place) for place in sets.places())}")
    plan = PLANS[data]
    problem = groups(SEED, data=data, clients=3)
    assert problem.train.counts.tolist() == [plan.train] * 3
    assert frequencies(shard(problem, 0).labels, data) == pytest.approx(plan.minority, abs=0.03)
    assert frequencies(shard(problem, 2).labels, data) == pytest.approx(plan.majority, abs=0.03)
    assert frequencies(held_out(problem).labels, data) == pytest.approx(plan.minority, abs=0.03)
    assert len(validation(problem).labels) == plan.validation
    assert len(held_out(problem).labels) == plan.test


def test_the_penalty_makes_a_linear_model_strongly_convex() -> None:
    plain, ridged = (groups(Context(0), clients=3, train=20, model="logistic", l2=l2) for l2 in (0.0, 0.3))
    v = torch.ones_like(plain.start)
    products = [p.task.full_hvp(p.start, v, p.train.client(0)) for p in (plain, ridged)]
    torch.testing.assert_close(products[1] - products[0], 0.3 * v, atol=1e-5, rtol=1e-4)


def test_selection_rows_are_neither_training_nor_validation_nor_test_rows() -> None:
    plain, problem = groups(SEED, clients=3), groups(SEED, clients=3, selection=40)
    assert problem.selection is not None
    assert plain.selection is None
    chosen = {tuple(row.flatten().tolist()) for row in problem.selection.all().columns[0]}
    others = [shard(problem, k) for k in range(3)] + [validation(problem), held_out(problem)]
    assert len(problem.selection.all().columns[-1]) == 40
    assert not any(tuple(row.flatten().tolist()) in chosen for part in others for row in part.columns[0])
    assert held_out(plain).columns[0].equal(held_out(problem).columns[0])
    found = problem.measure(View(problem.start))
    assert {"selection_accuracy", "selection_loss", "test_accuracy"} <= found.keys()


def test_weight_within_groups_is_a_mean_and_a_least() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.3, 0.3, 0.4]])
    found = group_weights(weights, torch.tensor([0, 0, 1]))
    assert found["group_weight"] == pytest.approx((0.8 + 0.8 + 0.4) / 3)
    assert found["group_weight_least"] == pytest.approx(0.4)
