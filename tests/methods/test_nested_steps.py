"""Steps that are chosen by estimates: the estimates, the rule, the record, what is refused, and that it converges."""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "problems"))

from learners import WIDE, federation, play
from nested_cases import CASES

from coterie.errors import RunError
from coterie.experiment.build import assemble
from coterie.experiment.config import resolve
from coterie.experiment.loop import Result, run_rounds
from coterie.methods import Method, f2sa, ma_soba, saba, soba, stocbio
from coterie.methods.nested.steps import Curvature, Oracle, StepRule, measured_model
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.catalogue.nested_quadratic import nested_quadratic
from coterie.problems.nested import Nested

SMALL: dict[str, Any] = {"clients": 4, "dimension": 3, "inner_dimension": 5}


def chosen(problem: Any, **more: Any) -> tuple[Curvature, Any]:
    """The estimates at the start, and the federation that made them."""
    fed = federation(problem)
    return StepRule("auto", "auto", **more).choose(fed, problem.start, problem.inner_start, problem.task.kind), fed


# The model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_estimates_of_the_quadratic(dtype: torch.dtype) -> None:
    """The model has as many dimensions as x and y, so that it is the problem itself."""
    problem = nested_quadratic(Context(0, dtype), **SMALL, condition=20.0)
    values = torch.linalg.eigvalsh(problem.exact.hessian)
    found, fed = chosen(problem)
    assert found.inner == pytest.approx(float(values[-1]), rel=0.06)  # two digits
    assert found.least == pytest.approx(float(values[0]), rel=0.06)
    assert found.goal == 1.0
    assert set(fed.ledger.by_cause) == {"fednest/hessian-product", "nested/directions"}
    assert fed.ledger.by_cause["nested/directions"].rounds == 2 + 1 + 3 + 5  # two Newton steps, the point, p_j and q_j
    assert fed.ledger.by_cause["fednest/hessian-product"].rounds <= 2 * 5
    assert fed.ledger.total.floats_up <= 4 * fed.ledger.total.rounds * (3 + 2 * 5)


def iteration(form: Any, rho: float, gamma: float) -> Any:
    """SOBA's matrix on the quadratic, in (x, y, v), in NumPy."""
    H, C, rho_f = form.hessian.numpy(), form.C.mean(0).numpy(), float(form.rho.mean())
    x, y = C.shape[1], len(H)
    D_x = np.hstack([rho_f * np.eye(x), np.zeros((x, y)), -C.T])
    D_y = np.hstack([-C, H, np.zeros((y, y))])
    D_v = np.hstack([np.zeros((y, x)), np.eye(y), H])
    return np.eye(x + 2 * y) - np.vstack([gamma * D_x, rho * D_y, rho * D_v])


def radius(matrix: Any) -> float:
    return float(np.abs(np.linalg.eigvals(matrix)).max())


@pytest.mark.parametrize("condition", [2.0, 50.0])
def test_the_outer_step_is_the_best_below_half_of_the_longest_stable_one(condition: float) -> None:
    """Against the spectral radius of SOBA's own matrix, on a grid."""
    problem = nested_quadratic(WIDE, **SMALL, condition=condition)
    found, _ = chosen(problem)
    grid = np.geomspace(0.01, 10.0, 300)
    radii = [radius(iteration(problem.exact, 1.0 / found.inner, gamma)) for gamma in grid]
    limit = next(gamma for gamma, value in zip(grid, radii, strict=True) if value >= 1.0)
    best = min(value for gamma, value in zip(grid, radii, strict=True) if gamma <= 0.5 * limit)
    assert found.outer_step < 0.55 * limit
    assert radius(iteration(problem.exact, 1.0 / found.inner, found.outer_step)) < best + 0.1 * (1.0 - best)


def test_a_small_model_of_a_larger_problem_is_stable_and_not_timid() -> None:
    problem = nested_quadratic(WIDE, clients=3, dimension=14, inner_dimension=20, condition=10.0)
    found, fed = chosen(problem)
    grid = np.geomspace(0.01, 10.0, 60)
    stable = [g for g in grid if radius(iteration(problem.exact, 1.0 / found.inner, g)) < 1.0]
    assert 0.2 * max(stable) < found.outer_step < 0.9 * max(stable)
    assert fed.ledger.by_cause["nested/directions"].rounds == 2 + 1 + 10 + 10
    assert fed.ledger.total.rounds <= 43


def test_third_derivatives_count() -> None:
    """g = ½ eˣ y² − y and f = ½ (y − 2)²: y* = e⁻ˣ, v* = −(y* − 2)e⁻ˣ, h = ½ (e⁻ˣ − 2)², h'' = 2e⁻²ˣ − 2e⁻ˣ."""
    problem = Nested(
        lambda x, y, batch: 0.5 * x.exp().sum() * y @ y - y.sum(), lambda x, y, batch: 0.5 * (y - 2.0).square().sum()
    ).on([torch.zeros(2, 1)] * 2, x=torch.tensor([-1.0]), y=torch.zeros(1), dtype=torch.float64)
    x, e = problem.start, torch.e
    y, v = (torch.tensor([value], dtype=torch.float64) for value in (e, -(e - 2) * e))
    model = measured_model(Oracle(federation(problem), "bilevel", Draw.of(0)), x, y, v)
    assert float(model.outer_curvature()) == pytest.approx(2 * e**2 - 2 * e, rel=1e-4)
    assert float(model.yy) == pytest.approx(1 / e, rel=1e-6)
    slow = chosen(problem, inner_steps=50, fresh=True)[0]  # gradient descent on h: 1/h'' contracts at once
    assert slow.outer_step == pytest.approx(1.0 / (2 * e**2 - 2 * e), rel=0.15)


def test_an_outer_objective_that_is_not_convex_gets_a_step_too() -> None:
    problem = Nested(
        lambda x, y, batch: 0.5 * (y - x).square().sum(), lambda x, y, batch: y.cos().sum() - 0.5 * (x @ x)
    ).on([torch.zeros(2, 1)] * 2, x=torch.full((2,), 0.3), y=torch.zeros(2), dtype=torch.float64)
    assert 0.05 < chosen(problem)[0].outer_step < 2.0


@pytest.mark.parametrize(
    ("kind", "exchanges"), [("minimax", None), ("compositional", 2 + 1 + 3 + 3), ("single-level", 1 + 3)]
)
def test_estimates_of_the_other_kinds(kind: str, exchanges: int | None) -> None:
    """The Hessian of a compositional problem is the identity, and a single-level problem has none: no products."""
    found, fed = chosen(CASES[kind]())
    assert all(value >= 0.0 for value in found)
    assert found.outer_step > 0.0
    if exchanges is not None:
        assert fed.ledger.total.rounds == exchanges
        assert (found.inner, found.least) == (1.0, 1.0)


# The rule


def test_the_rule() -> None:
    found = Curvature(inner=4.0, least=2.0, goal=1.0, outer=1.0, outer_step=0.5)
    assert StepRule("auto", "auto").sizes(found) == (0.25, 0.5)
    assert StepRule(0.1, "auto").sizes(found) == (0.1, 0.5)
    assert StepRule("auto", 0.3, share=0.5).sizes(found) == (0.125, 0.3)
    assert StepRule("auto", 0.3).record(found) == {"step": 0.25}
    assert StepRule("auto", "auto").record(Curvature()) == {}


def test_given_steps_ask_for_nothing_more() -> None:
    problem = nested_quadratic(WIDE, **SMALL)
    for make, exchanges in ((soba, 1), (saba, 1), (ma_soba, 1), (stocbio, 22)):
        fed = federation(problem)
        state = play(make(step=0.1, outer_step=0.1), problem, 1, fed=fed)
        assert (fed.ledger.total.rounds, state.curvature) == (exchanges, Curvature())
    fed = federation(problem)
    assert play(f2sa(step=0.1, outer_step=0.1), problem, 1, fed=fed).curvature.goal == 1.0  # the penalty needs it


# What is refused


@pytest.mark.parametrize("make", [soba, saba, ma_soba, stocbio, f2sa])
def test_an_inner_problem_that_is_not_convex_is_explained(make: Callable[..., Method]) -> None:
    problem = _inner(lambda x, y: 0.5 * y[0] ** 2 - 0.1 * y[1] ** 2 + x @ y)
    with pytest.raises(RunError, match=r"not convex in y near the start: its curvature is -0\.2 .* ridge"):
        play(make(), problem, 1)
    play(make(step=0.1, outer_step=0.1, **({"penalty": 10.0} if make is f2sa else {})), problem, 1)  # skips the check


def test_an_inner_problem_that_is_linear_is_explained() -> None:
    with pytest.raises(RunError, match="linear in y near the start"):
        play(soba(), _inner(lambda x, y: (x + 1.0) @ y), 1)


def _inner(loss: Callable[[Any, Any], Any]) -> Any:
    rows = [torch.zeros(2, 1, dtype=torch.float64)] * 3
    return Nested(lambda x, y, batch: loss(x, y), lambda x, y, batch: (y - 1.0).square().sum()).on(
        rows, x=torch.zeros(2), y=torch.zeros(2), dtype=torch.float64
    )


# Runs without settings


def run(method: str, rounds: int, folder: Path | None = None, **more: Any) -> Result:
    config = {
        "run": {"method": method, "problem": "nested-quadratic", "rounds": rounds, "dtype": "float64"},
        "problem": SMALL,
        "federation": {"mode": "vmap"},
    }
    return run_rounds(assemble(resolve(config)), folder, **more)


@pytest.mark.parametrize(
    ("method", "rounds"), [("soba", 40), ("saba", 40), ("ma-soba", 50), ("stocbio", 6), ("f2sa", 60)]
)
def test_without_settings_it_converges(method: str, rounds: int) -> None:
    """f(x) − f(x*) below 1e-6 of where it began, by steps that the record and the summary hold."""
    result = run(method, rounds)
    first, *_, last = (line["objective"] for line in result.history)
    form = assemble(resolve({"run": {"problem": "nested-quadratic", "method": method}, "problem": SMALL})).problem.exact
    best = float(form.objective(form.optimum))
    assert last - best < 1e-6 * (first - best)
    assert result.summary["final"]["step"] > 0.1
    assert result.summary["final"]["outer_step"] > 0.05
    assert "step" not in result.history[0]
    estimates = result.history[1]["communication"]["rounds"] - (
        result.history[2]["communication"]["rounds"] - result.history[1]["communication"]["rounds"]
    )
    assert 9 < estimates <= 43  # in the first round, and in the ledger


def test_a_resumed_run_keeps_its_steps_and_estimates_nothing_again(tmp_path: Path) -> None:
    first = run("soba", 2, tmp_path)
    resumed = run("soba", 4, tmp_path, resume=True)
    assert resumed.state.curvature == first.state.curvature != Curvature()
    rounds = [line["communication"]["rounds"] for line in resumed.history]
    assert [b - a for a, b in pairwise(rounds[1:])] == [1, 1, 1]
    assert resumed.summary["final"]["outer_step"] == first.summary["final"]["outer_step"]
