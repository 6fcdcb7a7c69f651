"""Derivatives against closed forms, autograd and finite differences, in float64."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from coterie.federation import Batch
from coterie.numerics import Draw
from coterie.numerics.derivatives import hessian_vector, mixed_vector
from coterie.problems.models import FlatModel
from coterie.problems.tasks.supervised import Supervised

WIDE = torch.float64
EPSILON = 1e-5


def normal(*shape: int, seed: int) -> Tensor:
    return Draw.of(seed).normal(*shape, dtype=WIDE)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> bool:
    return bool((found - expected).norm() <= tolerance * expected.norm())


def slope(f, x: Tensor, v: Tensor) -> Tensor:
    """The derivative of f at x along v, by central differences."""
    return (f(x + EPSILON * v) - f(x - EPSILON * v)) / (2 * EPSILON)


def by_coordinates(f, x: Tensor) -> Tensor:
    return torch.stack([slope(f, x, e) for e in torch.eye(len(x), dtype=WIDE)])


A = normal(4, 4, seed=0)
M = normal(4, 3, seed=1)


def outer(x: Tensor, y: Tensor) -> Tensor:
    """sin(x)ᵀ M y² + ¼ ‖x‖⁴ + ‖y‖²: its mixed derivative is diag(cos x) M diag(2y)."""
    return torch.sin(x) @ M @ y.square() + 0.25 * x.square().sum().square() + y.square().sum()


def test_hessian_vector_of_a_quartic():
    theta, v = normal(4, seed=2), normal(4, seed=3)

    def loss(t: Tensor) -> Tensor:
        return 0.5 * t @ A @ t + 0.25 * t.square().sum().square()

    hessian = 0.5 * (A + A.T) + theta.square().sum() * torch.eye(4, dtype=WIDE) + 2 * torch.outer(theta, theta)
    found = hessian_vector(loss, theta, v)
    assert close(found, hessian @ v, 1e-12)
    assert close(found, torch.autograd.functional.hessian(loss, theta) @ v, 1e-12)
    assert close(found, slope(torch.func.grad(loss), theta, v))


def test_mixed_vector_goes_from_y_to_x():
    x, y, v = normal(4, seed=4), normal(3, seed=5), normal(3, seed=6)
    found = mixed_vector(outer, x, y, v)
    assert found.shape == x.shape
    assert close(found, torch.cos(x) * (M @ (2 * y * v)), 1e-12)
    assert close(found, slope(lambda y_: torch.func.grad(outer)(x, y_), y, v))


def test_oracles_run_under_vmap():
    x, y, V = normal(4, seed=4), normal(3, seed=5), normal(7, 3, seed=6)
    rows = vmap(lambda v: mixed_vector(outer, x, y, v))(V)
    assert close(rows, torch.stack([mixed_vector(outer, x, y, v) for v in V]), 1e-12)
    products = vmap(lambda v: hessian_vector(lambda t: outer(x, t), y, v))(V)
    assert close(products, torch.stack([hessian_vector(lambda t: outer(x, t), y, v) for v in V]), 1e-12)


def task_of(net: nn.Module, loss: str, l2: float) -> Supervised:
    return Supervised.of(FlatModel(net).to(dtype=WIDE, device="cpu"), loss, l2=l2)


def classifier(l2: float = 0.0) -> tuple[Supervised, Tensor, Batch]:
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    task = task_of(net, "cross_entropy", l2)
    return task, 0.5 * normal(task.model.size, seed=7), Batch((normal(9, 5, seed=8), torch.arange(9) % 3))


@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_and_hessian_of_a_network(l2, weighted):
    task, theta, batch = classifier(l2)
    batch = Batch(batch.columns, torch.arange(9, dtype=WIDE) if weighted else None)
    v = normal(len(theta), seed=9)
    assert close(task.gradient(theta, batch), by_coordinates(lambda t: task.loss(t, batch), theta))
    assert close(task.hvp(theta, v, batch), slope(lambda t: task.gradient(t, batch), theta, v))
    hessian = torch.autograd.functional.hessian(lambda t: task.loss(t, batch), theta)
    assert close(task.hvp(theta, v, batch), hessian @ v, 1e-10)


def test_logistic_regression_in_closed_form():
    task = task_of(nn.Linear(5, 3, bias=False), "cross_entropy", 0.2)
    theta, v = normal(15, seed=1), normal(15, seed=2)
    x, y = normal(8, 5, seed=3), torch.arange(8) % 3
    p = torch.softmax(x @ theta.view(3, 5).T, 1)
    one_hot = nn.functional.one_hot(y, 3)
    gradient = ((p - one_hot).T @ x / 8).flatten() + 0.2 * theta
    assert close(task.gradient(theta, Batch((x, y))), gradient, 1e-12)
    u = x @ v.view(3, 5).T
    curved = p * (u - (p * u).sum(1, keepdim=True))
    assert close(task.hvp(theta, v, Batch((x, y))), (curved.T @ x / 8).flatten() + 0.2 * v, 1e-12)


def test_linear_regression_in_closed_form():
    task = task_of(nn.Linear(5, 1, bias=False), "squared", 0.2)
    theta, v, x, y = normal(5, seed=1), normal(5, seed=2), normal(8, 5, seed=3), normal(8, seed=4)
    batch = Batch((x, y))
    assert close(task.loss(theta, batch), 0.5 * (x @ theta - y).square().mean() + 0.1 * theta @ theta, 1e-12)
    assert close(task.gradient(theta, batch), x.T @ (x @ theta - y) / 8 + 0.2 * theta, 1e-12)
    assert close(task.hvp(theta, v, batch), x.T @ x @ v / 8 + 0.2 * v, 1e-12)


def test_rows_of_weight_zero_do_not_count():
    task, theta, (columns, *_) = classifier(l2=0.3)
    kept = torch.tensor([0, 3, 4, 8])
    weight = torch.zeros(9, dtype=WIDE).index_fill(0, kept, 1.0)
    padded, real = Batch(columns, weight), Batch(tuple(c[kept] for c in columns))
    v = normal(len(theta), seed=9)
    assert close(task.loss(theta, padded), task.loss(theta, real), 1e-12)
    assert close(task.gradient(theta, padded), task.gradient(theta, real), 1e-12)
    assert close(task.hvp(theta, v, padded), task.hvp(theta, v, real), 1e-12)


def test_weights_are_those_of_a_mean():
    task, theta, (columns, *_) = classifier()
    weight = torch.arange(1.0, 10.0, dtype=WIDE)
    by_row = torch.stack([task.gradient(theta, Batch(tuple(c[i : i + 1] for c in columns))) for i in range(9)])
    assert close(task.gradient(theta, Batch(columns, weight)), weight @ by_row / weight.sum(), 1e-12)
    assert close(task.gradient(theta, Batch(columns, 5 * weight)), weight @ by_row / weight.sum(), 1e-12)
