"""Robust means: agreement, equivariance, breakdown, and each against its definition written out."""

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.numerics import Draw
from coterie.numerics.robust import coordinate_median, geometric_median, krum_scores, multi_krum, trimmed_mean

quick = settings(max_examples=30, deadline=None, derandomize=True, database=None)
numbers = st.floats(-100, 100).map(lambda x: round(x, 3))
matrices = st.tuples(st.integers(3, 12), st.integers(1, 5)).flatmap(
    lambda shape: arrays.arrays(np.float64, shape, elements=numbers)
)


def bearable(n: int) -> int:
    """The largest f that every rule here bears among n rows."""
    return max(0, (n - 3) // 2)


RULES = {
    "trimmed": lambda X: trimmed_mean(X, bearable(len(X))),
    "median": coordinate_median,
    "geometric": geometric_median,
    "krum": lambda X: multi_krum(X, bearable(len(X)), 1),
    "multi-krum": lambda X: multi_krum(X, bearable(len(X)), len(X) - bearable(len(X))),
}
every = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def cloud(n: int, d: int, seed: int = 0) -> Tensor:
    return Draw.of(seed).normal(n, d, dtype=torch.float64)


@every
@given(st.integers(1, 12), arrays.arrays(np.float64, 4, elements=numbers))
@quick
def test_where_all_agree_it_is_the_mean(rule, n, row):
    X = torch.tensor(row).expand(n, -1)
    torch.testing.assert_close(rule(X), X[0], rtol=1e-12, atol=1e-12)


@every
@given(matrices, st.floats(-50, 50), st.floats(0.01, 20))
@quick
def test_it_commutes_with_translations_and_scalings(rule, X, shift, scale):
    X = torch.tensor(X)
    X = X + 1e-3 * cloud(*X.shape)  # without ties, which rounding may break either way
    torch.testing.assert_close(rule(scale * X + shift), scale * rule(X) + shift, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rule(-X), -rule(X), rtol=1e-4, atol=1e-4)


@every
@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_the_order_of_the_rows_does_not_matter(rule, n):
    X = cloud(n, 6)
    for seed in range(5 if n > 2 else 0):  # of two rows Krum takes the first
        torch.testing.assert_close(rule(X[Draw.of(seed).permutation(n)]), rule(X), rtol=1e-6, atol=1e-6)
    assert rule(X).shape == (6,)


@every
@pytest.mark.parametrize("size", [1.0, 1e3, 1e9, 1e30])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "together"])
def test_f_arbitrary_rows_cannot_move_it_far(rule, size, apart):
    """9 honest rows near a point, 6 wherever they like: the result stays within the honest rows' range, a bit wider."""
    honest = 5.0 + cloud(15, 8)[:9]
    lies = size * cloud(6, 8, seed=1) if apart else size * torch.ones(6, 8, dtype=torch.float64)
    found = rule(torch.cat([lies[:3], honest, lies[3:]]))
    radius = (honest - honest.mean(0)).norm(dim=1).max()
    assert (found - honest.mean(0)).norm() <= 3.0 * radius


@given(st.integers(1, 5), st.integers(0, 2**20))
@quick
def test_coordinates_stay_within_the_range_of_the_honest(f, seed):
    n, d = 2 * f + 1, 4
    honest = cloud(n, d, seed)[f:]
    lies = 10.0 ** Draw.of(seed).integers(40, f, d).double() * cloud(f, d, seed + 1)
    for found in (trimmed_mean(torch.cat([lies, honest]), f), coordinate_median(torch.cat([honest, lies]))):
        assert (found >= honest.min(0).values - 1e-12).all()
        assert (found <= honest.max(0).values + 1e-12).all()


@given(matrices)
@quick
def test_the_median_is_numpys(X):
    np.testing.assert_allclose(coordinate_median(torch.tensor(X)), np.median(X, axis=0), rtol=1e-12, atol=1e-12)


def test_a_trimmed_mean_by_hand():
    X = torch.tensor([[1.0, 50.0], [2.0, -9.0], [3.0, 3.0], [100.0, 4.0], [-7.0, 5.0]])
    assert trimmed_mean(X, 1).tolist() == [2.0, 4.0]
    assert trimmed_mean(X, 2).tolist() == coordinate_median(X).tolist() == [2.0, 4.0]
    torch.testing.assert_close(trimmed_mean(X, 0), X.mean(0))
    with pytest.raises(ValueError, match="3 rows cut from both ends of 5 leave none"):
        trimmed_mean(X, 3)


@pytest.mark.parametrize(("n", "f"), [(5, 1), (15, 6), (9, 0), (4, 2)])
def test_krum_scores_are_those_of_the_definition(n, f):
    X = cloud(n, 7)
    near = max(1, n - f - 2)
    distances = [[float((X[i] - X[j]).square().sum()) for j in range(n) if j != i] for i in range(n)]
    expected = torch.tensor([sum(sorted(row)[:near]) for row in distances], dtype=torch.float64)
    torch.testing.assert_close(krum_scores(X, f), expected, rtol=1e-10, atol=1e-10)
    best = expected.argsort()
    torch.testing.assert_close(multi_krum(X, f, 1), X[best[0]])
    torch.testing.assert_close(multi_krum(X, f, 3), X[best[:3]].mean(0))


def test_krum_tells_float32_rows_apart_that_differ_in_the_last_digits():
    X = 100.0 + 1e-4 * cloud(7, 50).float()
    X[6] += 1e-3
    exact = (X.double()[:, None] - X.double()[None]).square().sum(2)
    assert int(krum_scores(X, 1).argmax()) == 6
    torch.testing.assert_close(krum_scores(X, 1), exact.sort(1).values[:, 1:5].sum(1), rtol=1e-3, atol=0)


def test_the_geometric_median_is_stationary():
    """Unit vectors to the rows sum to 0, and nothing near is nearer to all."""
    X = cloud(11, 3)
    z = geometric_median(X, tolerance=1e-12, steps=1000)
    units = (X - z) / (X - z).norm(dim=1, keepdim=True)
    assert float(units.sum(0).norm()) < 1e-6
    for direction in torch.eye(3, dtype=torch.float64):
        for h in (-0.01, 0.01):
            assert (X - z - h * direction).norm(dim=1).sum() > (X - z).norm(dim=1).sum()


def test_on_a_line_the_geometric_median_is_the_median():
    X = torch.tensor([[0.0], [1.0], [10.0], [11.0], [1e6]], dtype=torch.float64)
    torch.testing.assert_close(geometric_median(X, steps=10_000), X[2], rtol=1e-4, atol=1e-4)


@every
def test_types_are_kept(rule):
    assert rule(cloud(9, 3).float()).dtype == torch.float32
