"""`dirichlet`: rows are dealt once, every client tests on its own, and the partition is PFLlib's."""

import numpy as np
import pytest
import torch

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems import Context, Weighting
from coterie.problems.catalogue.dirichlet import dirichlet
from coterie.problems.data.digits import digits
from coterie.problems.data.partition import apportioned, partition
from coterie.problems.data.partition import dirichlet as dealt
from coterie.problems.models import FlatModel, build

LABELS = torch.arange(1000) % 10


@pytest.fixture(scope="module")
def problem() -> Weighting:
    return dirichlet(Context(0, torch.float64), clients=8, alpha=0.1)


def test_every_row_is_train_validation_or_test_of_one_client(problem: Weighting) -> None:
    assert problem.valid is not None
    assert problem.tests is not None
    counts = [stack.counts for stack in (problem.train, problem.valid, problem.tests)]
    assert int(sum(counts).sum()) == len(digits().y)
    for train, valid, test in zip(*counts, strict=True):
        rows = int(train + valid + test)
        assert rows >= 20
        assert abs(int(test) - 0.25 * rows) <= 1
        assert abs(int(valid) - 0.2 * (rows - int(test))) <= 1
    pixels = torch.cat([stack.columns[0].flatten(1) for stack in (problem.train, problem.valid, problem.tests)])
    assert float(pixels.min()) == -1.0
    assert float(pixels.max()) == 1.0
    published = digits().x.flatten(1).double()
    ordered = (
        np.unique(t.numpy(), axis=0, return_counts=True) for t in ((pixels + 1) / 2, published / published.max())
    )
    (one, often), (two, wanted) = ordered
    np.testing.assert_allclose(one, two, atol=1e-6)
    assert often.tolist() == wanted.tolist()


def test_the_target_is_a_client(problem: Weighting) -> None:
    third = dirichlet(Context(0, torch.float64), clients=8, alpha=0.1, target=2)
    assert third.target is not None
    assert third.valid is not None
    assert torch.equal(third.target.valid.all().inputs, third.valid.client(2).all().inputs)
    assert {"everyone", "target", "gradient"} <= third.offers
    assert "friends" not in third.offers
    with pytest.raises(UsageError, match=r"problem\.target is 9"):
        dirichlet(Context(0), clients=8, target=9)


def test_clients_test_on_the_classes_that_they_train_on(problem: Weighting) -> None:
    assert problem.tests is not None
    for k in range(8):
        train, test = (torch.bincount(s.client(k).all().labels, minlength=10) for s in (problem.train, problem.tests))
        shares = train / train.sum(), test / test.sum()
        assert float((shares[0] - shares[1]).abs().sum()) < 0.5
        assert len(train.nonzero()) < 8


def test_capped_shares_are_pfllibs() -> None:
    """An independent version: class after class, proportions without those who have their share already."""
    from coterie.problems.data.partition import _proportions

    draw = Draw.of(5).phase("dirichlet")
    shares = _proportions(10, 6, 0.3, draw.phase("shares")).numpy()
    sizes = np.zeros(6)
    for c in range(10):
        p = shares[c] * (sizes < 1000 / 6)
        sizes += apportioned(100, torch.from_numpy(p / p.sum()))
    parts = dealt(LABELS, 6, 0.3, draw, capped=True)
    assert [len(part) for part in parts] == sizes.tolist()
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000))
    assert max(sizes) < 1000 / 6 + 100  # one more class than the even share at most
    free = [len(part) for part in partition("dirichlet", LABELS, 6, 2, Draw.of(5), 0.3)]
    assert sum(free) == 1000


def test_a_partition_that_cannot_be_is_explained() -> None:
    with pytest.raises(UsageError, match=r"do not give 20 clients problem\.least = 100 each"):
        dirichlet(Context(0), least=100)
    with pytest.raises(UsageError, match="none of 100 partitions"):
        dirichlet(Context(0), least=80, alpha=0.01)


def test_pfllibs_network_has_its_size() -> None:
    """Two convolutions of 5 × 5, 1024 → 512 → 10: 582,026 parameters on 28 × 28 images."""
    net = FlatModel(build("wide-cnn", (1, 28, 28), 10, 0))
    assert net.size == 32 * 26 + 64 * (32 * 25 + 1) + 512 * 1025 + 10 * 513 == 582_026
    assert net(net.start, torch.zeros(2, 1, 28, 28)).shape == (2, 10)
