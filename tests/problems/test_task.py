"""Losses by row, means over all rows, measures, and the checks of a weighting problem."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from coterie.errors import UsageError
from coterie.federation import pack
from coterie.numerics import Draw
from coterie.problems import weighting
from coterie.problems.models import FlatModel
from coterie.problems.tasks.supervised import Supervised, cross_entropy, squared

WIDE = torch.float64
X, Y = Draw.of(0).normal(10, 4), torch.arange(10) % 3


def linear(outputs: int = 3) -> FlatModel:
    return FlatModel(nn.Linear(4, outputs))


def task_of(loss: str = "cross_entropy", outputs: int = 3, **more) -> Supervised:
    return Supervised.of(linear(outputs), loss, **more)


def test_losses_by_row():
    out = torch.tensor([[0.0, 0.0], [1.0, -1.0]])
    found = cross_entropy(out, torch.tensor([0, 1]))
    torch.testing.assert_close(found, torch.tensor([2.0, 1.0 + torch.e**2]).log())
    assert squared(out, torch.tensor([[2.0, 0.0], [1.0, 3.0]])).tolist() == [2.0, 8.0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_class_numbers_may_have_any_width(dtype):
    out = Draw.of(1).normal(10, 3)
    assert torch.equal(cross_entropy(out, Y.to(dtype)), cross_entropy(out, Y))


@pytest.mark.parametrize("shape", [(10,), (10, 1)])
@pytest.mark.parametrize("labels", [Y, Y.double(), Y[:, None]], ids=["whole", "wide", "column"])
def test_a_single_output_fits_labels_in_a_row_or_a_column(shape, labels):
    out = torch.ones(shape)
    losses = squared(out, labels)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, 0.5 * (1.0 - Y.float()).square())


def test_an_unknown_loss_names_the_nearest():
    with pytest.raises(UsageError, match="unknown loss 'cross-entropy'; did you mean cross_entropy"):
        task_of("cross-entropy")


@pytest.mark.parametrize("block", [1, 3, 10, 4096])
def test_full_oracles_are_means_over_all_rows(block):
    narrow = task_of(l2=0.1)
    task = replace(narrow, block=block, model=narrow.model.to(dtype=WIDE, device="cpu"))
    rows = pack([(X.double(), Y)]).client(0)
    theta, v = Draw.of(1).normal(15, dtype=WIDE), Draw.of(2).normal(15, dtype=WIDE)
    torch.testing.assert_close(task.full_loss(theta, rows), task.loss(theta, rows.all()))
    torch.testing.assert_close(task.full_gradient(theta, rows), task.gradient(theta, rows.all()))
    torch.testing.assert_close(task.full_hvp(theta, v, rows), task.hvp(theta, v, rows.all()))


def test_batch_norm_takes_a_shard_as_one_batch():
    net = FlatModel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    task, rows = replace(Supervised.of(net, "cross_entropy", classes=3), block=3), pack([(X, Y)]).client(0)
    whole = task.loss(net.start, rows.all())
    torch.testing.assert_close(task.full_loss(net.start, rows), whole)
    assert task.measure(net.start, rows, "test")["test_loss"] == pytest.approx(whole.item(), abs=1e-6)


@pytest.mark.parametrize("block", [1, 4, 4096])
def test_measures(block):
    task = replace(task_of(l2=10.0, classes=3), block=block)
    theta = task.model.start
    measures = task.measure(theta, pack([(X, Y)]).client(0), "validation")
    out = task.model(theta, X)
    assert measures == {
        "validation_loss": pytest.approx(cross_entropy(out, Y).mean().item(), abs=1e-6),  # of the data: without l2
        "validation_accuracy": pytest.approx((out.argmax(1) == Y).double().mean().item()),
    }


def test_accuracy_is_for_classes_only():
    rows = pack([(X, Y.float())]).client(0)
    assert set(task_of("squared", 1).measure(torch.zeros(5), rows, "test")) == {"test_loss"}


def test_the_footprint_follows_what_is_held_at_once():
    rows = pack([(X, Y)]).client(0)
    task = replace(task_of(), block=1000)
    at_10, at_20, at_block = (task.footprint(rows, n) for n in (10, 20, 1000))
    per_row = (at_20 - at_10) / 10
    assert per_row > 4 * X.element_size() + Y.element_size()
    assert at_10 - 10 * per_row >= 2 * task.model.size * 4
    assert task.footprint(rows, 10**6) == at_block


# the weighting problem


def problem(shards=((X, Y), (X, Y)), target=(X, Y), model: FlatModel | None = None, loss="cross_entropy", **more):
    return weighting(shards, target, model or linear(), loss, **more)


def test_a_weighting_problem():
    made = problem(test=(X[:4], Y[:4]), friends=1, dtype=WIDE)
    assert (made.clients, made.friends, made.task.classes, made.start.dtype) == (2, 1, 3, WIDE)
    assert made.offers == {"classes", "gradient", "hvp", "target", "friends"}
    assert made.target.train is None
    assert torch.equal(made.target.valid.all().inputs, X.double())
    assert made.test.capacity == 4
    assert problem(target=None).offers == {"classes", "gradient", "hvp"}


def test_a_loss_of_ones_own_may_be_anything_that_can_be_called():
    def shrunk(outputs: Tensor, labels: Tensor, by: float) -> Tensor:
        return by * cross_entropy(outputs, labels)

    for loss in (partial(shrunk, by=0.5), nn.CrossEntropyLoss(reduction="none")):
        made = problem(loss=loss)
        assert made.task.classes == 3  # the labels are class numbers, so there is an accuracy
        assert torch.isfinite(made.task.full_loss(made.start, made.target.valid))


def test_a_model_without_a_last_dimension():
    made = problem([(X, X[:, 0])], (X, X[:, 0]), FlatModel(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))), "squared")
    assert made.task.full_gradient(made.start, made.train.client(0)).shape == (5,)


TOKENS = FlatModel(nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(8, 3)))
REFUSED = {
    "model and inputs": ({"model": FlatModel(nn.Linear(7, 3))}, r"does not take inputs of shape \(2, 4\)"),
    "tokens beyond the table": (
        {"shards": [(torch.full((4, 4), 5), Y[:4])], "target": None, "model": TOKENS},
        r"does not take inputs of shape \(2, 4\): index out of range",
    ),
    "target's shape": ({"target": (X[:, :2], Y)}, r"rows of the target have shape \(2,\), those of the clients \(4,\)"),
    "test's shape": ({"test": (X[:, :2], Y)}, r"rows of the test set have shape \(2,\)"),
    "clients' labels": ({"shards": [(X, Y + 1)]}, "the clients has labels from 1 to 3, but the model has 3 outputs"),
    "target's labels": ({"target": (X, Y - 1)}, "the target has labels from -1 to 1"),
    "real labels": ({"shards": [(X, Y.float())]}, "the labels of the clients are torch.float32"),
    "empty target": ({"target": (X[:0], Y[:0])}, "target 0 is empty"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_misfits_are_explained(change, message):
    with pytest.raises(UsageError, match=message):
        problem(**change)
