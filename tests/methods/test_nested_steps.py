"""Steps that are chosen by estimates: the estimates, the rule, the record, what is refused, and that it converges."""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

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
from coterie.methods.nested.steps import Curvature, StepRule, estimated_curvature
from coterie.problems import Context
from coterie.problems.catalogue.nested_quadratic import nested_quadratic
from coterie.problems.nested import Nested

SMALL: dict[str, Any] = {"clients": 4, "dimension": 3, "inner_dimension": 5}


def estimates(problem: Any) -> tuple[Curvature, Any]:
    """The estimates at the start, and the federation that made them."""
    fed = federation(problem)
    return estimated_curvature(fed, problem.start, problem.inner_start, problem.task.kind), fed


# The estimates


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_estimates_are_the_curvatures_of_the_quadratic(dtype: torch.dtype) -> None:
    problem = nested_quadratic(Context(0, dtype), **SMALL, condition=20.0)
    form = problem.exact
    values = torch.linalg.eigvalsh(form.hessian)
    J = torch.linalg.solve(form.hessian, form.C.mean(0))
    outer = torch.linalg.eigvalsh(form.rho.mean() * torch.eye(3, dtype=torch.float64) + J.T @ J)
    found, fed = estimates(problem)
    assert found.inner == pytest.approx(float(values[-1]), rel=0.06)  # two digits
    assert found.least == pytest.approx(float(values[0]), rel=0.06)
    assert found.goal == 1.0
    assert 0.8 * float(outer[-1]) < found.outer < 1.05 * float(outer[-1])  # two power iterations, from below
    assert found.condition == pytest.approx(found.inner / found.least)
    assert set(fed.ledger.by_cause) == {"fednest/hessian-product", "nested/directions"}
    assert fed.ledger.by_cause["nested/directions"].rounds == 2 + 1 + 2 * 3
    assert fed.ledger.total.rounds <= 80


def test_the_outer_curvature_includes_third_derivatives() -> None:
    """g = ½ eˣ y² − y and f = ½ (y − 2)²: y* = e⁻ˣ, h = ½ (e⁻ˣ − 2)², h'' = 2e⁻²ˣ − 2e⁻ˣ."""
    problem = Nested(
        lambda x, y, batch: 0.5 * x.exp().sum() * y @ y - y.sum(), lambda x, y, batch: 0.5 * (y - 2.0).square().sum()
    ).on([torch.zeros(2, 1)] * 2, x=torch.tensor([-1.0]), y=torch.zeros(1), dtype=torch.float64)
    e = 2.718281828459045
    found, _ = estimates(problem)
    assert found.outer == float(f"{2 * e**2 - 2 * e:.2g}")
    assert found.inner == float(f"{1 / e:.2g}")


@pytest.mark.parametrize(
    ("kind", "exchanges"), [("minimax", None), ("compositional", 2 + 1 + 2 * 3), ("single-level", 1 + 1 + 2)]
)
def test_estimates_of_the_other_kinds(kind: str, exchanges: int | None) -> None:
    """The Hessian of a compositional problem is the identity, and a single-level problem has none: no products."""
    found, fed = estimates(CASES[kind]())
    assert all(value >= 0.0 for value in found)
    assert found.outer > 0.0
    if exchanges is not None:
        assert fed.ledger.total.rounds == exchanges
        assert (found.inner, found.least) == (1.0, 1.0)


def test_every_seed_and_every_mode_gets_the_same_steps() -> None:
    problem = nested_quadratic(WIDE, **SMALL)
    assert len({estimates(problem)[0] for _ in range(2)}) == 1


# The rule


def test_the_rule() -> None:
    c = Curvature(inner=4.0, least=2.0, goal=1.0, outer=0.5)
    assert StepRule("auto", "auto").sizes(c) == (0.25, 1.0 / ((1 + 2) * 0.5))
    assert StepRule(0.1, "auto", inner_steps=4, averaging=0.5).sizes(c) == (0.1, 1.0 / ((2 + 0.5) * 0.5))
    assert StepRule("auto", 0.3, share=0.5).sizes(c) == (0.125, 0.3)
    assert c._replace(least=0.0).condition == 100.0
    assert StepRule("auto", 0.3).record(c) == {"step": 0.25}
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
    with pytest.raises(RunError, match=r"not convex in y at the start: its curvature is -0\.2 .* ridge"):
        play(make(), problem, 1)
    play(make(step=0.1, outer_step=0.1, **({"penalty": 10.0} if make is f2sa else {})), problem, 1)  # skips the check


def test_an_inner_problem_that_is_linear_is_explained() -> None:
    with pytest.raises(RunError, match="linear in y at the start"):
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
    assert result.summary["final"]["outer_step"] > 0.1
    assert "step" not in result.history[0]
    estimates = result.history[1]["communication"]["rounds"] - (
        result.history[2]["communication"]["rounds"] - result.history[1]["communication"]["rounds"]
    )
    assert 9 < estimates <= 80  # in the first round, and in the ledger


def test_a_resumed_run_keeps_its_steps_and_estimates_nothing_again(tmp_path: Path) -> None:
    first = run("soba", 2, tmp_path)
    resumed = run("soba", 4, tmp_path, resume=True)
    assert resumed.state.curvature == first.state.curvature != Curvature()
    rounds = [line["communication"]["rounds"] for line in resumed.history]
    assert [b - a for a, b in pairwise(rounds[1:])] == [1, 1, 1]
    assert resumed.summary["final"]["outer_step"] == first.summary["final"]["outer_step"]
