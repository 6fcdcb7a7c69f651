"""Perceptrons without a module around: outputs and gradients have the bits of the module and of autograd."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from coterie.federation import Batch
from coterie.numerics import Draw
from coterie.numerics.derivatives import gradient
from coterie.problems.models import FlatModel
from coterie.problems.models.perceptron import Perceptron
from coterie.problems.tasks.supervised import Supervised, cross_entropy

CLIENTS, ROWS = 3, 5


def network(*widths: int) -> nn.Sequential:
    """Flatten, then linear maps with rectified units between them; the start is drawn."""
    maps = [nn.Linear(a, b) for a, b in pairwise(widths)]
    for i, part in enumerate(maps):
        part.weight.data = Draw.of(i).normal(*part.weight.shape)
    parts = [layer for part in maps for layer in (part, nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *parts[:-1])


def example(dtype: torch.dtype, weighted: bool) -> tuple[Supervised, torch.Tensor, Batch]:
    """A task, one point per client, and one batch per client."""
    model = FlatModel(network(6, 7, 4, 3)).to(dtype=dtype, device="cpu")
    task = Supervised.of(model, "cross_entropy", l2=0.1, classes=3)
    thetas = model.start + Draw.of(1).normal(CLIENTS, model.size, dtype=dtype)
    x, y = Draw.of(2).normal(CLIENTS, ROWS, 2, 3, dtype=dtype), Draw.of(3).integers(3, CLIENTS * ROWS)
    weight = torch.tensor([[1.0, 0.0, 2.0, 1.0, 0.0]], dtype=dtype).expand(CLIENTS, -1) if weighted else None
    return task, thetas, Batch((x, y.view(CLIENTS, ROWS)), weight)


def one(batches: Batch, k: int) -> Batch:
    """The batch of client k."""
    weight = None if batches.weight is None else batches.weight[k]
    return Batch(tuple(column[k] for column in batches.columns), weight)


def by_autograd(task: Supervised, theta: torch.Tensor, batch: Batch) -> torch.Tensor:
    """∇L(θ) by a module and autograd, in the order of θ."""
    plain = replace(task, loss_by_row=lambda outputs, labels: cross_entropy(outputs, labels))
    plain.model.perceptron, known = None, plain.model.perceptron
    try:
        return gradient(lambda t: plain.loss(t, batch), theta)
    finally:
        plain.model.perceptron = known


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_have_the_bits_of_autograd(dtype, weighted):
    task, thetas, batches = example(dtype, weighted)
    assert task.model.perceptron is not None
    for k in range(CLIENTS):
        found, known = task.gradient(thetas[k], one(batches, k)), by_autograd(task, thetas[k], one(batches, k))
        assert torch.equal(found, known)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shared", ["nothing", "point", "rows"])
def test_also_for_many_clients_at_once(weighted, shared):
    task, thetas, batches = example(torch.float32, weighted)
    tensors = [*batches.columns, *([] if batches.weight is None else [batches.weight])]
    if shared == "rows":
        tensors = [tensor[0] for tensor in tensors]
    point = thetas[0] if shared == "point" else thetas

    def by(oracle):
        def at_client(theta, x, y, *weight):
            return oracle(theta, Batch((x, y), weight[0] if weight else None))

        dims = [None if shared == "point" else 0] + [None if shared == "rows" else 0] * len(tensors)
        return vmap(at_client, tuple(dims))(point, *tensors)

    assert torch.equal(by(task.gradient), by(lambda theta, batch: by_autograd(task, theta, batch)))


def test_outputs_are_those_of_the_module():
    task, thetas, batches = example(torch.float32, False)
    x = batches.inputs[0]
    known = functional_call(network(6, 7, 4, 3), task.model.unflatten(thetas[0]), (x,))
    assert torch.equal(task.model(thetas[0], x), known)


def test_where_something_differentiates_it_autograd_does_the_work():
    task, thetas, batches = example(torch.float64, True)
    theta, v, batch = thetas[0], thetas[1], one(batches, 0)
    slope = torch.func.grad(lambda t: task.gradient(t, batch) @ v)(theta)
    torch.testing.assert_close(slope, task.hvp(theta, v, batch), rtol=1e-12, atol=1e-12)
    leaf = theta.clone().requires_grad_()
    (again,) = torch.autograd.grad(task.gradient(leaf, batch) @ v, leaf)
    torch.testing.assert_close(again, slope, rtol=1e-12, atol=1e-12)

    def along(oracle):
        return torch.func.grad(lambda weight: oracle(theta, batch._replace(weight=weight)) @ v)(batch.weight)

    known = along(lambda theta, batch: by_autograd(task, theta, batch))
    torch.testing.assert_close(along(task.gradient), known, rtol=1e-12, atol=1e-12)
    assert known.abs().sum() > 0


def test_what_counts_as_a_perceptron():
    heard = network(6, 3, 2)
    heard[1].register_forward_hook(lambda *_: None)
    frozen = network(6, 3, 2)
    frozen[1].weight.requires_grad_(False)
    for module in (
        heard,
        frozen,
        nn.Sequential(nn.Linear(6, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(6, 3, bias=False), nn.ReLU(), nn.Linear(3, 2)),
        nn.Sequential(nn.Flatten(2), nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2)),
        nn.Sequential(),
        nn.Linear(6, 3),
    ):
        assert Perceptron.of(module) is None
    found = Perceptron.of(nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2)))
    assert found == Perceptron(((3, 6), (2, 3)), False)
    assert found.takes(torch.ones(4, 6))
    assert not found.takes(torch.ones(4, 5, 6))  # a linear map of the last dimension
    assert Perceptron.of(network(6, 3, 2)).takes(torch.ones(4, 2, 3))
