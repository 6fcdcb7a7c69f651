"""sustain: plain single-loop descent without momentum, the recursion by hand, the series, traffic."""

import pytest
import torch
from learners import a_quadratic, a_toy, federation, gradients, play, skewed

from coterie.methods import sustain
from coterie.methods.shared.works import gradient
from coterie.numerics import Draw, project_simplex

STEPS = {"step": 0.1, "outer_step": 0.02, "series_step": 0.3, "local_steps": 2}
ALL = {"batch": "all"}
OFF = {"momentum": 0.0, "weight_momentum": 0.0}


def plain_step(problem, theta, w):
    """One step of single-loop bilevel gradient descent with a series of three terms, by hand."""
    G, g0 = gradients(problem, theta)
    H = torch.einsum("k,kij->ij", w, problem.exact.hessians)
    M = torch.eye(len(theta), dtype=theta.dtype) - 0.3 * H
    p = 0.3 * (g0 + M @ g0 + M @ M @ g0)
    return theta - 0.1 * w @ G, project_simplex(w + 0.02 * G @ p)


def test_without_momentum_it_is_single_loop_descent():
    problem = a_quadratic()
    s = play(sustain(**STEPS, **OFF, **ALL), problem, 4)
    theta, w = problem.start, torch.full((5,), 0.2, dtype=torch.float64)
    for _ in range(4):
        theta, w = plain_step(problem, theta, w)
    torch.testing.assert_close(s.theta, theta)
    torch.testing.assert_close(s.w, w)


def test_without_noise_momentum_changes_nothing():
    """The correction removes the old gradient exactly, so the estimates are the gradients."""
    problem = a_quadratic()
    plain = play(sustain(**STEPS, **OFF, **ALL), problem, 6)
    heavy = play(sustain(**STEPS, momentum=0.9, weight_momentum=0.7, **ALL), problem, 6)
    torch.testing.assert_close(heavy.theta, plain.theta)
    torch.testing.assert_close(heavy.w, plain.w)


def test_the_recursion_on_batches_by_hand():
    problem = a_quadratic()
    fed, draw = federation(problem), Draw.of(1).round(1)
    method = sustain(**STEPS, momentum=0.6, weight_momentum=0.0, batch=3)
    s1 = play(method, problem, 1, fed=fed)
    s2 = method.round(fed, s1, draw)
    at = draw.phase("inner")  # one batch meets both points
    now, _ = fed.gather(gradient, s1.theta, draw=at, batch=3)
    before, _ = fed.gather(gradient, s1.theta_before, draw=at, batch=3)
    v = s1.w @ now + 0.6 * (s1.v - s1.w_before @ before)
    torch.testing.assert_close(s2.v, v)
    torch.testing.assert_close(s2.theta, s1.theta - 0.1 * v)
    torch.testing.assert_close(s2.theta_before, s1.theta)


def test_momentum_averages_noise_away():
    problem = a_toy(noise=0.5)
    quiet = {"step": 1e-9, "outer_step": 1e-9, "series_step": 0.03, "batch": 1}

    def errors(momentum):
        method, fed = sustain(momentum=momentum, weight_momentum=momentum, **quiet), federation(problem)
        s = play(method, problem, 20, fed=fed)
        v = []
        for t in range(60):
            draw = Draw.of(2).round(t)
            s = method.round(fed, s, draw)
            v.append(s.v)
        return torch.stack(v).var(0).mean()

    assert errors(0.8) < 0.4 * errors(0.0)


def test_the_series_tends_to_the_exact_hypergradient():
    problem = a_quadratic()
    w = skewed(5)
    theta = problem.exact.theta(w)
    method = sustain(series_step=0.5, local_steps=60, outer_step=1e-6, **ALL)
    s = play(method, problem, 1, state=method.init(problem, 5)._replace(theta=theta, w=w))
    torch.testing.assert_close(s.u, problem.exact.hypergradient(w), atol=1e-9, rtol=0)


@pytest.mark.slow
def test_it_finds_the_best_weights():
    problem = a_quadratic(curvature=1.0)
    s = play(sustain(step=0.3, series_step=0.5, local_steps=3, outer_step=0.1, **ALL), problem, 150)
    assert float(problem.exact.objective(s.w)) < 1e-6


def test_traffic_is_k_plus_1_vectors_and_momentum_on_the_weights_adds_k():
    problem = a_quadratic()
    n, d, k = problem.clients, len(problem.start), 3
    for momentum, vectors in ((0.0, k + 1), (0.5, 2 * k + 1)):
        fed = federation(problem)
        method = sustain(local_steps=k, weight_momentum=momentum)
        s = play(method, problem, 1, fed=fed)
        before = fed.ledger.total
        method.round(fed, s, Draw.of(0).round(1))
        assert fed.ledger.total.floats_up - before.floats_up == n * (vectors * d + 1)
        assert fed.ledger.total.rounds - before.rounds == k + 2


def test_clients_without_weight_are_spared():
    problem = a_quadratic()
    n, d = problem.clients, len(problem.start)
    w = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    floats, states = {}, {}
    for ask in ("all", "weighted"):
        fed = federation(problem)
        method = sustain(**STEPS, **OFF, **ALL, ask=ask)
        start = method.init(problem, n)._replace(w=w, w_before=w)
        states[ask] = play(method, problem, 1, state=start, fed=fed)
        floats[ask] = fed.ledger.total.floats_up
    assert floats == {"all": n * (3 * d + 1), "weighted": 2 * 3 * d + n}
    torch.testing.assert_close(states["all"].w, states["weighted"].w)
    torch.testing.assert_close(states["all"].theta, states["weighted"].theta)


def test_absent_clients_are_stood_in_for():
    """With one of five active, its share counts five times, and the others' slope estimates only fade."""
    problem = a_quadratic()
    fed = federation(problem, count=1)
    method = sustain(**STEPS, **OFF, **ALL)
    draw = Draw.of(1).round(0)
    view = fed.begin(1, draw)
    (k,) = view.ids.tolist()
    s = method.round(view, method.init(problem, 5), draw)
    G, _ = gradients(problem, problem.start)
    torch.testing.assert_close(s.v, 5 * 0.2 * G[k])
    assert s.u.nonzero().flatten().tolist() == [k]
