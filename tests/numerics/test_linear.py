"""Neumann series and conjugate gradients against dense linear algebra."""

import math

import pytest
import torch

from coterie.numerics import conjugate_gradients, neumann


def symmetric(eigenvalues, seed=0):
    """A float64 matrix with the given eigenvalues in a random basis."""
    d = len(eigenvalues)
    basis, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    return basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.T


def vector(d, seed=1):
    return torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spread(low, high, d):
    return torch.linspace(low, high, d, dtype=torch.float64).tolist()


class Counted:
    """A matrix known by its products, which are counted."""

    def __init__(self, matrix):
        self.matrix, self.products = matrix, 0

    def __call__(self, p):
        self.products += 1
        return self.matrix @ p


# ---- Neumann series


@pytest.mark.parametrize("terms", [1, 2, 3, 10, 57])
def test_neumann_is_the_truncated_series_and_costs_one_product_less_than_terms(terms):
    H, b, ell = Counted(symmetric(spread(0.5, 3.0, 6))), vector(6), 4.0
    M = torch.eye(6, dtype=torch.float64) - H.matrix / ell
    series = sum(torch.linalg.matrix_power(M, n) @ b for n in range(terms)) / ell
    torch.testing.assert_close(neumann(H, b, scale=ell, terms=terms), series, rtol=1e-12, atol=1e-13)
    assert H.products == terms - 1


def test_neumann_of_no_terms_is_the_empty_sum():
    assert neumann(lambda p: 2 * p, torch.ones(3), scale=2.0, terms=0).tolist() == [0.0, 0.0, 0.0]


def test_neumann_error_is_one_minus_mu_over_l_to_the_number_of_terms():
    mu, ell = 0.4, 2.0
    H, b = symmetric(spread(mu, ell, 5)), vector(5)
    solution = torch.linalg.solve(H, b)
    for terms in (5, 20, 80):
        error = (neumann(H.mv, b, scale=ell, terms=terms) - solution).norm()
        assert error <= (1 - mu / ell) ** terms * solution.norm() * (1 + 1e-6)

    slowest = torch.linalg.eigh(H).eigenvectors[:, 0]  # along which the bound is met with equality
    for terms in (5, 20, 80):
        error = (neumann(H.mv, slowest, scale=ell, terms=terms) - slowest / mu).norm()
        assert float(error) == pytest.approx((1 - mu / ell) ** terms / mu, rel=1e-5)


# ---- conjugate gradients


@pytest.mark.parametrize("d", [1, 2, 5, 12, 25])
@pytest.mark.parametrize("seed", range(4))
def test_conjugate_gradients_are_exact_after_d_steps(d, seed):
    H, b = Counted(symmetric(spread(1.0, 20.0, d), seed)), vector(d, seed + 10)
    found = conjugate_gradients(H, b, steps=d)
    torch.testing.assert_close(found.x, torch.linalg.solve(H.matrix, b), rtol=0, atol=1e-10)
    assert found.residual <= 1e-10
    assert found.steps == H.products <= d


def test_as_many_steps_suffice_as_there_are_distinct_eigenvalues():
    H, b = symmetric([1.0, 1.0, 4.0, 4.0, 4.0, 9.0, 9.0]), vector(7)
    assert not conjugate_gradients(H.mv, b, steps=2, tolerance=1e-10).converged
    found = conjugate_gradients(H.mv, b, steps=7, tolerance=1e-10)
    assert (found.steps, found.converged) == (3, True)


def test_each_iterate_is_the_best_of_its_krylov_space():
    H, b = symmetric(spread(0.1, 8.0, 8)), vector(8)
    for steps in (1, 2, 4):
        K = torch.linalg.qr(torch.stack([torch.linalg.matrix_power(H, k) @ b for k in range(steps)], dim=1)).Q
        best = K @ torch.linalg.solve(K.T @ H @ K, K.T @ b)
        found = conjugate_gradients(H.mv, b, steps=steps)
        torch.testing.assert_close(found.x, best, rtol=0, atol=1e-10)
        assert (found.steps, found.converged) == (steps, False)
        assert found.residual == pytest.approx(float((b - H @ best).norm()), rel=1e-9)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-4, 1e-8])
def test_it_stops_as_soon_as_the_relative_residual_is_within_tolerance(tolerance):
    H, b = symmetric(spread(0.01, 1.0, 40)), 1e3 * vector(40)
    found = conjugate_gradients(H.mv, b, steps=200, tolerance=tolerance)
    assert found.converged
    assert float((b - H @ found.x).norm()) <= tolerance * float(b.norm()) * (1 + 1e-6)
    before = conjugate_gradients(H.mv, b, steps=found.steps - 1, tolerance=tolerance)
    assert not before.converged
    assert before.residual > tolerance * float(b.norm())


def test_no_steps_return_the_start():
    H, b = symmetric([1.0, 2.0]), vector(2)
    found = conjugate_gradients(H.mv, b, steps=0)
    assert found.x.tolist() == [0.0, 0.0]
    assert (found.residual, found.steps, found.converged) == (pytest.approx(float(b.norm())), 0, False)


def test_non_positive_curvature_ends_the_walk_at_the_point_before_it():
    H, b = torch.diag(torch.tensor([3.0, 1.0, -1.5])), torch.ones(3)
    first = conjugate_gradients(H.mv, b, steps=1)
    found = conjugate_gradients(H.mv, b, steps=50)  # the second direction has negative curvature
    assert torch.equal(found.x, first.x)
    assert (found.steps, found.converged) == (1, False)
    assert found.residual == pytest.approx(float((b - H @ found.x).norm()), rel=1e-5)


@pytest.mark.parametrize("H", [-torch.eye(3), torch.zeros(3, 3), torch.full((3, 3), math.nan)])
def test_a_bad_first_direction_leaves_the_start_untouched(H):
    found = conjugate_gradients(H.mv, torch.ones(3), steps=5)
    assert found.x.tolist() == [0.0, 0.0, 0.0]
    assert (found.steps, found.converged) == (0, False)
    assert found.residual == pytest.approx(3**0.5)


def test_products_that_turn_nan_leave_the_last_good_point():
    H, b = symmetric(spread(1.0, 5.0, 6)), vector(6)
    products = iter([H, H, H * math.nan])
    found = conjugate_gradients(lambda p: next(products) @ p, b, steps=6)
    assert torch.equal(found.x, conjugate_gradients(H.mv, b, steps=2).x)
    assert (found.steps, found.converged) == (2, False)


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_a_zero_right_hand_side_has_the_solution_zero(tolerance):
    H = torch.tensor([[2.0, 0.3, 0.1], [0.3, 1.0, 0.2], [0.1, 0.2, 1.7]])
    found = conjugate_gradients(H.mv, torch.zeros(3), steps=3, tolerance=tolerance)
    assert found.x.tolist() == [0.0, 0.0, 0.0]
    assert (found.residual, found.converged) == (0.0, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_solvers_keep_the_dtype(dtype):
    H, b = symmetric([1.0, 2.0]).to(dtype), vector(2).to(dtype)
    assert conjugate_gradients(H.mv, b, steps=2).x.dtype == dtype
    assert neumann(H.mv, b, scale=2.0, terms=3).dtype == dtype
