"""Projections against exact rational arithmetic; the entropic step against its formula."""

import math
from fractions import Fraction

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, minimize

from coterie.numerics import entropic_step, project_capped_simplex, project_simplex, uniform

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
vectors = arrays.arrays(np.float64, st.integers(1, 12), elements=st.floats(-1e3, 1e3))
pairs = st.integers(1, 12).flatmap(lambda n: arrays.arrays(np.float64, (2, n), elements=st.floats(-3, 3)))


def exact_projection(v, cap):
    """Π(v) by bisection over the kinks in rational arithmetic; that Σw = 1 holds exactly is the KKT certificate."""
    b = max(Fraction(cap), Fraction(1, len(v)))
    v = [Fraction(x) for x in v]

    def weights(t):
        return [min(max(x - t, Fraction(0)), b) for x in v]

    kinks = sorted({k for x in v for k in (x - b, x)})
    low, high = 0, len(kinks) - 1  # the sum is n·b ≥ 1 at the first kink and 0 at the last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sum(weights(kinks[middle])) >= 1 else (low, middle)
    above, below = sum(weights(kinks[low])), sum(weights(kinks[high]))
    w = weights(kinks[low] + (above - 1) / (above - below) * (kinks[high] - kinks[low]))
    assert sum(w) == 1
    return np.array([float(x) for x in w])


def random_cases(count):
    """Vectors of 1 to 40 numbers of every scale, far from zero, nearly or wholly tied; caps from 1/n to 1."""
    rng = np.random.default_rng(0)
    for case in range(count):
        n = int(rng.integers(1, 41))
        v = rng.normal(size=n) * 10.0 ** rng.uniform(-3, 2)
        match case % 8:
            case 0:
                v *= 10.0 ** rng.uniform(-200, 200)
            case 1:
                v = np.round(v)
            case 2:
                v += 10.0 ** rng.uniform(0, 12)
            case 3:
                v = v[rng.integers(n, size=n)]
            case 4:
                v = rng.dirichlet(np.ones(n))
            case 5:
                v = np.where(rng.random(n) < 0.5, v, 1e17 * v)
        caps = (1 / n, rng.uniform(1 / n, 1), 1 / rng.integers(1, n + 1), min(1.0, rng.uniform(1, 3) / n), 1.0)
        yield v, float(caps[case // 8 % 5])


CASES = list(random_cases(320))


def test_simplex_projection_is_the_exact_one_on_320_cases():
    for v, _ in CASES:
        np.testing.assert_allclose(project_simplex(torch.tensor(v)), exact_projection(v, 1.0), rtol=0, atol=1e-13)


def test_capped_projection_is_the_exact_one_on_320_cases():
    for v, cap in CASES:
        w = project_capped_simplex(torch.tensor(v), cap)
        np.testing.assert_allclose(w, exact_projection(v, cap), rtol=0, atol=1e-13)


def test_projections_agree_with_a_quadratic_programme():
    rng = np.random.default_rng(1)
    for _ in range(25):
        n = int(rng.integers(2, 9))
        v, cap = rng.normal(size=n), rng.uniform(1 / n, 1)
        found = minimize(
            lambda w, v=v: 0.5 * (w - v) @ (w - v),
            np.full(n, 1 / n),
            jac=lambda w, v=v: w - v,
            method="SLSQP",
            bounds=[(0.0, cap)] * n,
            constraints=LinearConstraint(np.ones((1, n)), 1.0, 1.0),
            options={"ftol": 1e-18, "maxiter": 500},
        )
        np.testing.assert_allclose(project_capped_simplex(torch.tensor(v), cap), found.x, rtol=0, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projections_never_leave_the_set(dtype):
    few = 2 * torch.finfo(dtype).eps
    for v, cap in CASES:
        v = torch.tensor(np.clip(v, -1e38, 1e38)).to(dtype)
        w, c = project_simplex(v), project_capped_simplex(v, cap)
        assert (w >= 0).all()
        assert (c >= 0).all()
        assert (c <= cap).all()
        assert abs(float(w.double().sum()) - 1) <= few
        assert abs(float(c.double().sum()) - 1) <= few


@pytest.mark.parametrize("cap", [1e-4, 1.5e-4, 1e-3, 0.3, 1.0])
def test_ten_thousand_float32_weights_sum_to_one(cap):
    v = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    for scale in (1e-6, 1e-3, 1.0, 1e3):
        w = project_capped_simplex(scale * v, cap)
        assert abs(float(w.double().sum()) - 1) <= 4 * torch.finfo(torch.float32).eps
        assert (w <= cap).all()


@quick
@given(vectors, st.floats(0, 1))
def test_projections_are_idempotent(v, share):
    cap = 1 / len(v) + share * (1 - 1 / len(v))
    once, capped = project_simplex(torch.tensor(v)), project_capped_simplex(torch.tensor(v), cap)
    torch.testing.assert_close(project_simplex(once), once, rtol=0, atol=1e-15)
    torch.testing.assert_close(project_capped_simplex(capped, cap), capped, rtol=0, atol=1e-15)


@quick
@given(pairs, st.floats(0, 1))
def test_projections_do_not_expand_distances(uv, share):
    uv = torch.tensor(uv)
    cap = 1 / uv.shape[1] + share * (1 - 1 / uv.shape[1])
    before = (uv[0] - uv[1]).norm()
    for projected in (project_simplex(uv), project_capped_simplex(uv, cap)):
        assert (projected[0] - projected[1]).norm() <= before + 1e-14


@quick
@given(vectors, st.floats(0, 1), st.randoms(use_true_random=False))
def test_projections_commute_with_permutations(v, share, random):
    cap = 1 / len(v) + share * (1 - 1 / len(v))
    order = list(range(len(v)))
    random.shuffle(order)
    v = torch.tensor(v)
    torch.testing.assert_close(project_simplex(v[order]), project_simplex(v)[order], rtol=0, atol=1e-15)
    torch.testing.assert_close(
        project_capped_simplex(v[order], cap), project_capped_simplex(v, cap)[order], rtol=0, atol=1e-15
    )


def test_points_of_the_set_stay_where_they_are():
    w = torch.tensor([0.0, 0.125, 0.25, 0.125, 0.5])
    assert torch.equal(project_simplex(w), w)
    assert torch.equal(project_capped_simplex(w, 0.5), w)


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (1, 1), (0, 4)])
@pytest.mark.parametrize("project", [project_simplex, lambda v: project_capped_simplex(v, max(0.3, 1 / v.shape[-1]))])
def test_a_batch_is_projected_row_by_row(project, shape):
    v = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rows = [project(row) for row in v.reshape(-1, shape[-1])]
    together = project(v)
    assert together.shape == v.shape
    for row, alone in zip(together.reshape(-1, shape[-1]), rows, strict=True):
        torch.testing.assert_close(row, alone, rtol=0, atol=1e-15)
    torch.testing.assert_close(torch.func.vmap(project)(v), together, rtol=0, atol=1e-15)


def test_projection_leaves_its_argument_alone():
    v = torch.tensor([3.0, -1.0, 0.5])
    project_simplex(v), project_capped_simplex(v, 0.5)
    assert v.tolist() == [3.0, -1.0, 0.5]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, 49, 103])
def test_a_cap_of_one_nth_gives_uniform_weights(n):
    v = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    torch.testing.assert_close(project_capped_simplex(v, 1 / n), uniform(n, like=v), rtol=0, atol=1e-16)


@pytest.mark.parametrize("cap", [0.2499999, 0.0, -1.0, math.nan])
def test_a_cap_below_one_nth_is_refused_with_the_smallest_possible_cap(cap):
    with pytest.raises(ValueError, match=r"4 clients .* cap of .*; the cap must be at least 0\.25"):
        project_capped_simplex(torch.zeros(4), cap)


def test_a_cap_of_one_or_more_is_no_cap():
    v = torch.tensor([0.9, 0.3, -2.0])
    assert torch.equal(project_capped_simplex(v, 1.0), project_simplex(v))
    assert torch.equal(project_capped_simplex(v, 7.0), project_simplex(v))


def test_nan_is_passed_on_and_minus_infinity_gets_nothing():
    for project in (project_simplex, lambda v: project_capped_simplex(v, 0.5)):
        assert project(torch.tensor([1.0, math.nan, 0.0])).isnan().all()
        assert project(torch.tensor([1.0, -math.inf, 1.0])).tolist() == [0.5, 0.0, 0.5]


def test_uniform_takes_dtype_from_its_model():
    assert uniform(4).tolist() == [0.25] * 4
    assert uniform(3, like=torch.zeros((), dtype=torch.float64)).dtype == torch.float64


# ---- the entropic step


def random_step(n=9, seed=0):
    g = torch.Generator().manual_seed(seed)
    w = torch.rand(n, dtype=torch.float64, generator=g) + 0.01
    return w / w.sum(), torch.randn(n, dtype=torch.float64, generator=g)


@pytest.mark.parametrize("step", [0.0, 1e-3, 1.0, 20.0])
def test_entropic_step_is_the_plain_formula_where_that_is_safe(step):
    w, g = random_step()
    plain = w * torch.exp(-step * g)
    torch.testing.assert_close(entropic_step(w, g, step), plain / plain.sum(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e3, 1e30, 3e38])
def test_entropic_step_survives_exponents_of_any_size(dtype, size):
    w = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=dtype)
    g = torch.tensor([-size, -size, 0.0, size], dtype=dtype)
    torch.testing.assert_close(entropic_step(w, g, 10.0), torch.tensor([1 / 3, 2 / 3, 0.0, 0.0], dtype=dtype))


@pytest.mark.parametrize("constant", [2.0**20, -(2.0**40), 1e30, -1e30])
def test_entropic_step_ignores_a_constant_added_to_the_gradient(constant):
    w, g = random_step()
    g = (8 * g).round() / 8 if abs(constant) < 1e30 else torch.zeros_like(g)  # so that the addition is exact
    torch.testing.assert_close(entropic_step(w, g + constant, 0.7), entropic_step(w, g, 0.7), rtol=1e-14, atol=0)


@pytest.mark.parametrize("size", [1.0, 1e30, 3e38])
def test_a_weight_of_zero_stays_zero_and_does_not_disturb_the_others(size):
    w, g = torch.tensor([0.0, 0.75, 0.25]), torch.tensor([-size, size, size])
    after = entropic_step(w, g, 5.0)
    assert after[0] == 0.0
    torch.testing.assert_close(after[1:], w[1:])


@quick
@given(pairs, st.floats(0, 1e3))
def test_entropic_step_stays_on_the_simplex(wg, step):
    w, g = torch.tensor(wg)
    after = entropic_step(project_simplex(w), 1e3 * g, step)
    assert (after >= 0).all()
    assert abs(float(after.sum()) - 1) <= 1e-14


def test_entropic_step_lowers_the_linear_model_more_with_longer_steps():
    w, g = random_step()
    values = [float(entropic_step(w, g, step) @ g) for step in (0.0, 0.1, 1.0, 100.0)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(float(g.min()), abs=1e-3)


def test_entropic_steps_of_a_batch_are_those_of_its_rows():
    rows = [random_step(seed=s) for s in range(4)]
    w, g = (torch.stack(part) for part in zip(*rows, strict=True))
    alone = torch.stack([entropic_step(*row, 0.5) for row in rows])
    torch.testing.assert_close(entropic_step(w, g, 0.5), alone, rtol=1e-15, atol=0)
    one_gradient = torch.stack([entropic_step(row, g[0], 0.5) for row in w])
    torch.testing.assert_close(entropic_step(w, g[0], 0.5), one_gradient, rtol=1e-15, atol=0)


def test_nan_in_a_gradient_or_weight_is_not_hidden():
    w, g = torch.tensor([0.5, 0.5]), torch.tensor([0.0, math.nan])
    assert entropic_step(w, g, 1.0).isnan().all()
    assert entropic_step(g, w, 1.0).isnan().all()
