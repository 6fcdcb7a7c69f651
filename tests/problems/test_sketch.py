"""The problem `sketch`, its partition by classes and its network."""

import pytest
import torch

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.catalogue.sketch import sketch
from coterie.problems.data.partition import partition
from coterie.problems.models import FlatModel, build


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [((1, 28, 28), 24_234), ((3, 32, 32), 97_866), ((1, 8, 8), 23_274)],
)
def test_the_network_has_the_papers_layers(shape, parameters):
    """32 kernels, 64 for colour: 320 + 9248 + 9248 + 4128 and the linear layer, or about 10⁵ for CIFAR-10."""
    net = build("conv4", shape, 10, 0)
    assert FlatModel(net).size == parameters
    assert [tuple(m.kernel_size) for m in net if isinstance(m, torch.nn.Conv2d)] == [(3, 3)] * 3 + [(2, 2)]
    assert net(torch.zeros(2, *shape)).shape == (2, 10)


def test_every_client_has_exactly_two_classes_and_equally_many_rows():
    problem = sketch(Context(0), model="logistic", partition="classes")
    labels = [problem.train.client(k).all().labels for k in range(10)]
    assert all(len(rows.unique()) == 2 for rows in labels)
    assert len({len(rows) for rows in labels}) == 1
    assert set(torch.cat(labels).tolist()) == set(range(10))
    counts = {int(c): sum(int(c) in rows for rows in labels) for c in range(10)}
    assert set(counts.values()) == {2}


def test_no_row_is_dealt_twice_and_the_seed_decides():
    labels = Draw.of(0).integers(7, 1000)
    one, two, other = (partition("classes", labels, 9, 3, Draw.of(seed)) for seed in (0, 0, 1))
    everything = torch.cat(one)
    assert len(everything.unique()) == len(everything)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_iid_clients_have_all_classes():
    problem = sketch(Context(0), model="logistic")
    assert all(len(problem.train.client(k).all().labels.unique()) == 10 for k in range(10))
    assert problem.offers >= {"gradient"}
    assert "target" not in problem.offers


def test_pixels_are_standardised():
    problem = sketch(Context(0), model="logistic")
    x = problem.train.columns[0]
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.std()) - 1.0) < 0.01


def test_more_classes_than_there_are_is_refused():
    with pytest.raises(UsageError, match=r"there are 10 classes, not 11; lower problem\.classes"):
        sketch(Context(0), partition="classes", classes=11)


def test_too_many_clients_are_refused():
    with pytest.raises(UsageError, match=r"cannot be dealt to .* holders of one class"):
        sketch(Context(0), partition="classes", clients=900)
