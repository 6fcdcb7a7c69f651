"""SOBA keeps what every method must keep, and solves a problem whose solution is known."""

import torch
from coterie_soba import minisoba

import coterie
from coterie.problems import Context
from coterie.problems.catalogue.nested_quadratic import nested_quadratic
from coterie.problems.nested import NestedProblem
from coterie.testing import check_method


def problem(context: Context) -> NestedProblem:
    """A small problem whose solution is known."""
    return nested_quadratic(context, clients=5, dimension=3, inner_dimension=4)


def test_it_keeps_what_every_method_must_keep() -> None:
    """The conformance checks of coterie."""
    check_method(minisoba, problem)


def test_it_finds_the_solution() -> None:
    """With full batches, to 1e-6."""
    known = problem(Context(dtype=torch.float64))
    fit = coterie.fit(known, minisoba(step=0.2, outer_step=0.1, batch="all"), rounds=600, mode="vmap")
    x = fit.variables["x"]
    assert float((x - known.exact.optimum).norm()) < 1e-6
