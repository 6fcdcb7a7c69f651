"""SOBA, SABA and MA-SOBA: the directions, the centralised algorithms, variance reduction, rounds and figures."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import grad

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "problems"))

from learners import WIDE, federation
from nested_cases import CASES, best_inner, finite_differences, mean_inner, mean_outer

from coterie.methods.nested.works import joint_directions
from coterie.numerics import Draw
from coterie.problems.catalogue.nested_quadratic import nested_quadratic

SMALL: dict[str, Any] = {"clients": 4, "dimension": 3, "inner_dimension": 5}


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
