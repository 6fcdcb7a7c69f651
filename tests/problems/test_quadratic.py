"""The closed forms of `quadratic` against finite differences and against the losses on its own shards."""

import pytest
import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.base import View
from coterie.problems.catalogue.quadratic import quadratic
from coterie.problems.weighting import Weighting

CASES = [(0, 1.0), (1, 1.0), (2, 5.0), (3, 50.0)]


def simplex(n: int, seed: int) -> Tensor:
    weights = 0.1 + Draw.of(seed).uniform(n, dtype=torch.float64)
    return weights / weights.sum()


@pytest.fixture(params=CASES, ids=lambda case: f"seed {case[0]}, curvature {case[1]:g}")
def case(request) -> Weighting:
    seed, curvature = request.param
    return quadratic(Context(seed, torch.float64), clients=5, friends=2, dimension=4, rows=9, curvature=curvature)


def test_theta_minimises_the_weighted_loss_of_the_shards(case):
    w = simplex(5, seed=1)
    theta = case.exact.theta(w)
    gradients = torch.stack([case.task.full_gradient(theta, case.train.client(k)) for k in range(5)])
    assert gradients.norm() > 0.1
    assert (w @ gradients).norm() < 1e-10 * gradients.norm()


def test_the_hessians_and_optima_are_those_of_the_shards(case):
    theta, v = Draw.of(2).normal(4, dtype=torch.float64), Draw.of(3).normal(4, dtype=torch.float64)
    for k in range(5):
        rows = case.train.client(k)
        torch.testing.assert_close(case.task.full_hvp(theta, v, rows), case.exact.hessians[k] @ v)
        assert case.task.full_loss(case.exact.optima[k], rows) < 1e-20


def test_the_objective_is_the_targets_loss(case):
    w = simplex(5, seed=1)
    loss = case.task.full_loss(case.exact.theta(w), case.target.valid)
    assert loss > 1e-3
    torch.testing.assert_close(case.exact.objective(w), loss)


def test_the_hypergradient_is_the_slope_of_the_objective(case):
    w, h = simplex(5, seed=4), 1e-5
    steps = h * torch.eye(5, dtype=torch.float64)
    slopes = torch.stack([(case.exact.objective(w + e) - case.exact.objective(w - e)) / (2 * h) for e in steps])
    found = case.exact.hypergradient(w)
    assert (found - slopes).norm() < 1e-6 * slopes.norm()


def test_the_best_weights_are_a_minimiser(case):
    best = case.exact.weights
    assert best.sum().item() == pytest.approx(1.0)
    assert (best[:2] > 0.0).all()
    assert (best[2:] == 0.0).all()
    assert case.exact.objective(best) < 1e-20
    assert case.exact.hypergradient(best).norm() < 1e-10
    assert case.exact.stationarity(best) < 1e-9
    for seed in range(10):
        assert case.exact.objective(simplex(5, seed)) > 1e-6


def test_stationarity_is_positive_elsewhere_and_respects_the_cap(case):
    equal = torch.full((5,), 0.2, dtype=torch.float64)
    assert case.exact.stationarity(equal) > 1e-3
    assert case.exact.stationarity(equal, cap=0.2) < 1e-9  # the only point there is


@pytest.mark.parametrize("seed", range(3))
def test_with_curvature_one_the_objective_is_convex(seed):
    form = quadratic(Context(seed), clients=5, friends=2, dimension=4).exact
    torch.testing.assert_close(form.hessians, torch.eye(4, dtype=torch.float64).expand(5, 4, 4))
    for trial in range(20):
        a, b = simplex(5, 2 * trial), simplex(5, 2 * trial + 1)
        assert form.objective((a + b) / 2) <= (form.objective(a) + form.objective(b)) / 2 + 1e-12


def test_curvature_bounds_the_condition():
    form = quadratic(Context(0), curvature=10.0).exact
    spectra = torch.linalg.eigvalsh(form.hessians)
    assert 1.0 - 1e-9 <= spectra.min() < 2.0
    assert 5.0 < spectra.max() <= 10.0 + 1e-9
    assert not torch.allclose(form.hessians[0], form.hessians[1])


def test_measures(case):
    theta, w = torch.zeros(4, dtype=torch.float64), simplex(5, seed=1)
    measures = case.measure(View(theta, w))
    assert measures["distance_to_optimum"] == pytest.approx(case.exact.target_optimum.norm().item())
    assert measures["objective"] == pytest.approx(case.exact.objective(w).item())
    assert measures["stationarity"] == pytest.approx(case.exact.stationarity(w).item())
    assert measures["validation_loss"] == pytest.approx(case.task.full_loss(theta, case.target.valid).item())
    assert set(case.measure(View(theta))) == {"distance_to_optimum", "validation_loss"}


def test_the_seed_decides():
    same, again, other = (quadratic(Context(seed)) for seed in (0, 0, 1))
    assert torch.equal(same.train.columns[0], again.train.columns[0])
    assert not torch.equal(same.train.columns[0], other.train.columns[0])
    assert (same.train.columns[0].dtype, same.clients, same.friends) == (torch.float32, 6, 3)
    assert not same.start.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": 2, "friends": 3}, "friends is 3, but there are only 2 clients"),
        ({"dimension": 9, "rows": 8}, "8 rows cannot fix 9 unknowns; give at least 9"),
    ],
)
def test_impossible_sizes_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        quadratic(Context(), **settings)
