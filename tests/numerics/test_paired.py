"""Paired tests against scipy and by hand."""

from itertools import product
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coterie.numerics.paired import flip_test, holm, least_p, ranks, t_test

NUMBERS = st.floats(-100, 100).map(lambda v: round(v, 3))


@given(st.lists(NUMBERS, min_size=2, max_size=9).filter(lambda v: len(set(v)) > 1))
def test_the_t_test_is_scipys(differences: list[float]) -> None:
    assert t_test(differences) == pytest.approx(stats.ttest_1samp(differences, 0.0).pvalue, abs=1e-9)


def test_equal_differences() -> None:
    assert t_test([0.0, 0.0, 0.0]) == 1.0
    assert t_test([0.5, 0.5]) == 0.0
    assert t_test([1.0]) is None


@given(st.lists(NUMBERS, min_size=1, max_size=8))
def test_the_exact_test_is_a_share_of_the_sign_patterns(differences: list[float]) -> None:
    p = flip_test(differences)
    assert p is not None
    n = len(differences)
    assert least_p(n) <= p <= 1.0
    assert (p * 2**n) == round(p * 2**n)
    if all(d > 0 for d in differences):
        assert p == least_p(n)
    assert flip_test([-d for d in differences]) == p


def test_the_exact_test_counts_sign_patterns() -> None:
    differences = [0.3, -0.1, 0.8, 0.2, 0.05, 0.4]
    zeros = [0.0] * 6
    theirs = stats.permutation_test(
        (differences, zeros), lambda a, b: (a - b).sum(), permutation_type="samples", n_resamples=float("inf")
    )
    assert flip_test(differences) == pytest.approx(theirs.pvalue)
    patterns = [sum(map(mul, signs, differences)) for signs in product((1, -1), repeat=len(differences))]
    assert flip_test(differences) == sum(abs(p) >= abs(sum(differences)) - 1e-12 for p in patterns) / len(patterns)


def test_what_three_and_six_seeds_can_show() -> None:
    assert flip_test([9.0, 9.1, 9.2]) == least_p(3) == 0.25
    assert flip_test([1.0] * 6) == least_p(6) == 0.03125
    assert flip_test([]) is None
    assert flip_test([1.0] * 30) is None


def test_holm_by_hand() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_ranks_share_places() -> None:
    assert ranks([0.9, 0.5, 0.9, 0.1], higher_is_better=True) == [1.5, 3.0, 1.5, 4.0]
    assert ranks([0.9, 0.5, 0.1], higher_is_better=False) == [3.0, 2.0, 1.0]


@given(st.lists(NUMBERS, min_size=1, max_size=9))
def test_ranks_are_scipys(values: list[float]) -> None:
    assert ranks(values, higher_is_better=False) == stats.rankdata(values).tolist()
