"""The terms of the generalisation bounds of 'Adaptively weighted nodes' (Theorems 1 and 2), with a run's numbers."""

import math
from typing import NamedTuple

from coterie.errors import UsageError
from coterie.problems.base import Problem


class BoundTerms(NamedTuple):
    """The terms, each without its universal constant.

    Args:
        validation: √((ν + ln 1/δ)/n_valid), the first term of Theorem 1; training alone has it too.
        training: ℓ₀/√μ · ((ν + K + ln 1/δ) K b²/n_train)^¼, the second term of Theorem 1.
        weights: ε(n_valid, n_train) of eq. 10, how far the learned weights may be from the best ones.
        friends: √((ν + J + ln 1/δ)/N_ε), the first term of Theorem 2.
        strangers: ε (K − J)/(b √N_ε), its second term.
        distance: 2 ε G, its third term.
    """

    validation: float
    training: float
    weights: float
    friends: float
    strangers: float
    distance: float

    @property
    def theorem_1(self) -> float:
        """The bound that does not depend on the statistical distance G."""
        return self.validation + self.training

    @property
    def theorem_2(self) -> float:
        """The bound that does."""
        return self.friends + self.strangers + self.distance


def bound_terms(
    problem: Problem,
    *,
    cap: float,
    distance: float,
    complexity: float | None = None,
    steepness: float = 1.0,
    confidence: float = 0.05,
    growth: float = 1.0,
) -> BoundTerms:
    """The terms of Theorems 1 and 2 for the sizes of a problem and what a run of `bilevel` recorded.

    Universal constants are 1, so the terms say what grows and shrinks, not how large the error is.

    Args:
        problem: its clients, rows and known friends are K, n_train (of the smallest client), n_valid and J.
        cap: b, the run's method.cap.
        distance: G of eq. 9, the run's statistical_distance.
        complexity: ν of Assumption 4; the number of parameters if not set.
        steepness: ℓ₀/√μ.
        confidence: δ.
        growth: r of the error bound condition (Assumption 3).

    Example:
        >>> from coterie.problems import Context
        >>> from coterie.problems.catalogue.quadratic import quadratic
        >>> problem = quadratic(Context(0), clients=4, friends=2, dimension=3, rows=100)
        >>> terms = bound_terms(problem, cap=0.5, distance=0.0)
        >>> terms.distance, round(terms.theorem_1, 2)
        (0.0, 0.88)
    """
    if problem.target is None or problem.target.valid is None:
        raise UsageError("the bounds are about the target's validation rows; this problem has none. Give a target.")
    K, J = problem.clients, problem.clients if problem.friends is None else problem.friends
    n_train, n_valid = int(problem.train.counts.min()), int(problem.target.valid.count)
    nu = float(problem.start.numel()) if complexity is None else complexity
    log = math.log(1.0 / confidence)
    few, many = (nu + log) / n_valid, (nu + K + log) * K * cap**2 / n_train
    epsilon = few ** (1 / (2 * growth)) + steepness * many ** (1 / (4 * growth))
    rows = n_train / (cap**2 * J + epsilon**2 * (K - J))
    return BoundTerms(
        few**0.5,
        steepness * many**0.25,
        epsilon,
        math.sqrt((nu + J + log) / rows),
        epsilon * (K - J) / (cap * math.sqrt(rows)),
        2.0 * epsilon * distance,
    )
