"""Projection on a ball and soft thresholding."""

import math

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.numerics import project_ball, soft_threshold

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
vectors = arrays.arrays(np.float64, st.integers(1, 8), elements=st.floats(-100, 100))
pairs = st.integers(1, 8).flatmap(lambda n: arrays.arrays(np.float64, (2, n), elements=st.floats(-5, 5)))


@quick
@given(vectors, st.floats(1e-3, 50))
def test_ball_keeps_points_inside_and_shortens_those_outside_to_the_radius(v, radius):
    v = torch.tensor(v)
    p, norm = project_ball(v, radius), float(v.norm())
    torch.testing.assert_close(p, v * min(1.0, radius / norm) if norm else v, rtol=1e-14, atol=1e-15)
    if norm < radius * (1 - 1e-12):  # nearer than that, rounding decides
        assert torch.equal(p, v)


@quick
@given(pairs, st.floats(0.1, 3))
def test_ball_projection_does_not_expand_distances(uv, radius):
    u, v = torch.tensor(uv)
    assert (project_ball(u, radius) - project_ball(v, radius)).norm() <= (u - v).norm() + 1e-14


@pytest.mark.parametrize("radius", [0.0, 1.0, math.inf])
def test_ball_keeps_the_zero_vector_at_every_radius(radius):
    assert project_ball(torch.zeros(3), radius).tolist() == [0.0, 0.0, 0.0]


def test_ball_of_radius_zero_is_the_origin_and_of_infinite_radius_everything():
    v = torch.tensor([3.0, -4.0])
    assert project_ball(v, 0.0).tolist() == [0.0, 0.0]
    assert torch.equal(project_ball(v, math.inf), v)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e22, 1e37])
def test_ball_is_right_where_squares_over_or_underflow(size):
    v = torch.tensor([3.0, 4.0]) * size
    torch.testing.assert_close(project_ball(v, size) / size, torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(project_ball(v, 1e-32) / 1e-32, torch.tensor([0.6, 0.8]))


def test_ball_projects_each_row_by_itself():
    v = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    torch.testing.assert_close(project_ball(v, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    torch.testing.assert_close(torch.func.vmap(lambda row: project_ball(row, 1.0))(v), project_ball(v, 1.0))


@pytest.mark.parametrize("v", [[0.0, 0.0], [0.3, -0.4]])
def test_ball_has_the_identity_for_derivative_inside(v):
    J = torch.func.jacrev(lambda v: project_ball(v, 1.0))(torch.tensor(v))
    assert torch.equal(J, torch.eye(2))


def test_ball_passes_nan_on():
    assert project_ball(torch.tensor([math.nan, 1.0]), 1.0).isnan().any()


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
def test_soft_threshold_minimises_its_proximal_objective(threshold):
    grid = torch.linspace(-3, 3, 6001, dtype=torch.float64)  # spacing 1e-3
    for v in torch.linspace(-2, 2, 41, dtype=torch.float64):
        best = grid[(0.5 * (grid - v) ** 2 + threshold * grid.abs()).argmin()]
        assert float(soft_threshold(v, threshold)) == pytest.approx(float(best), abs=6e-4)


@quick
@given(vectors, st.floats(0, 10))
def test_soft_threshold_leaves_a_subgradient(v, threshold):
    """v − p ∈ threshold · ∂‖p‖₁."""
    v = torch.tensor(v)
    p = soft_threshold(v, threshold)
    gap = v - p
    assert (gap.abs() <= threshold + 1e-12).all()
    torch.testing.assert_close(gap[p != 0], threshold * p[p != 0].sign(), rtol=0, atol=1e-12)


def test_soft_threshold_works_on_any_shape_and_keeps_the_dtype():
    v = torch.tensor([[1.5, -0.25], [-2.0, 0.0]], dtype=torch.float32)
    p = soft_threshold(v, 0.5)
    assert p.tolist() == [[1.0, 0.0], [-1.5, 0.0]]
    assert p.dtype == torch.float32
