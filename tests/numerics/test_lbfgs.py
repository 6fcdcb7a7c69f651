"""Many minimisations at once: each ends where it would alone, and where scipy ends."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from coterie.numerics.lbfgs import minimise


def quadratics(B: int, d: int, condition: float) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(B, d, d, generator=random, dtype=torch.float64)).Q
    scale = torch.logspace(0, float(np.log10(condition)), d, dtype=torch.float64)
    return turn * scale @ turn.mT, torch.randn(B, d, generator=random, dtype=torch.float64)


def test_quadratics_are_solved_and_nobody_waits_for_others() -> None:
    A, b = quadratics(7, 12, 1e3)
    asked: list[int] = []

    def evaluate(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(len(which))
        Ax = (A[which] @ x[..., None])[..., 0]
        return (0.5 * x * Ax - b[which] * x).sum(1), Ax - b[which]

    found = minimise(evaluate, torch.zeros(7, 12, dtype=torch.float64), tolerance=1e-8, evaluations=500)
    assert found.converged.all()
    torch.testing.assert_close(found.x, torch.linalg.solve(A, b), atol=1e-5, rtol=1e-4)
    assert asked[0] == 7
    assert asked[-1] < 7
    assert found.evaluations == len(asked)
    one = minimise(
        lambda x, which: evaluate(x, which + 3),
        torch.zeros(1, 12, dtype=torch.float64),
        tolerance=1e-8,
        evaluations=500,
    )
    torch.testing.assert_close(one.x[0], found.x[3], atol=1e-5, rtol=1e-4)


def test_a_curved_valley_as_scipy_finds_it() -> None:
    def rosenbrock(x: Tensor) -> Tensor:
        return (1 - x[:, 0]) ** 2 + 100 * (x[:, 1] - x[:, 0] ** 2) ** 2

    def evaluate(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        value = rosenbrock(x)
        return value.detach(), torch.autograd.grad(value.sum(), x)[0]

    start = torch.tensor([[-1.2, 1.0], [0.0, 0.0], [3.0, -4.0]], dtype=torch.float64)
    found = minimise(evaluate, start, tolerance=1e-7, evaluations=400)
    for row, ended in zip(start, found.x, strict=True):
        wanted = minimize(lambda x: float(rosenbrock(torch.tensor(x)[None])), row.numpy(), method="BFGS")
        np.testing.assert_allclose(ended.numpy(), wanted.x, atol=1e-4)


def test_what_cannot_be_evaluated_ends_and_hurts_nobody() -> None:
    def evaluate(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        bad = which == 1
        value = x.square().sum(1)
        return torch.where(bad, torch.nan, value), torch.where(bad[:, None], torch.nan, 2 * x)

    found = minimise(evaluate, torch.ones(3, 2))
    assert found.converged.tolist() == [True, False, True]
    assert found.x[1].tolist() == [1.0, 1.0]
    assert found.evaluations < 20


@pytest.mark.parametrize("progress", [0.0, 1e-3])
def test_small_progress_may_end_a_search(progress: float) -> None:
    A, b = quadratics(1, 30, 1e2)

    def evaluate(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        Ax = (A[which] @ x[..., None])[..., 0]
        return (0.5 * x * Ax - b[which] * x).sum(1) + 100.0, Ax - b[which]

    found = minimise(evaluate, torch.zeros(1, 30, dtype=torch.float64), tolerance=1e-9, progress=progress)
    exact = torch.linalg.solve(A, b)
    far = float((found.x - exact).norm() / exact.norm())
    assert far < 1e-5 if progress == 0.0 else far > 1e-5


def test_a_point_without_a_finite_gradient_is_not_taken() -> None:
    """The value goes on falling there; only the gradient says that the function has ended."""

    def evaluate(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        return -x.sum(1), torch.where(x > 1.5, torch.nan, -torch.ones_like(x))

    found = minimise(evaluate, torch.zeros(2, 3, dtype=torch.float64), evaluations=60)
    assert bool((found.x <= 1.5).all())
    assert bool((found.x > 1.0).all())
    torch.testing.assert_close(found.value, -found.x.sum(1))
