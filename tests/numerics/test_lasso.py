"""LASSO through a sketch: optimality, and the derivative against finite differences through the converged decode."""

import pytest
import torch
from torch.func import vmap

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.numerics.lasso import (
    fixed_conjugate_gradients,
    lasso,
    lasso_support,
    least_norm,
    pull_back,
    safe_step,
)
from coterie.numerics.sketches import Gaussian, Hadamard, SparseSign

P, D, STEPS = 20, 60, 500
wide = {"dtype": torch.float64}
SKETCHES = [Gaussian(P, D, 1), Hadamard(P, D, 1), SparseSign(P, D, 1)]
every = pytest.mark.parametrize("S", SKETCHES, ids=lambda S: type(S).__name__)


def normal(name, *shape):
    return Draw.of(0).phase(name).normal(*shape, dtype=torch.float64)


def sketched(S):
    """What a few large entries and some noise look like through a sketch."""
    y = torch.zeros(D, **wide)
    y[::12] = torch.tensor([2.0, -1.5, 1.0, 3.0, -2.0], **wide)
    return S.apply(y) + 0.05 * normal("x", P)


def matrix(S):
    return S.apply(torch.eye(S.dimension, **wide)).T


@every
@pytest.mark.parametrize("penalty", [0.05, 0.2])
def test_the_lasso_solution_is_optimal(S, penalty):
    """0 ∈ Sᵀ(Sy − x) + β ∂‖y‖₁."""
    x = sketched(S)
    y, support, gap = lasso(S, x, penalty, steps=STEPS)
    slope = S.adjoint(x - S.apply(y))
    assert float(gap) < 1e-10
    torch.testing.assert_close(slope[support], penalty * y[support].sign(), rtol=0, atol=1e-8)
    assert float(slope[~support].abs().max()) <= penalty + 1e-8
    assert 0 < int(support.sum()) <= P
    assert torch.equal(y != 0.0, support)
    assert torch.equal(lasso_support(S, x, y, penalty), support)


def test_a_penalty_above_every_slope_gives_zero():
    S, x = SKETCHES[0], normal("x", P)
    y, support, gap = lasso(S, x, 1.01 * float(S.adjoint(x).abs().max()), steps=50)
    assert not y.any()
    assert not support.any()
    assert float(gap) == 0.0


def slope_by_differences(f, x, v, h=1e-6):
    """(∂f/∂x)ᵀv, by central differences in every entry of x at once."""
    steps = h * torch.eye(len(x), **wide)
    return (vmap(f)(x + steps) - vmap(f)(x - steps)) @ v / (2 * h)


@every
@pytest.mark.parametrize("penalty", [0.05, pytest.param(0.2, marks=pytest.mark.slow)])
def test_pulling_back_is_the_transposed_derivative_of_the_lasso(S, penalty):
    x, v = sketched(S), normal("v", D)
    support = lasso(S, x, penalty, steps=STEPS).support
    expected = slope_by_differences(lambda at: lasso(S, at, penalty, steps=STEPS).y, x, v)
    found = pull_back(S, v, steps=100, support=support)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    columns = matrix(S)[:, support]
    torch.testing.assert_close(found, torch.linalg.pinv(columns.T) @ v[support])


@every
def test_without_a_penalty_the_decode_is_the_nearest_solution_and_its_derivative_the_pseudo_inverse(S):
    x, v, start = normal("x", P), normal("v", D), normal("start", D)
    y = least_norm(S, x, steps=60, start=start)
    M = matrix(S)
    torch.testing.assert_close(M @ y, x)
    torch.testing.assert_close(y, start + torch.linalg.pinv(M) @ (x - M @ start))
    torch.testing.assert_close(least_norm(S, x, steps=60), torch.linalg.pinv(M) @ x)
    expected = slope_by_differences(lambda at: least_norm(S, at, steps=60, start=start), x, v)
    torch.testing.assert_close(pull_back(S, v, steps=60), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pull_back(S, v, steps=60), torch.linalg.pinv(M).T @ v)


def test_gradient_descent_from_a_start_ends_at_the_nearest_solution():
    """So β = 0 of the paper's decode, run from θ₀, is the sketch of a difference."""
    S, x, start = SKETCHES[0], normal("x", P), normal("start", D)
    y = start
    for _ in range(1000):
        y = y + safe_step(S, None) * S.adjoint(x - S.apply(y))
    torch.testing.assert_close(y, least_norm(S, x, steps=60, start=start))


def test_pulling_back_through_a_support_larger_than_the_sketch_is_least_squares():
    """An unfinished decode may have more than p entries; then S_UᵀS_U is singular, and CG still fine."""
    S, v = SKETCHES[0], normal("v", D)
    support = torch.arange(D) < P + 15
    expected = torch.linalg.pinv(matrix(S)[:, support].T) @ v[support]
    torch.testing.assert_close(pull_back(S, v, steps=200, support=support), expected)


@every
def test_everything_runs_under_vmap(S):
    x, v = normal("x", 3, P), normal("v", 3, D)
    points = vmap(lambda at: lasso(S, at, 0.1, steps=30))(x)
    for i in range(3):
        torch.testing.assert_close(points.y[i], lasso(S, x[i], 0.1, steps=30).y)
    pulled = vmap(lambda at, to: pull_back(S, at, steps=60, support=to))(v, points.support)
    for i in range(3):
        torch.testing.assert_close(pulled[i], pull_back(S, v[i], steps=60, support=points.support[i]))


def test_conjugate_gradients_stand_still_once_they_are_done():
    H = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0], **wide))
    b = torch.tensor([3.0, 4.0, 5.0, 0.0], **wide)
    expected = torch.tensor([1.0, 2.0, 5.0, 0.0], **wide)
    torch.testing.assert_close(fixed_conjugate_gradients(lambda v: H @ v, b, steps=3), expected)
    torch.testing.assert_close(fixed_conjugate_gradients(lambda v: H @ v, b, steps=100), expected)
    assert not fixed_conjugate_gradients(lambda v: H @ v, 0 * b, steps=5).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 3, 17])
def test_conjugate_gradients_do_not_leave_the_range_of_a_singular_matrix(rank, dtype):
    """As the support of a sparse decode gives them: steps beyond the rank must change nothing."""
    F = normal("F", 40, rank).to(dtype)
    b = F @ normal("c", rank).to(dtype)
    found = fixed_conjugate_gradients(lambda v: F @ (F.T @ v), b, steps=200)
    expected = torch.linalg.pinv(F.double() @ F.double().T, rtol=1e-10) @ b.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_fewer_steps_leave_a_larger_gap():
    S = SKETCHES[0]
    gaps = [float(lasso(S, sketched(S), 0.05, steps=steps).gap) for steps in (1, 10, 100, STEPS)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-8 < gaps[0]


def test_a_step_that_would_diverge_is_explained():
    S, x = Gaussian(40, 60, 1), normal("x", 40)  # ‖S‖² ≈ 3.3
    largest = 1 / S.norm_squared
    with pytest.raises(UsageError, match=rf"step of 1 is above 1/‖S‖² = {largest:.4g}.*lower it, or leave it out"):
        lasso(S, x, 0.01, steps=10, step=1.0)
    assert safe_step(S, None) == largest
    assert safe_step(S, 0.9 * largest) == 0.9 * largest
    y = torch.zeros(60, **wide)
    for _ in range(200):  # what would happen
        y = y + S.adjoint(x - S.apply(y))
    assert not float(y.norm()) < 1e6


@pytest.mark.parametrize("S", SKETCHES[:1], ids=lambda S: type(S).__name__)
def test_the_decode_is_fista_that_restarts_where_momentum_points_uphill(S):
    """Step by step with matrices (Beck and Teboulle 2009; O'Donoghue and Candès 2015, gradient scheme)."""
    A, x, beta, step = S.apply(torch.eye(D, **wide)).T, sketched(S), 0.05, safe_step(S, None)
    y = z = torch.zeros(D, **wide)
    t, restarts = 1.0, 0
    for steps in range(1, 201):
        u = z + step * A.T @ (x - A @ z)
        new = u.sign() * (u.abs() - step * beta).clamp(min=0.0)
        if float((z - new) @ (new - y)) > 0.0:
            t, z, restarts = (1.0 + 5.0**0.5) / 2.0, new, restarts + 1
        else:
            after = (1.0 + (1.0 + 4.0 * t**2) ** 0.5) / 2.0
            t, z = after, new + (t - 1.0) / after * (new - y)
        y = new
        if steps in (1, 7, 30, 60, 120, 200):
            torch.testing.assert_close(lasso(S, x, beta, steps=steps).y, y)
    assert restarts >= 2
