"""meritfed-zo: the estimator is unbiased and exact along its direction; only losses are sent; friends are found."""

import pytest
import torch
from learners import WIDE, a_quadratic, federation, play

from coterie.errors import UsageError
from coterie.methods import meritfed_zo
from coterie.methods.weights.mirror import Judge, goal_losses, zeroth_order
from coterie.numerics import Draw, entropic_step, uniform
from coterie.problems.catalogue.mean_estimation import mean_estimation


def linear(c):
    """An exchange with a target whose loss is cᵀx."""
    return lambda what, points, i: points @ c


def test_the_estimate_is_unbiased_for_a_linear_function():
    n, d, step, draws = 6, 4, 0.3, 4000
    c, x = Draw.of(0).normal(d, dtype=torch.float64), Draw.of(1).normal(d, dtype=torch.float64)
    G, w = Draw.of(2).normal(n, d, dtype=torch.float64), uniform(n).double()
    slope = zeroth_order(linear(c), x, G, step=step, smoothing=0.1, draw=Draw.of(3))
    found = torch.stack([slope(w, i) for i in range(draws)])
    exact = -step * G @ c
    assert bool(((found.mean(0) - exact).abs() < 5 * found.std(0) / draws**0.5).all())
    # E‖g̃‖² = n‖∇φ‖²: √n times the size of the gradient
    assert float(found.square().sum(1).mean() / exact.square().sum()) == pytest.approx(n, rel=0.1)


@pytest.mark.parametrize("smoothing", [1e-3, 0.1, 10.0])
def test_it_is_the_directional_derivative_exactly_where_the_loss_is_quadratic(smoothing):
    problem = a_quadratic()
    G, x = Draw.of(2).normal(5, 4, dtype=torch.float64), Draw.of(1).normal(4, dtype=torch.float64)
    w, step, draw = uniform(5).double(), 0.3, Draw.of(5)
    ask = Judge("validation", "all").at(federation(problem), 0, Draw.of(0))
    found = zeroth_order(ask, x, G, step=step, smoothing=smoothing, draw=draw)(w, 7)
    e = draw.step(7).sphere(5, dtype=torch.float64)
    phi = torch.func.grad(lambda u: problem.task.full_loss(x - step * u @ G, problem.target.valid))
    torch.testing.assert_close(found, 5 * (phi(w) @ e) * e, atol=1e-8, rtol=0)


def test_both_losses_are_on_the_same_rows():
    problem = a_quadratic()
    points = torch.stack([problem.start, problem.start])
    ask = Judge("validation", 3).at(federation(problem), 0, Draw.of(0))
    above, below = ask(goal_losses, points, 0)
    assert above == below
    assert above != ask(goal_losses, points, 1)[0]


def test_one_step_by_hand():
    problem, step, alpha, h = a_quadratic(), 0.2, 0.7, 0.1
    method = meritfed_zo(step=step, mirror_step=alpha, mirror_steps=1, smoothing=h)
    s = play(method, problem, 1)
    G = torch.stack([problem.task.full_gradient(problem.start, problem.train.client(k)) for k in range(5)])
    e, w = Draw.of(1).round(0).phase("direction").step(0).sphere(5, dtype=torch.float64), uniform(5).double()
    above, below = (
        problem.task.full_loss(problem.start - step * (w + sign * h * e) @ G, problem.target.valid) for sign in (1, -1)
    )
    w = entropic_step(w, 5 * (above - below) / (2 * h) * e, alpha)
    torch.testing.assert_close(s.w, w)
    torch.testing.assert_close(s.x, problem.start - step * w @ G)


def test_the_target_sends_two_losses_a_step():
    problem = a_quadratic()
    fed = federation(problem, target=1)
    play(meritfed_zo(mirror_steps=6), problem, 3, fed=fed)
    by_cause = {cause.rpartition("/")[2]: entry for cause, entry in fed.ledger.by_cause.items()}
    assert set(by_cause) == {"gradient", "goal-losses"}
    asked = by_cause["goal-losses"]
    assert (asked.rounds, asked.floats_up, asked.floats_down) == (18, 18 * 2, 18 * 2 * 4)


def test_it_finds_the_friends():
    problem = mean_estimation(WIDE, friends=3, near=0, far=3, dimension=4, samples=100, validation=500, distance=3.0)
    s = play(meritfed_zo(step=0.5, mirror_step=0.3), problem, 60)
    assert float(s.w[:3].sum()) > 0.95


def test_fresh_rows_must_be_there():
    with pytest.raises(UsageError, match=r"method\.mirror_batch = all rows, but the target holds 12"):
        meritfed_zo(data="fresh").init(a_quadratic(), 5)
