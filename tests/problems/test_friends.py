"""`friends`: who holds which digits, and whose labels are true."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.catalogue.friends import _derangement, friends
from coterie.problems.data.digits import digits
from coterie.problems.weighting import Weighting


def names(x: Tensor) -> list[bytes]:
    """Images as bytes: no two digits with different labels are alike."""
    return [row.numpy().tobytes() for row in x]


@pytest.fixture(scope="module")
def truth() -> dict[bytes, int]:
    images = digits()
    return dict(zip(names(images.x), images.y.tolist(), strict=True))


@pytest.fixture(scope="module")
def problem() -> Weighting:
    return friends(Context(seed=3))


def labels_by_truth(problem: Weighting, client: int, truth: dict[bytes, int]) -> list[tuple[int, int]]:
    """(true label, label that the client has) of every row."""
    batch = problem.train.client(client).all()
    return list(zip((truth[name] for name in names(batch.inputs)), batch.labels.tolist(), strict=True))


def test_sizes(problem):
    assert (problem.clients, problem.friends) == (15, 5)
    assert problem.train.counts.tolist() == [(1797 - 460) // 15] * 15
    assert (problem.target.valid.capacity, problem.test.capacity) == (60, 400)
    assert problem.train.columns[0].shape[1:] == (1, 8, 8)
    small = friends(Context(), clients=4, friends=4, validation=10, test=1000, model="logistic")
    assert (small.train.counts.tolist(), small.target.valid.capacity, small.test.capacity) == ([196] * 4, 10, 1000)


def test_friends_and_target_have_true_labels(problem, truth):
    for client in range(5):
        assert all(true == label for true, label in labels_by_truth(problem, client, truth))
    for rows in (problem.target.valid, problem.test):
        assert [truth[name] for name in names(rows.all().inputs)] == rows.all().labels.tolist()


def test_strangers_see_one_permutation_without_a_fixed_point(problem, truth):
    pairs = {pair for client in range(5, 15) for pair in labels_by_truth(problem, client, truth)}
    wrong = dict(pairs)
    assert len(pairs) == len(wrong) == len(set(wrong.values())) == 10
    assert all(true != label for true, label in pairs)


@pytest.mark.parametrize("seed", range(20))
def test_a_derangement_moves_everything(seed):
    moved = _derangement(Draw.of(seed), 10)
    assert sorted(moved.tolist()) == list(range(10))
    assert (moved != torch.arange(10)).all()


def test_no_row_is_used_twice(problem):
    parts = (problem.train.columns[0], problem.target.valid.all().inputs, problem.test.all().inputs)
    used = Counter(names(torch.cat(parts)))
    assert used.total() == 60 + 400 + 15 * 89
    assert used <= Counter(names(digits().x))


def test_the_seed_decides():
    same, again, other = (friends(Context(seed)) for seed in (0, 0, 1))
    assert torch.equal(same.train.columns[0], again.train.columns[0])
    assert torch.equal(same.start, again.start)
    assert not torch.equal(same.train.columns[0], other.train.columns[0])
    assert not torch.equal(same.start, other.start)


def test_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    friends(Context())
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": 3, "friends": 4}, "friends is 4, but there are only 3 clients"),
        ({"test": 1800}, "leave 0 for 15 clients. Lower problem.validation, problem.test or problem.clients"),
        ({"clients": 669, "friends": 1}, "leave 1337 for 669 clients"),
        ({"model": "logistics"}, "unknown model 'logistics'; did you mean logistic"),
    ],
)
def test_impossible_sizes_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        friends(Context(), **settings)
