"""The bound terms of weighted nodes: by hand, and how they move with b, n and G."""

import math

import pytest

from coterie.errors import UsageError
from coterie.federation import pack
from coterie.methods.weights.bounds import BoundTerms, bound_terms
from coterie.problems import Weighting
from coterie.problems.base import Context
from coterie.problems.catalogue.quadratic import quadratic


def terms(rows: int = 400, cap: float = 0.5, distance: float = 1.0, growth: float = 1.0) -> BoundTerms:
    problem = quadratic(Context(seed=0), clients=5, friends=2, dimension=3, rows=rows)
    return bound_terms(problem, cap=cap, distance=distance, complexity=7.0, steepness=2.0, growth=growth)


def test_the_terms_are_those_of_the_theorems() -> None:
    problem = quadratic(Context(seed=0), clients=5, friends=2, dimension=3, rows=400)
    n_valid, log = int(problem.target.valid.count), math.log(20.0)
    found = terms(growth=2.0)
    inner = (7 + 5 + log) / (400 / (5 * 0.25))
    epsilon = ((7 + log) / n_valid) ** (1 / 4) + 2.0 * inner ** (1 / 8)
    N = 400 / (0.25 * 2 + epsilon**2 * 3)
    assert found == pytest.approx(
        (
            math.sqrt((7 + log) / n_valid),
            2.0 * inner**0.25,
            epsilon,
            math.sqrt((7 + 2 + log) / N),
            epsilon * 3 / (0.5 * math.sqrt(N)),
            2 * epsilon,
        )
    )
    assert found.theorem_1 == pytest.approx(sum(found[:2]))
    assert found.theorem_2 == pytest.approx(sum(found[3:]))


def test_more_rows_and_a_smaller_distance_lower_the_bounds() -> None:
    assert terms(rows=4000).training < terms().training
    assert terms(cap=0.25).training < terms().training
    assert terms(distance=0.0).theorem_2 < terms().theorem_2
    assert terms(distance=0.0).distance == 0.0


def test_without_validation_rows_there_is_no_bound() -> None:
    problem = quadratic(Context(seed=0), clients=2, friends=1, dimension=2, rows=10)
    alone = Weighting(problem.task, pack([c.columns for c in map(problem.train.client, range(2))]), None, problem.start)
    with pytest.raises(UsageError, match="validation rows"):
        bound_terms(alone, cap=1.0, distance=0.0)
