"""Ranks over problems: Demšar's tables, ties, and which methods are not apart."""

import pytest

from coterie.numerics.ranking import alike, average_ranks, critical_difference, friedman_p

Q_05 = {
    2: 1.960,
    3: 2.343,
    4: 2.569,
    5: 2.728,
    6: 2.850,
    7: 2.949,
    8: 3.031,
    9: 3.102,
    10: 3.164,
}  # Demšar 2006, Table 5


@pytest.mark.parametrize(("methods", "q"), Q_05.items())
def test_critical_values_are_those_of_the_table(methods: int, q: float) -> None:
    scale = (methods * (methods + 1) / (6 * 12)) ** 0.5
    assert critical_difference(methods, 12) == pytest.approx(q * scale, abs=1e-3 * scale)


def test_the_papers_example() -> None:
    """Four classifiers on 14 data sets: the difference is 1.25 at the 5 % level, 1.12 at 10 %."""
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    assert critical_difference(4, 14, 0.10) == pytest.approx(1.12, abs=0.005)


def test_average_ranks_share_ties_and_sum_to_the_same() -> None:
    values = {"a": [0.9, 0.5, 0.7], "b": [0.9, 0.6, 0.6], "c": [0.1, 0.7, 0.5]}
    ranked = average_ranks(values)
    assert ranked == {"a": pytest.approx(5.5 / 3), "b": pytest.approx(5.5 / 3), "c": pytest.approx(7 / 3)}
    assert sum(ranked.values()) == pytest.approx(6)
    assert next(iter(average_ranks({"worse": [0.1], "better": [0.2]}))) == "better"


def test_friedman_finds_what_is_consistent_and_only_that() -> None:
    same = {"a": [3.0] * 8, "b": [2.0] * 8, "c": [1.0] * 8}
    assert friedman_p(same) == pytest.approx(0.000335, abs=1e-6)  # χ² = 16 with 2 degrees: exp(−8)
    mixed = {"a": [1.0, 2.0, 3.0], "b": [2.0, 3.0, 1.0], "c": [3.0, 1.0, 2.0]}
    assert friedman_p(mixed) == pytest.approx(1.0)
    assert friedman_p({"a": [1.0, 2.0], "b": [2.0, 1.0]}) is None
    assert friedman_p({"a": [1.0], "b": [2.0], "c": [3.0]}) is None


def test_groups_are_maximal_and_may_overlap() -> None:
    ranked = {"a": 1.0, "b": 1.8, "c": 2.5, "d": 3.1, "e": 6.0}
    assert alike(ranked, 1.6) == [("a", "b", "c"), ("b", "c", "d")]
    assert alike(ranked, 0.5) == []
    assert alike({"a": 1.0, "b": 2.0, "c": 2.5}, 1.0) == [("b", "c")]  # a difference of just so much is one
    assert alike(ranked, 9.0) == [tuple(ranked)]
