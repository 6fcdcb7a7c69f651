"""benchmark_bilevel's simulated quadratic: its recipe, and h(x), ∇h(x), h* against SciPy on the clients' rows."""

from typing import Any

import numpy as np
import pytest
import torch
from nested_cases import finite_differences
from scipy.optimize import minimize

import coterie
from coterie.errors import UsageError
from coterie.problems import Context
from coterie.problems.base import View
from coterie.problems.catalogue.registry import problem_entry
from coterie.problems.catalogue.simulated import simulated

WIDE = Context(0, torch.float64)
SMALL: dict[str, Any] = {"clients": 4, "rows": 12, "dimension": 5, "inner_dimension": 7}


def dense(stack: Any, clients: int) -> tuple[np.ndarray, ...]:
    """(A, B, C, a, b), summed up row by row, client by client."""
    parts = []
    for k in range(clients):
        for r, s, u, v, a, b in zip(*(c.numpy() for c in stack.client(k).all().columns), strict=True):
            parts.append((np.outer(r, r), np.outer(s, s), np.outer(u, v), a, b))
    return tuple(np.mean(column, axis=0) for column in zip(*parts, strict=True))


def value(x: np.ndarray, g: tuple[np.ndarray, ...], f: tuple[np.ndarray, ...]) -> float:
    """h(x), by least squares for y*(x)."""
    A, _, C, a, _ = g
    y = np.linalg.lstsq(A, -(C.T @ x + a), rcond=None)[0]
    F, H, K, p, q = f
    return float(0.5 * y @ F @ y + 0.5 * x @ H @ x + x @ K @ y + p @ y + q @ x)


def test_scipy_finds_the_same_optimum() -> None:
    problem = simulated(WIDE, **SMALL)
    g, f = dense(problem.train, 4), dense(problem.valid, 4)
    found = minimize(value, problem.start.numpy(), args=(g, f), method="BFGS", options={"gtol": 1e-9})
    assert found.fun == pytest.approx(problem.exact.least, abs=1e-10)
    np.testing.assert_allclose(found.x, problem.exact.optimum.numpy(), atol=1e-5)
    x = problem.start + 0.3
    assert float(problem.exact.objective(x)) == pytest.approx(value(x.numpy(), g, f), rel=1e-12)
    assert float(problem.exact.gap(x)) == pytest.approx(value(x.numpy(), g, f) - found.fun, abs=1e-9)


def test_the_hypergradient_is_that_of_the_losses() -> None:
    problem = simulated(WIDE, **SMALL)
    x = problem.start + 0.5
    torch.testing.assert_close(problem.exact.hypergradient(x), finite_differences(problem, x), rtol=1e-6, atol=1e-7)
    y = problem.exact.inner(x)
    slopes = [problem.task.inner_gradient(x, y, problem.train.client(k).all()) for k in range(4)]
    assert float(torch.stack(slopes).mean(0).norm()) < 1e-12


def test_the_recipe_has_the_benchmark_s_constants() -> None:
    problem = simulated(WIDE)
    assert problem.clients == 16
    assert problem.train.counts.tolist() == problem.valid.counts.tolist() == [64] * 16
    assert bool((problem.start == -2.0).all())
    assert len(problem.start) == len(problem.inner_start) == 100
    many = simulated(WIDE, clients=2, rows=20_000, dimension=4, inner_dimension=6).exact
    spaced = torch.logspace(-1, 0, 6, dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.eigvalsh(many.g.A), spaced, rtol=0.05, atol=0.0)
    flat = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-1, 0, 3, dtype=torch.float64)])
    torch.testing.assert_close(torch.linalg.eigvalsh(many.f.B), flat, rtol=0.05, atol=1e-9)
    torch.testing.assert_close(torch.linalg.svdvals(many.g.C), torch.full_like(flat, 0.1), rtol=0.1, atol=0.0)


def test_the_gap_is_zero_at_the_optimum_only() -> None:
    problem = simulated(WIDE, **SMALL)
    best = View(problem.exact.optimum, inner=problem.exact.inner(problem.exact.optimum))
    measures = problem.measure(best)
    assert measures["gap"] == measures["distance_to_optimum"] == measures["inner_distance"] == 0.0
    assert measures["stationarity"] < 1e-12
    assert problem.measure(View(problem.start, inner=problem.inner_start))["gap"] > 1.0


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(UsageError, match=r"rank 6, below problem.inner_dimension = 7"):
        simulated(WIDE, clients=2, rows=3, dimension=3, inner_dimension=7)
    with pytest.raises(UsageError, match=r"none of 20 draws has a convex value function"):
        simulated(WIDE, clients=2, rows=8, dimension=3, inner_dimension=4, outer_cross=1e4)


@pytest.mark.slow
def test_fednest_with_conjugate_gradients_approaches_the_optimum() -> None:
    problem = simulated(WIDE)
    settings = problem_entry("simulated").tuned["fednest"]
    fit = coterie.fit(problem, coterie.methods.fednest(**settings), rounds=300, record=300, mode="vmap")
    assert 0.0 <= fit.history[-1]["gap"] < 1e-5  # it starts at 115
    assert fit.ledger.total.rounds == 300 * (2 + settings["terms"] + 3)
