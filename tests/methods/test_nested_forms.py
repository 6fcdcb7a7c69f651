"""exact-gd, primal-dual, sustain and rfho on nested problems: closed forms, NumPy, rounds, defaults and refusals."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "problems"))

from learners import WIDE, a_quadratic, federation, play
from nested_cases import CASES

from coterie.errors import UsageError
from coterie.methods import exact_gd, primal_dual, rfho, sustain
from coterie.problems.catalogue.nested_quadratic import nested_quadratic

SMALL: dict[str, Any] = {"clients": 4, "dimension": 3, "inner_dimension": 5}
TINY: dict[str, Any] = {"clients": 3, "dimension": 2, "inner_dimension": 3, "condition": 2.0}
FULL: dict[str, Any] = {"batch": "all"}


class Means:
    """The quadratic's means in NumPy."""

    def __init__(self, form: Any) -> None:
        self.H, self.C = form.hessian.numpy(), form.C.mean(0).numpy()
        self.c, self.a = form.c.mean(0).numpy(), form.a.mean(0).numpy()
        self.rho, self.rho_e = float(form.rho.mean()), (form.rho[:, None] * form.e).mean(0).numpy()

    def g_y(self, x: Any, y: Any) -> Any:
        return self.H @ y - self.C @ x - self.c

    def hypergradient(self, x: Any, p: Any) -> Any:
        """∇_x f − ∇²_xy g p."""
        return self.rho * x - self.rho_e + self.C.T @ p


def made(**settings: Any) -> tuple[Any, Means]:
    problem = nested_quadratic(WIDE, **settings)
    return problem, Means(problem.exact)


def close(found: torch.Tensor, expected: Any, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=0.0, atol=tolerance)


# Reductions: with all clients and all rows each is its centralised algorithm


def test_exact_gd_takes_the_closed_hypergradient_step() -> None:
    problem, _ = made(**SMALL)
    form, x = problem.exact, problem.start
    state = play(exact_gd(outer_step=0.2, local_steps=1), problem, 3)
    for _ in range(3):
        y = form.inner(x)
        x = x - 0.2 * form.hypergradient(x)
    torch.testing.assert_close(state.x, x, rtol=0.0, atol=1e-10)
    torch.testing.assert_close(state.y, y, rtol=0.0, atol=1e-10)
    plain = play(exact_gd(outer_step=0.2, step=0.5, local_steps=25, inner="gradient"), problem, 1)
    torch.testing.assert_close(plain.x, -0.2 * form.hypergradient(problem.start), rtol=0.0, atol=1e-4)


def test_primal_dual_is_the_saddle_point_method() -> None:
    problem, m = made(**SMALL)
    x, y, lam = np.zeros(3), np.zeros(5), np.zeros(5)
    for _ in range(2):
        for _ in range(3):
            h = m.hypergradient(x, -lam)
            g = m.g_y(x, y)
            y, lam = y - 0.1 * (y - m.a + m.H @ lam + 2.0 * g), lam + 0.05 * g
        x = x - 0.3 * h
    steps: dict[str, Any] = {"step": 0.1, "dual_step": 0.05, "outer_step": 0.3, "local_steps": 3, "augmentation": 2.0}
    method = primal_dual(**steps, **FULL)
    state = play(method, problem, 2)
    close(state.x, x)
    close(state.y, y)
    close(state.lam, lam)
    assert set(method.view(state).more) == {"primal_residual", "dual_residual"}


def test_sustain_is_its_recursion() -> None:
    """With full batches the momenta are the plain gradients, of which the second has the series of k + 1 terms."""
    problem, m = made(**SMALL)
    x, y, s = np.zeros(3), np.zeros(5), 0.1
    for _ in range(3):
        p = s * sum(np.linalg.matrix_power(np.eye(5) - s * m.H, n) @ (y - m.a) for n in range(3))
        x, y = x - 0.3 * m.hypergradient(x, p), y - 0.2 * m.g_y(x, y)
    steps: dict[str, Any] = {"step": 0.2, "outer_step": 0.3, "series_step": s, "local_steps": 2}
    state = play(sustain(**steps, **FULL), problem, 3)
    close(state.x, x)
    close(state.y, y)
    plain = play(sustain(**steps, momentum=0.0, weight_momentum=0.0, **FULL), problem, 3)
    close(plain.x, x)


@pytest.mark.parametrize("carry", [True, False])
def test_rfho_differentiates_the_inner_steps(carry: bool) -> None:
    problem, m = made(**SMALL)
    x, y, Z = np.zeros(3), np.zeros(5), np.zeros((3, 5))
    for _ in range(2):
        Z = Z if carry else np.zeros((3, 5))
        for _ in range(2):
            y, Z = y - 0.2 * m.g_y(x, y), Z - 0.2 * (Z @ m.H - m.C.T)
        x = x - 0.3 * (m.rho * x - m.rho_e + Z @ (y - m.a))
    state = play(rfho(step=0.2, outer_step=0.3, local_steps=2, carry=carry, columns=2, **FULL), problem, 2)
    close(state.x, x)
    close(state.Z, Z)


# Fixed points


def test_every_form_rests_at_the_closed_solution() -> None:
    problem, _ = made(**TINY)
    form = problem.exact
    x = form.optimum
    y = form.inner(x)
    v = -torch.linalg.solve(form.hessian, y - form.a.mean(0))
    jacobian = torch.linalg.solve(form.hessian, form.C.mean(0)).T
    steps: dict[str, Any] = {"step": 0.4, "outer_step": 0.3}
    cases: list[tuple[Any, dict[str, Any], int]] = [
        (exact_gd(outer_step=0.3, local_steps=1), {}, 2),
        (primal_dual(**steps, dual_step=0.2, local_steps=2, **FULL), {"lam": v}, 2),
        (rfho(**steps, **FULL), {"Z": jacobian}, 2),
        (sustain(**steps, series_step=0.5, local_steps=25, **FULL), {}, 1),
    ]
    for method, more, rounds in cases:
        state = method.init(problem, 3)._replace(x=x, y=y, **more)
        after = play(method, problem, rounds, state=state)
        torch.testing.assert_close(after.x, x, rtol=0.0, atol=1e-6)
        torch.testing.assert_close(after.y, y, rtol=0.0, atol=1e-6)


# Rounds and numbers


def test_rounds_and_numbers() -> None:
    problem, _ = made(**SMALL)
    n, d_x, d_y = 4, 3, 5

    def spent(method: Any) -> tuple[int, int]:
        fed = federation(problem)
        play(method, problem, 1, fed=fed)
        return fed.ledger.total.rounds, fed.ledger.total.floats_up

    steps: dict[str, Any] = {"step": 0.1, "outer_step": 0.1}
    K = 2
    assert spent(exact_gd(**steps, local_steps=K)) == (K + 2, n * ((K + 1) * (d_y**2 + d_y) + d_x))
    assert spent(exact_gd(**steps, local_steps=K, inner="gradient")) == (K + 2, n * (K * d_y + d_y**2 + d_y + d_x))
    assert spent(primal_dual(**steps, dual_step=0.1, local_steps=K)) == (K, n * K * (d_x + 2 * d_y))
    assert spent(sustain(**steps, local_steps=K)) == (K + 2, n * (2 * d_y + K * d_y + d_x))
    assert spent(rfho(**steps, local_steps=K)) == (K + 1, n * (K * (d_x + 1) * d_y + d_x + d_y))


# Defaults and refusals


@pytest.mark.parametrize(("make", "rounds"), [(exact_gd, 12), (primal_dual, 12), (rfho, 25), (sustain, 25)])
def test_steps_that_are_not_set_approach_the_solution(make: Any, rounds: int) -> None:
    problem, _ = made(**TINY)
    form, method = problem.exact, make(batch="all", local_steps=3)
    state = play(method, problem, rounds)
    start, end = (float(form.objective(x) - form.objective(form.optimum)) for x in (problem.start, state.x))
    assert end < 0.2 * start


@pytest.mark.parametrize("kind", ["minimax", "compositional", "bilevel"])
@pytest.mark.parametrize("make", [exact_gd, primal_dual, rfho, sustain])
def test_every_kind_with_two_levels_is_taken(make: Any, kind: str) -> None:
    problem = CASES[kind]()
    more = {"dual_step": 0.1} if make is primal_dual else {"series_step": 0.1} if make is sustain else {}
    state = play(make(step=0.1, outer_step=0.05, local_steps=2, batch="all", **more), problem, 2)
    assert bool(torch.isfinite(state.x).all())
    assert not torch.equal(state.x, problem.start)


@pytest.mark.parametrize("make", [exact_gd, primal_dual, rfho, sustain])
def test_what_is_refused(make: Any) -> None:
    problem, _ = made(**SMALL)
    with pytest.raises(UsageError, match=r"method\.tie = 0\.5 is about client weights"):
        make(tie=0.5).init(problem, 4)
    with pytest.raises(UsageError, match=r"method\.target_batch = 3 is about client weights"):
        make(target_batch=3).init(problem, 4)
    with pytest.raises(UsageError, match="one level only"):
        make().init(CASES["single-level"](), 4)
    weights = a_quadratic()
    state = make().init(weights, 5)
    assert state.w.shape == (5,)  # weighting problems keep their form
