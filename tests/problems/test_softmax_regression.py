"""Softmax regression: derivatives written down are those of the loss."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import vmap

from coterie.federation import Batch, pack
from coterie.numerics import Draw
from coterie.numerics.derivatives import hessian_vector, native_gradient, native_hessian_vector
from coterie.problems.models import FlatModel, build
from coterie.problems.tasks.supervised import Supervised, cross_entropy

WIDE = torch.float64


def example(weighted: bool) -> tuple[Supervised, Supervised, torch.Tensor, torch.Tensor, Batch]:
    """The task, the same without the shortcut, a point, a direction, and a batch."""
    model = FlatModel(build("logistic", (1, 3, 2), 4, seed=0)).to(dtype=WIDE, device="cpu")
    task = Supervised.of(model, "cross_entropy", l2=0.1, classes=4)
    theta, v = (Draw.of(seed).normal(model.size, dtype=WIDE) for seed in (1, 2))
    x, y = Draw.of(3).normal(5, 1, 3, 2, dtype=WIDE), Draw.of(4).integers(4, 5)
    weight = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0], dtype=WIDE) if weighted else None
    other = replace(task, loss_by_row=lambda outputs, labels: cross_entropy(outputs, labels))
    return task, other, theta, v, Batch((x, y), weight)


@pytest.mark.parametrize("weighted", [False, True])
def test_derivatives_are_those_of_the_loss(weighted):
    task, other, theta, v, batch = example(weighted)
    assert task.softmax_regression
    assert not other.softmax_regression
    torch.testing.assert_close(task.gradient(theta, batch), other.gradient(theta, batch), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(task.hvp(theta, v, batch), other.hvp(theta, v, batch), rtol=1e-12, atol=1e-12)


def test_also_for_many_models_at_once():
    task, other, theta, v, batch = example(False)
    many = torch.stack([theta, v, theta + v])
    for one in (lambda t: task.gradient(t, batch), lambda t: task.hvp(t, v, batch)):
        torch.testing.assert_close(vmap(one)(many), torch.stack([one(t) for t in many]), rtol=1e-12, atol=1e-12)
    slope = torch.func.grad(lambda t: task.gradient(t, batch) @ v)(theta)  # it can be differentiated once more
    torch.testing.assert_close(slope, other.hvp(theta, v, batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("net", "linear"),
    [
        (nn.Linear(3, 2), True),
        (nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), True),
        (nn.Linear(3, 2, bias=False), False),
        (nn.Sequential(nn.Linear(3, 2), nn.ReLU()), False),
        (nn.Sequential(nn.Flatten(), nn.Linear(3, 3), nn.Linear(3, 2)), False),
        (nn.Sequential(nn.Flatten(2), nn.Linear(3, 2)), False),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), False),
    ],
)
def test_what_counts_as_linear(net, linear):
    assert FlatModel(net).linear is linear


def test_native_derivatives_are_those_of_torch_func():
    theta, v = (Draw.of(seed).normal(6, dtype=WIDE) for seed in (1, 2))

    def loss(t: torch.Tensor) -> torch.Tensor:
        return (t[:3].exp() * t[3:].sin()).sum()

    with torch.no_grad():
        torch.testing.assert_close(native_gradient(loss, theta), torch.func.grad(loss)(theta))
        torch.testing.assert_close(native_hessian_vector(loss, theta, v), hessian_vector(loss, theta, v))
    assert torch.equal(native_hessian_vector(torch.sum, theta, v), torch.zeros(6, dtype=WIDE))


@pytest.mark.parametrize("model", ["logistic", "mlp"])
@pytest.mark.parametrize("block", [4096, 3])
def test_loss_and_gradient_have_the_bits_of_each(model, block, monkeypatch):
    flat = FlatModel(build(model, (1, 3, 2), 4, seed=0))
    task = replace(Supervised.of(flat, "cross_entropy", l2=0.1, classes=4), block=block)
    shards = [(Draw.of(k).normal(8 - k, 1, 3, 2), Draw.of(k).integers(4, 8 - k)) for k in range(2)]
    stack = pack(shards)
    both = [task.full_loss_and_gradient(flat.start, stack.client(k)) for k in range(2)]
    for k, (loss, slope) in enumerate(both):
        assert torch.equal(loss, task.full_loss(flat.start, stack.client(k)))
        assert torch.equal(slope, task.full_gradient(flat.start, stack.client(k)))
        assert not loss.requires_grad
    calls = []
    call = FlatModel.__call__
    monkeypatch.setattr(FlatModel, "__call__", lambda self, *args: calls.append(1) or call(self, *args))
    task.full_loss_and_gradient(flat.start, stack.client(0))
    assert len(calls) == -(-8 // block), "one pass over each block"
