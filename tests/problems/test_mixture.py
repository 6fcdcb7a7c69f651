"""`mixture`: who holds which classes, what the target is judged on, and that mirror descent finds the friends."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_data import EKMAN, EMOTIONS, write_cifar_binary, write_goemotions
from torch import Tensor

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import Result, run_rounds
from coterie.federation import Batch
from coterie.problems import Context, Weighting
from coterie.problems.catalogue import mixture as module
from coterie.problems.catalogue.mixture import FAR, HOME, NEAR, PLANS, mixture
from coterie.problems.catalogue.registry import problem_entry
from coterie.problems.data import sets

SEED = Context(seed=3)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "home"))
    monkeypatch.setattr(sets, "user_cache_path", lambda _: tmp_path / "cache")
    return tmp_path / "home"


def shard(problem: Weighting, k: int) -> Batch:
    return problem.train.client(k).all()


def labels(problem: Weighting, k: int) -> set[int]:
    return set(shard(problem, k).labels.tolist())


def goal(problem: Weighting) -> Batch:
    assert problem.target is not None
    assert problem.target.valid is not None
    return problem.target.valid.all()


def held_out(problem: Weighting) -> Batch:
    assert problem.test is not None
    return problem.test.all()


def fingerprints(x: Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in x]


def run(method: str, rounds: int, **settings: Any) -> Result:
    flags = {"run.method": method, "run.problem": "mixture", "run.rounds": rounds, "run.record": rounds}
    sets = {"run.baselines": [], "federation.mode": "vmap", **settings}
    return run_rounds(assemble(load(sets=sets, flags=flags)), None)


# ---------------------------------------------------------------- who holds what


def test_the_target_comes_first_then_its_friends_then_strangers() -> None:
    problem = mixture(SEED)
    plan = PLANS["digits"]
    assert (problem.clients, problem.friends) == (plan.clients, plan.friends)
    assert problem.train.counts.tolist() == [plan.rows] * plan.clients
    assert labels(problem, 0) == set(HOME)
    for k in range(1, plan.friends):
        assert labels(problem, k) <= {*HOME, *NEAR}
        assert labels(problem, k) & set(HOME)
    for k in range(plan.friends, plan.clients):
        assert labels(problem, k) <= set(FAR[0])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.7, 1.0])
def test_friends_hold_exactly_their_share_of_the_targets_classes(share: float) -> None:
    problem = mixture(SEED, share=share, rows=20)
    for k in range(1, 5):
        mine = torch.isin(shard(problem, k).labels, torch.tensor(HOME))
        assert int(mine.sum()) == round(20 * share)


def test_the_shares_of_classes_are_those_of_the_data() -> None:
    problem = mixture(SEED, rows=200, clients=2, friends=1)
    counts = torch.bincount(shard(problem, 0).labels, minlength=10)
    assert counts[:3].tolist() == pytest.approx([67, 67, 67], abs=15)


def test_no_two_holders_share_a_row() -> None:
    problem = mixture(SEED)
    everything = torch.cat([problem.train.columns[0], goal(problem).inputs, held_out(problem).inputs])
    doubles = sum(count - 1 for count in Counter(fingerprints(everything)).values())
    # scikit-learn's digits hold no image twice, so neither may we
    assert doubles == 0


def test_the_target_is_judged_on_its_own_classes() -> None:
    problem = mixture(SEED)
    assert torch.bincount(goal(problem).labels).tolist() == [20, 20, 20]
    assert set(held_out(problem).labels.tolist()) == set(HOME)
    assert len(held_out(problem).labels) > 150
    assert {"target", "friends", "gradient", "hvp"} <= problem.offers


def test_the_targets_training_rows_are_those_of_client_0() -> None:
    for validation in (0, 5):
        target = mixture(SEED, validation=validation).target
        assert target is not None
        assert target.train is not None
        assert torch.equal(target.train.all().inputs, shard(mixture(SEED), 0).inputs)


def test_without_validation_the_goal_is_the_targets_training_loss() -> None:
    extra, plain = mixture(SEED), mixture(SEED, validation=0)
    assert plain.target is not None
    assert plain.target.valid is None
    assert "target" in plain.offers
    assert len(held_out(plain).labels) == len(held_out(extra).labels) + 60
    assert torch.equal(plain.train.columns[0], extra.train.columns[0])
    one, other = (run("meritfed", 1, **{"problem.validation": 0, "method.data": d}) for d in ("validation", "train"))
    assert torch.equal(one.view.model, other.view.model)
    assert "validation_loss" not in one.history[-1]


def test_pixels_are_standardised_by_the_training_part() -> None:
    """Over all digits, pixels in [0, 1] have mean .305 and deviation .376; a half of them is near that."""
    x = mixture(SEED).train.columns[0]
    assert float(x.min()) == pytest.approx(-0.305 / 0.376, abs=0.02)
    assert float(x.max()) == pytest.approx((1 - 0.305) / 0.376, abs=0.03)


def test_the_seed_decides_and_the_dtype_is_kept() -> None:
    first, again, other = mixture(Context(0)), mixture(Context(0)), mixture(Context(1))
    assert torch.equal(first.train.columns[0], again.train.columns[0])
    assert not torch.equal(first.train.columns[0], other.train.columns[0])
    wide = mixture(Context(0, torch.float64))
    assert wide.train.columns[0].dtype == wide.start.dtype == torch.float64


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"friends": 13}, r"problem\.friends is 13, but there are only 12 clients"),
        ({"rows": 300}, r"client 0 of 12 finds \d+ rows of its classes left, not problem\.rows = 300"),
        ({"rows": 90}, r"client 3 of 12 finds"),
        ({"clients": 30}, r"client \d+ of 30 finds \d+ rows of its classes left"),
        ({"validation": 500}, r"class 0 has \d+ test rows; problem\.validation = 500 leaves none to test on"),
        ({"encoder": "bert"}, r"are for texts, and digits are images; use problem\.data=goemotions"),
        ({"fine_tune": True}, r"problem\.lora are for texts"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        mixture(SEED, **settings)


@pytest.mark.parametrize(
    ("key", "value"), [("share", 0.0), ("share", 1.5), ("rows", 0), ("validation", -1), ("data", "mnist")]
)
def test_settings_have_bounds(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"problem\.{key} = "):
        load(sets={f"problem.{key}": value}, flags={"run.problem": "mixture"})


def test_a_few_clients_are_all_friends() -> None:
    assert mixture(SEED, clients=3).friends == 3
    assert mixture(SEED, clients=1).clients == 1


# ---------------------------------------------------------------- what methods make of it


def test_mirror_descent_finds_the_friends_and_beats_everybody_and_nobody() -> None:
    """The paper's claim in small: better than SGD-Full, better than the target alone, near those who know."""
    settings = {"method.batch": 20, "method.step": 0.1}
    found, everybody, friends = (run(m, 100, **settings) for m in ("meritfed", "sgd-full", "sgd-ideal"))
    alone = run("local-train", 100, **settings, **{"method.local_steps": 1})
    loss = {r.summary["method"]: r.history[-1]["test_loss"] for r in (found, everybody, friends, alone)}
    assert found.history[-1]["friends_weight"] > 0.98
    assert loss["meritfed"] < 0.7 * loss["local-train"]
    assert loss["meritfed"] < 0.5 * loss["sgd-full"]
    assert loss["meritfed"] < 1.5 * loss["sgd-ideal"]


def test_all_weight_on_client_0_is_training_alone() -> None:
    """A reduction: with one client, MeritFed and SGD-Full are full-batch descent on the target's shard."""
    settings = {"problem.clients": 1, "method.batch": "all", "method.step": 0.1}
    alone = run("local-train", 5, **settings, **{"method.local_steps": 1})
    for method in ("meritfed", "sgd-full", "sgd-ideal"):
        torch.testing.assert_close(run(method, 5, **settings).view.model, alone.view.model)


def test_it_is_registered_with_settings_that_exist() -> None:
    entry = problem_entry("mixture")
    assert entry.make is mixture
    for method in entry.tuned:
        load(flags={"run.method": method, "run.problem": "mixture"})


# ---------------------------------------------------------------- CIFAR-10 and GoEmotions, in small


def test_it_runs_on_cifar(home: Path) -> None:
    write_cifar_binary(home / "cifar10", 100)
    problem = mixture(SEED, data="cifar10", clients=4, friends=2, rows=20, validation=3)
    assert problem.train.columns[0].shape == (80, 3, 32, 32)
    assert problem.task.model.size == 122_570
    assert labels(problem, 3) <= {6, 7, 8, 9}
    assert len(held_out(problem).labels) == 30 - 9
    mean = problem.train.columns[0].mean((0, 2, 3))
    torch.testing.assert_close(mean, torch.zeros(3), atol=0.05, rtol=0.0)


@pytest.mark.parametrize("model", ["resnet18-narrow", "small-cnn"])
def test_networks_for_it_take_a_step(home: Path, model: str) -> None:
    write_cifar_binary(home / "cifar10", 40)
    sizes = {"problem.clients": 3, "problem.friends": 2, "problem.rows": 6, "problem.validation": 1}
    result = run("meritfed", 1, **sizes, **{"problem.data": "cifar10", "problem.model": model, "method.batch": 4})
    assert result.summary["outcome"] == "finished"
    assert bool(torch.isfinite(result.view.model).all())


class Marking:
    """Stands for an encoder: a text's features are its place in the list."""

    width = 2

    def embed(self, texts: list[str], tokens: int) -> Tensor:
        self.texts = texts
        place = torch.arange(len(texts), dtype=torch.float32)
        return torch.stack([place, torch.ones(len(texts))], dim=1)


@pytest.fixture
def marking(home: Path, monkeypatch: pytest.MonkeyPatch) -> Marking:
    encoder = Marking()
    monkeypatch.setattr(module, "open_encoder", lambda name: encoder)
    write_goemotions(home / "goemotions", 12)
    return encoder


def emotions_of(problem: Weighting, k: int) -> list[str]:
    return [EMOTIONS[i] for i in shard(problem, k).labels.tolist()]


def group_of(problem: Weighting, k: int) -> str:
    """The Ekman group of a stranger."""
    return next(group for group, members in EKMAN.items() if emotions_of(problem, k)[0] in members)


TURN = ["anger", "disgust", "fear", "sadness", "surprise"]


def test_emotions_go_to_target_friends_and_strangers(marking: Marking) -> None:
    problem = mixture(SEED, data="goemotions", share=0.5, clients=10, friends=2, rows=12)
    assert set(emotions_of(problem, 0)) <= set(EKMAN["joy"])
    assert emotions_of(problem, 1).count("neutral") == 6
    assert set(emotions_of(problem, 1)) <= {*EKMAN["joy"], "neutral"}
    for k in range(2, 10):
        assert set(emotions_of(problem, k)) <= set(EKMAN[group_of(problem, k)])
    # an Ekman group each, in turn; the 12 rows of disgust are dealt at once, so its second turn falls to fear
    assert [group_of(problem, k) for k in range(2, 10)] == [*TURN, "anger", "fear", "sadness"]


def test_neutral_fills_up_strangers(marking: Marking) -> None:
    problem = mixture(SEED, data="goemotions", share=1.0, clients=8, friends=1, rows=10)
    assert [group_of(problem, k) for k in range(1, 8)] == [*TURN, "anger", "disgust"]
    assert Counter(emotions_of(problem, 7)) == {"disgust": 2, "neutral": 8}
    # all 180 rows of the five groups go to fifteen strangers; what is left for the sixteenth is neutral
    problem = mixture(SEED, data="goemotions", clients=17, friends=1, rows=12)
    assert "neutral" not in {emotion for k in range(16) for emotion in emotions_of(problem, k)}
    assert emotions_of(problem, 16) == ["neutral"] * 12


def test_rows_keep_their_texts(marking: Marking) -> None:
    problem = mixture(SEED, data="goemotions", share=0.5, clients=4, friends=2, rows=10)
    for batch, part in ((problem.train, "train"), (goal(problem), "dev"), (held_out(problem), "test")):
        inputs, numbers = batch.columns
        for place, label in zip(inputs[:, 0].tolist(), numbers.tolist(), strict=True):
            assert marking.texts[int(place)].startswith(f"{EMOTIONS[label]} ")
            assert marking.texts[int(place)].endswith(part)
    assert {EMOTIONS[i] for i in goal(problem).labels.tolist()} == set(EKMAN["joy"])
    assert {EMOTIONS[i] for i in held_out(problem).labels.tolist()} == set(EKMAN["joy"])
    assert problem.task.model.size == 3 * 28


def test_validation_of_emotions_is_cut_by_class(marking: Marking) -> None:
    assert len(goal(mixture(SEED, data="goemotions", clients=2, rows=5)).labels) == 24
    assert len(goal(mixture(SEED, data="goemotions", clients=2, rows=5, validation=1)).labels) == 12
    plain = mixture(SEED, data="goemotions", clients=2, rows=5, validation=0).target
    assert plain is not None
    assert plain.valid is None


# ---------------------------------------------------------------- the real thing


@pytest.mark.data
def test_the_papers_sizes_on_cifar() -> None:
    if sets.complete(sets.known("cifar10")) is None:
        pytest.skip(f"cifar10 is not in {' or '.join(str(place) for place in sets.places())}")
    problem = mixture(SEED, data="cifar10", share=0.5)
    assert problem.train.counts.tolist() == [750] * 20
    assert torch.bincount(goal(problem).labels).tolist() == [300] * 3
    assert torch.bincount(held_out(problem).labels).tolist() == [700] * 3
    assert [int((shard(problem, k).labels < 3).sum()) for k in range(20)] == [750] + [375] * 10 + [0] * 9


@pytest.mark.data
def test_the_papers_sizes_on_goemotions(monkeypatch: pytest.MonkeyPatch) -> None:
    if sets.complete(sets.known("goemotions")) is None:
        pytest.skip(f"goemotions is not in {' or '.join(str(place) for place in sets.places())}")
    monkeypatch.setattr(module, "open_encoder", lambda name: Marking())
    problem = mixture(SEED, data="goemotions", share=0.5)
    assert problem.train.counts.tolist() == [1000] * 20
    assert (len(goal(problem).labels), len(held_out(problem).labels)) == (1668, 1603)
    counts = [torch.bincount(shard(problem, k).labels, minlength=28) for k in range(20)]
    assert [int(c[27]) for c in counts[1:11]] == [500] * 10
    # the authors' code has three strangers of anger, one of disgust and fear, two of sadness and of surprise
    alphabetical = [2, 11, 14, 25, 26, 2, 25, 26, 2]
    assert all(int(c[emotion]) > 0 for c, emotion in zip(counts[11:], alphabetical, strict=True))
    assert [1000 - int(c[27]) for c in counts[12:14]] == [498, 515]
