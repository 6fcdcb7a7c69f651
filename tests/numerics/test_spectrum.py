"""Extreme eigenvalues by products: exact in full, bounds and their errors in part, negative ones found."""

import pytest
import torch
from torch import Tensor

from coterie.numerics import Draw
from coterie.numerics.spectrum import extreme_eigenvalues


def matrix(values: Tensor) -> Tensor:
    basis = torch.linalg.qr(Draw.of(0).normal(len(values), len(values), dtype=torch.float64)).Q
    return basis * values @ basis.T


START = Draw.of(1).normal(40, dtype=torch.float64)


def test_with_as_many_products_as_dimensions_the_eigenvalues_are_exact() -> None:
    values = torch.linspace(0.3, 7.0, 12, dtype=torch.float64)
    found = extreme_eigenvalues(lambda v: matrix(values) @ v, START[:12], products=30)
    assert (found.least, found.largest) == (pytest.approx(0.3, abs=1e-9), pytest.approx(7.0, abs=1e-9))
    assert max(found.least_error, found.largest_error) < 1e-6


def test_fewer_products_give_values_within_the_spectrum_and_errors_that_hold() -> None:
    values = 10.0 ** torch.linspace(-1.0, 1.0, 40, dtype=torch.float64)
    H, asked = matrix(values), []

    def product(v: Tensor) -> Tensor:
        asked.append(v)
        return H @ v

    found = extreme_eigenvalues(product, START, products=8)
    assert len(asked) == 8
    assert found.least >= 0.1
    assert found.largest <= 10.0
    for value, error in ((found.least, found.least_error), (found.largest, found.largest_error)):
        assert float((values - value).abs().min()) <= error * (1 + 1e-9)
    assert found.largest + found.largest_error > 9.9


def test_negative_curvature_is_found() -> None:
    values = torch.linspace(0.5, 2.0, 40, dtype=torch.float64)
    values[7] = -0.2
    assert extreme_eigenvalues(lambda v: matrix(values) @ v, START, products=10).least < 0.0


def test_an_invariant_subspace_ends_the_products() -> None:
    asked = []

    def product(v: Tensor) -> Tensor:
        asked.append(v)
        return 3.0 * v

    found = extreme_eigenvalues(product, START, products=10)
    assert (found.least, found.largest, len(asked)) == (pytest.approx(3.0), pytest.approx(3.0), 1)
    assert extreme_eigenvalues(torch.zeros_like, START, products=10).largest == 0.0
