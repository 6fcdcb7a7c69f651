"""Weight learners without settings on least squares: within 1e-3 of scipy's optimum on the simplex."""

from typing import Any

import numpy as np
import pytest
import torch
from learners import federation
from scipy.optimize import minimize

import coterie
from coterie import methods
from coterie.methods.shared.curvature import curvatures
from coterie.methods.weights.spectral import advance, spectral
from coterie.numerics import project_simplex

Shard = tuple[Any, Any]


def shards(clients: int = 8, d: int = 5, rows: int = 50) -> tuple[list[Shard], Shard]:
    """Regressions of different coefficients and noise; the target's lie between them."""
    draw = np.random.default_rng(0)
    base = draw.normal(size=d)
    coefficients = [base + 0.5 * draw.normal(size=d) for _ in range(clients)]

    def shard(theta: Any) -> Shard:
        x = draw.normal(size=(rows, d))
        return x, x @ theta + 0.3 * draw.normal(size=rows)

    return [shard(theta) for theta in coefficients], shard(base)


def objective(w: Any, clients: list[Shard], target: Shard) -> float:
    """F(w) = L_0(θ*(w)), by the normal equations."""
    H = sum(wk * x.T @ x for wk, (x, _) in zip(w, clients, strict=True))
    c = sum(wk * x.T @ y for wk, (x, y) in zip(w, clients, strict=True))
    return float(0.5 * np.mean((target[0] @ np.linalg.solve(H, c) - target[1]) ** 2))


def problem_of(clients: list[Shard], target: Shard) -> Any:
    net = torch.nn.Linear(clients[0][0].shape[1], 1, bias=False).double()
    torch.nn.init.zeros_(net.weight)
    rows = [(torch.tensor(x), torch.tensor(y)) for x, y in [*clients, target]]
    return coterie.Weighting.on(rows[:-1], rows[-1], model=net, loss="squared", dtype="float64")


@pytest.mark.parametrize(
    ("make", "rounds"),
    [
        (methods.exact_gd, 25),
        (methods.meritfed, 60),
        (methods.primal_dual, 25),
        pytest.param(methods.bilevel, 25, marks=pytest.mark.slow),
    ],
    ids=["exact-gd", "meritfed", "primal-dual", "bilevel"],
)
def test_without_settings_the_weights_are_nearly_optimal(make: Any, rounds: int) -> None:
    clients, target = shards()
    start = np.full(len(clients), 1 / len(clients))
    best = minimize(
        objective,
        start,
        (clients, target),
        method="SLSQP",
        bounds=[(0.0, 1.0)] * len(clients),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1.0},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert objective(start, clients, target) - best.fun > 0.05
    fit = coterie.fit(problem_of(clients, target), make(), rounds=rounds, mode="vmap", record=rounds)
    assert objective(fit.weights.numpy(), clients, target) - best.fun < 1e-3


def test_the_curvatures_are_those_of_the_hessians() -> None:
    clients, target = shards(clients=3)
    problem = problem_of(clients, target)
    found = curvatures(federation(problem), problem.start)
    spectra = [np.linalg.eigvalsh(x.T @ x / len(x)) for x, _ in clients]
    assert found.largest == pytest.approx(1.1 * max(s.max() for s in spectra), rel=0.05)
    assert found.least == pytest.approx(min(s.min() for s in spectra), rel=0.2, abs=0.05)
    assert found.target == pytest.approx(1.1 * np.linalg.eigvalsh(target[0].T @ target[0] / 50).max(), rel=0.05)


def test_bilevel_has_the_whole_simplex_unless_a_cap_is_set() -> None:
    for make in (methods.bilevel, methods.bilevel_accelerated, methods.fednest_weights):
        assert make().settings["cap"] == 1.0


def test_a_value_above_the_last_one_but_below_the_largest_of_five_is_good() -> None:
    """Spectral steps are not monotone: a point is left only where F is above all of the last five."""
    w = torch.tensor([0.5, 0.5])
    s = spectral(w)
    for i, value in enumerate([9.0, 5.0, 4.0, 3.0, 2.0, 1.0]):  # the first is forgotten
        s, _, good = advance(s, w, torch.tensor([1.0, -1.0]), torch.tensor(value), project_simplex)
        assert (good, s.points) == (True, i + 1)
    for value, expected in ((4.9, True), (5.0, False), (4.8, True), (9.0, False)):
        before = s
        s, _, good = advance(s, w, torch.tensor([1.0, -1.0]), torch.tensor(value), project_simplex)
        assert good == expected
        assert s.points == before.points + expected
        assert good or s.step == before.step / 4


def test_spectral_steps_solve_a_quadratic_on_the_simplex_and_leave_worse_points() -> None:
    """min ½ wᵀAw − bᵀw against scipy's optimum; a value above the last five quarters the step."""
    draw = np.random.default_rng(1)
    root = draw.normal(size=(6, 6))
    A, b = torch.tensor(root @ root.T), torch.tensor(draw.normal(size=6))

    def value(w: Any) -> Any:
        return 0.5 * w @ A @ w - b @ w

    w = torch.full((6,), 1 / 6, dtype=torch.float64)
    s = spectral(w)
    for _ in range(80):
        s, w, _ = advance(s, w, A @ w - b, value(w), project_simplex)
    best = minimize(
        lambda w: float(value(torch.tensor(w))),
        np.full(6, 1 / 6),
        method="SLSQP",
        bounds=[(0.0, 1.0)] * 6,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1.0},
        options={"ftol": 1e-15},
    )
    assert float(value(s.w)) - best.fun < 1e-8
    after, near, good = advance(s, w + 0.1, A @ w - b, value(s.w) + 1.0, project_simplex)
    assert not good
    assert after.step == pytest.approx(s.step / 4)
    torch.testing.assert_close(near, project_simplex(s.w - after.step * s.gradient))
