"""SOBA, SABA, MA-SOBA, stocBiO and F²SA: directions, centralised algorithms, fixed points, exchanges and figures."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import grad

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "problems"))

from learners import WIDE, federation, play
from nested_cases import CASES, best_inner, finite_differences, mean_inner, mean_outer

from coterie.experiment.build import assemble
from coterie.experiment.config import resolve
from coterie.experiment.loop import run_rounds
from coterie.methods import Method, f2sa, ma_soba, saba, soba, stocbio
from coterie.methods.nested.works import joint_directions
from coterie.numerics import Draw
from coterie.problems.catalogue.nested_quadratic import nested_quadratic
from coterie.problems.catalogue.simulated import simulated
from coterie.problems.nested import Minimax, Nested
from coterie.problems.tasks.sets import Box

SMALL: dict[str, Any] = {"clients": 4, "dimension": 3, "inner_dimension": 5}
SOLVERS: dict[str, Callable[..., Method]] = {
    "soba": soba,
    "saba": saba,
    "ma-soba": ma_soba,
    "stocbio": stocbio,
    "f2sa": f2sa,
}


# The directions


def test_the_directions_at_the_solution_of_the_inner_problem_are_0_0_and_the_closed_hypergradient() -> None:
    problem = nested_quadratic(WIDE, **SMALL)
    form, fed, x = problem.exact, federation(problem), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    y = form.inner(x)
    v = -torch.linalg.solve(form.hessian, y - form.a.mean(0))
    d_y, d_v, d_x = fed.mean(joint_directions, (x, y, v), draw=Draw.of(0), batch="all")
    torch.testing.assert_close(d_y, torch.zeros(5, dtype=torch.float64), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(d_v, torch.zeros(5, dtype=torch.float64), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(d_x, form.hypergradient(x), rtol=1e-11, atol=1e-11)
    entry = fed.ledger.by_cause["nested/directions"]
    assert (entry.rounds, entry.floats_up, entry.floats_down) == (1, 4 * (3 + 2 * 5), 4 * (3 + 2 * 5))


@pytest.mark.parametrize("kind", CASES)
def test_the_directions_of_every_kind_of_problem(kind: str) -> None:
    """Against autograd on the means, and at the solution of the inner problem against differences of f(x, y*(x))."""
    problem = CASES[kind]()
    x, y = problem.start, best_inner(problem, problem.start)
    has_inner, indirect = kind != "single-level", kind in ("bilevel", "compositional")
    v = y.new_zeros(0)
    if indirect:
        H = torch.func.hessian(lambda y_: mean_inner(problem, x, y_))(y)
        b = grad(lambda y_: mean_outer(problem, x, y_))(y)
        v = -torch.linalg.solve(H, b)
    d_y, d_v, d_x = federation(problem).mean(joint_directions, (x, y, v), draw=Draw.of(0), batch="all")
    assert (len(d_y), len(d_v)) == (len(y) * has_inner, len(y) * indirect)
    assert not len(d_y) or float(d_y.norm()) < 1e-10
    assert not len(d_v) or float(d_v.norm()) < 1e-10
    torch.testing.assert_close(d_x, finite_differences(problem, x), rtol=0.0, atol=1e-6)
    if indirect:  # away from the solution, by the formula
        away = v + 1.0
        _, d_v, _ = federation(problem).mean(joint_directions, (x, y, away), draw=Draw.of(0), batch="all")
        torch.testing.assert_close(d_v, H @ away + b, rtol=0.0, atol=1e-10)


# The centralised algorithms, in NumPy, on the mean of the clients' quadratics

RHO, GAMMA, THETA, INNER, TERMS, LAMBDA, POWER = 0.2, 0.1, 0.3, 3, 4, 20.0, 0.5
REFERENCE_SETTINGS: dict[str, dict[str, Any]] = {
    "soba": {},
    "saba": {},
    "ma-soba": {"averaging": THETA},
    "stocbio": {"inner_steps": INNER, "terms": TERMS},
    "f2sa": {"inner_steps": INNER, "penalty": LAMBDA, "growth": POWER},
}


class Quadratic:
    """g = ½ yᵀHy − yᵀ(Cx + c) and f = ½‖y − a‖² + ½ρ‖x‖² − xᵀe, up to a constant: the means over the clients."""

    def __init__(self, form: Any) -> None:
        self.H, self.C, self.c = (part.mean(0).numpy() for part in (form.H, form.C, form.c))
        self.a, self.e = form.a.mean(0).numpy(), (form.rho[:, None] * form.e).mean(0).numpy()
        self.rho = float(form.rho.mean())

    def g_y(self, x: Any, y: Any) -> Any:
        return self.H @ y - self.C @ x - self.c

    def g_x(self, y: Any) -> Any:
        return -self.C.T @ y

    def f_x(self, x: Any) -> Any:
        return self.rho * x - self.e


def soba_reference(q: Quadratic) -> Iterator[Any]:
    x, y, v = np.zeros(3), np.zeros(5), np.zeros(5)
    while True:
        d_y, d_v, d_x = q.g_y(x, y), q.H @ v + y - q.a, q.f_x(x) - q.C.T @ v
        x, y, v = x - GAMMA * d_x, y - RHO * d_y, v - RHO * d_v
        yield x, y


def ma_soba_reference(q: Quadratic) -> Iterator[Any]:
    x, y, v, h = np.zeros(3), np.zeros(5), np.zeros(5), np.zeros(3)
    while True:
        d_y, d_v, d_x = q.g_y(x, y), q.H @ v + y - q.a, q.f_x(x) - q.C.T @ v
        x, y, v, h = x - GAMMA * h, y - RHO * d_y, v - RHO * d_v, (1 - THETA) * h + THETA * d_x
        yield x, y


def stocbio_reference(q: Quadratic) -> Iterator[Any]:
    x, y, shrink = np.zeros(3), np.zeros(5), np.eye(5) - RHO * q.H
    inverse = RHO * sum(np.linalg.matrix_power(shrink, n) for n in range(TERMS + 1))
    while True:
        for _ in range(INNER):
            y = y - RHO * q.g_y(x, y)
        x = x - GAMMA * (q.f_x(x) + q.C.T @ inverse @ (y - q.a))
        yield x, y


def f2sa_reference(q: Quadratic) -> Iterator[Any]:
    x, y, z, k = np.zeros(3), np.zeros(5), np.zeros(5), 0
    while True:
        k += 1
        lam = LAMBDA * k**POWER
        for _ in range(INNER):
            y = y - RHO / lam * (y - q.a + lam * q.g_y(x, y))
            z = z - RHO * q.g_y(x, z)
        x = x - GAMMA * (q.f_x(x) + lam * (q.g_x(y) - q.g_x(z)))
        yield x, z


REFERENCES = {
    "soba": soba_reference,
    "saba": soba_reference,
    "ma-soba": ma_soba_reference,
    "stocbio": stocbio_reference,
    "f2sa": f2sa_reference,
}


@pytest.mark.parametrize("name", SOLVERS)
def test_with_all_clients_and_all_rows_it_is_the_centralised_algorithm(name: str) -> None:
    problem = nested_quadratic(WIDE, **SMALL, heterogeneity=2.0)
    method = SOLVERS[name](step=RHO, outer_step=GAMMA, **REFERENCE_SETTINGS[name])
    fed, state = federation(problem), method.init(problem, 4)
    for t, (x, y) in zip(range(8), REFERENCES[name](Quadratic(problem.exact)), strict=False):
        state = play(method, problem, 1, state=state, fed=fed)
        seen = method.view(state)
        assert seen.inner is not None
        assert float(np.abs(seen.model.numpy() - x).max()) < 1e-10, t
        assert float(np.abs(seen.inner.numpy() - y).max()) < 1e-10, t


@pytest.mark.parametrize("name", SOLVERS)
def test_at_the_fixed_point_the_step_of_x_is_the_closed_hypergradient(name: str) -> None:
    """x hardly moves, so that everything else converges; then −Δx/γ is ∇f(x)."""
    problem, tiny = nested_quadratic(WIDE, **SMALL), 1e-8
    exact: dict[str, dict[str, Any]] = {
        "ma-soba": {"averaging": 0.5},
        "stocbio": {"terms": 40, "inner_steps": 40},
        "f2sa": {"penalty": 1e7, "growth": 0.0},
    }
    method = SOLVERS[name](step=0.35, outer_step=tiny, **exact.get(name, {}))
    fed = federation(problem)
    before = play(method, problem, 1 if name == "stocbio" else 40, fed=fed)
    after = play(method, problem, 1, state=before, fed=fed)
    moved = (before.x - after.x) / tiny
    torch.testing.assert_close(moved, problem.exact.hypergradient(before.x), rtol=0.0, atol=1e-6)


# Exchanges


def spent(method: Method, problem: Any) -> tuple[int, int, int]:
    """Exchanges, and numbers up and down per client, of one round."""
    fed = federation(problem)
    play(method, problem, 1, fed=fed)
    total = fed.ledger.total
    return total.rounds, total.floats_up // fed.n, total.floats_down // fed.n


@pytest.mark.parametrize(("T", "Q"), [(1, 1), (3, 4)])
def test_exchanges_and_numbers_per_round(T: int, Q: int) -> None:
    problem, steps = nested_quadratic(WIDE, **SMALL), {"step": 0.1, "outer_step": 0.1}
    x, y = 3, 5
    for make in (soba, saba, ma_soba):
        assert spent(make(**steps), problem) == (1, 2 * y + x, 2 * y + x)
    found = spent(stocbio(**steps, inner_steps=T, terms=Q), problem)
    down = T * (x + y) + (x + y) + Q * (x + 2 * y) + (x + 2 * y)
    assert found == (T + Q + 2, (T + Q + 1) * y + x, down)
    found = spent(f2sa(**steps, inner_steps=T, penalty=10.0), problem)
    assert found == (T + 1, 2 * T * y + x, (T + 1) * (x + 2 * y))


@pytest.mark.parametrize("kind", ["minimax", "compositional", "single-level"])
def test_exchanges_of_the_other_kinds(kind: str) -> None:
    problem, steps = CASES[kind](), {"step": 0.1, "outer_step": 0.1}
    y, v = {"minimax": (3, 0), "compositional": (3, 3), "single-level": (0, 0)}[kind]
    for make in (soba, saba, ma_soba):
        assert spent(make(**steps), problem)[:2] == (1, 3 + y + v)
    inner, series = 2 * bool(y), bool(v)  # the Hessian of compositional problems is the identity
    assert spent(stocbio(**steps, inner_steps=2, terms=4), problem)[0] == inner + series + 1
    assert spent(f2sa(**steps, inner_steps=2, penalty=10.0), problem)[0] == inner + 1


# Some clients


def test_saba_converges_with_some_clients_and_constant_steps_where_soba_has_a_noise_floor() -> None:
    problem, steps = nested_quadratic(WIDE, **SMALL), {"step": 0.2, "outer_step": 0.3}
    distances = {}
    for make in (soba, saba):
        state = play(make(**steps), problem, 70, fed=federation(problem, count=2))
        distances[make] = float((state.x - problem.exact.optimum).norm())
    assert distances[saba] < 1e-5
    assert distances[soba] > 1e-2


def test_the_server_knows_the_mean_of_the_tables() -> None:
    problem, method = nested_quadratic(WIDE, **SMALL), saba(step=0.1, outer_step=0.1)
    state = play(method, problem, 5, fed=federation(problem, count=2))
    for mean, rows in zip(state.mean, state.tables.payload, strict=True):
        torch.testing.assert_close(mean, rows.mean(0), rtol=1e-12, atol=1e-12)
    assert bool(state.mean[2].any())


def test_lost_replies_start_the_tables_again_so_that_their_mean_stays_known() -> None:
    """Clients crash in about every third round; without the restart the mean would be wrong for good."""
    config = {
        "run": {"method": "saba", "problem": "nested-quadratic", "rounds": 15, "dtype": "float64", "record": 15},
        "method": {"step": 0.1, "outer_step": 0.1},
        "problem": SMALL,
        "federation": {"mode": "vmap"},
        "faults": {"crash": 0.1},
    }
    result = run_rounds(assemble(resolve(config)), None)
    assert any(event["event"] == "crashed" for event in result.events)
    for mean, rows in zip(result.state.mean, result.state.tables.payload, strict=True):
        torch.testing.assert_close(mean, rows.mean(0), rtol=1e-10, atol=1e-12)


def test_with_all_clients_saba_is_soba() -> None:
    problem, steps = nested_quadratic(WIDE, **SMALL), {"step": 0.2, "outer_step": 0.1}
    plain, reduced = (play(make(**steps), problem, 6) for make in (soba, saba))
    torch.testing.assert_close(plain.x, reduced.x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plain.v, reduced.v, rtol=1e-12, atol=1e-12)


# Sets


@pytest.mark.parametrize("name", SOLVERS)
def test_variables_stay_within_their_sets(name: str) -> None:
    """min ½(y − 3)² with y*(x) = x and x ≤ 1, and a saddle point whose y is at its bound of 1."""
    rows: dict[str, Any] = {"x": torch.zeros(2), "y": torch.zeros(2), "dtype": torch.float64}
    bilevel = Nested(
        lambda x, y, batch: 0.5 * (y - x).square().sum(), lambda x, y, batch: 0.5 * (y - 3.0).square().sum()
    ).on([torch.zeros(2, 1)] * 2, **rows, x_set=Box(-1.0, 1.0))
    game = Minimax(lambda x, y, batch: (0.5 * (x - 1.0).square() + 3.0 * y - 0.5 * y.square()).sum()).on(
        [torch.zeros(2, 1)] * 2, **rows, y_set=Box(-1.0, 1.0)
    )
    settings: dict[str, Any] = {"penalty": 100.0} if name == "f2sa" else {}
    method = SOLVERS[name](step=0.5, outer_step=0.3, **settings)
    for problem in (bilevel, game):
        assert method.fits(problem.offers)
        seen = method.view(play(method, problem, 30 if name != "stocbio" else 12))
        assert seen.inner is not None
        assert float((seen.model if problem is bilevel else seen.inner).max()) <= 1.0
        torch.testing.assert_close(seen.model, torch.ones(2, dtype=torch.float64), rtol=0.0, atol=0.03)
        torch.testing.assert_close(seen.inner, torch.ones(2, dtype=torch.float64), rtol=0.0, atol=0.03)


# Noise


def test_the_moving_average_damps_the_noise_of_sampled_clients() -> None:
    """With 2 of 8 clients per round, the direction of x varies less the longer the average is, at the same steps."""
    problem = nested_quadratic(WIDE, clients=8, dimension=3, inner_dimension=4)
    variances = {}
    for averaging in (1.0, 0.1):
        method = ma_soba(step=0.2, outer_step=0.05, averaging=averaging)
        fed, state, h = federation(problem, count=2), method.init(problem, 8), []
        for t in range(80):
            draw = Draw.of(1).round(t)
            state = method.round(fed.begin(t + 1, draw), state, draw)
            h.append(state.h)
        variances[averaging] = float(torch.stack(h[30:]).var(0).sum())
    assert variances[0.1] < 0.3 * variances[1.0]


def test_the_error_of_f2sa_falls_with_its_penalty() -> None:
    """The distance to the optimum is proportional to 1/λ where the penalty stays, and smaller where it grows."""
    problem, errors = nested_quadratic(WIDE, **SMALL), []
    for penalty, growth in ((50.0, 0.0), (500.0, 0.0), (50.0, 1 / 3)):
        method = f2sa(step=0.3, outer_step=0.3, penalty=penalty, growth=growth)
        state = play(method, problem, 40)
        errors.append(float((state.x - problem.exact.optimum).norm()))
    assert errors[0] / errors[1] == pytest.approx(10.0, rel=0.15)
    assert errors[2] < 0.8 * errors[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "most"),
    [("soba", {}, 400), ("saba", {}, 400), ("ma-soba", {}, 800), ("f2sa", {"penalty": 1e6, "growth": 0.0}, 1000)],
)
def test_the_simulated_problem_is_solved_without_steps_by_hand(name: str, settings: Any, most: int) -> None:
    """h(x) − h* < 1e-6 against linear solves in float64, within so many exchanges, those of the estimates included."""
    problem, method = simulated(WIDE), SOLVERS[name](**settings)
    fed = federation(problem)
    state, t = method.init(problem, fed.n), 0
    while float(problem.exact.gap(method.view(state).model)) >= 1e-6:
        draw = Draw.of(1).round(t)
        state, t = method.round(fed.begin(t + 1, draw), state, draw), t + 1
        assert fed.ledger.total.rounds < most
    x = method.view(state).model
    assert float(problem.exact.objective(x)) - problem.exact.least < 1e-6
