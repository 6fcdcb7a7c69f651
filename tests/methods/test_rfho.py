"""rfho: the derivative of the unrolled iteration, its limit, and what it costs to carry it."""

from dataclasses import replace

import pytest
import torch
from learners import a_quadratic, federation, gradients, play, skewed

from coterie.methods import rfho
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.models import FlatModel
from coterie.problems.models.zoo import build
from coterie.problems.weighting import weighting

STILL = {"outer_step": 1e-12, "batch": "all"}


def unrolled(problem, w, steps, eta, ids):
    """L_0 after some gradient steps with the weights w, from the start."""
    theta = problem.start
    for _ in range(steps):
        G, _ = gradients(problem, theta)
        theta = theta - eta * len(w) / len(ids) * w[ids] @ G[ids]
    gap = theta - problem.exact.target_optimum
    return 0.5 * gap @ problem.exact.target_hessian @ gap


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4], [1, 4]], ids=["all", "some"])
@pytest.mark.parametrize("carry", [False, True])
def test_it_is_the_derivative_of_the_unrolled_iteration(carry, ids):
    problem, w, h = a_quadratic(), skewed(5), 1e-5
    ids = torch.tensor(ids)
    fed = replace(federation(problem), ids=ids)
    method = rfho(step=0.2, local_steps=1 if carry else 3, carry=carry, **STILL)
    s = method.init(problem, 5)._replace(w=w)
    if carry:
        for t in range(3):
            s = method.round(fed, s, Draw.of(0).round(t))
    else:  # fed.sample draws anew for later steps: narrow the federation for good
        monk = replace(fed, participation=_Always(ids))
        s = method.round(monk, s, Draw.of(0))
    _, g0 = gradients(problem, s.theta)
    basis = torch.eye(5, dtype=torch.float64)
    difference = torch.stack(
        [
            (unrolled(problem, w + h * e, 3, 0.2, ids) - unrolled(problem, w - h * e, 3, 0.2, ids)) / (2 * h)
            for e in basis
        ]
    )
    torch.testing.assert_close(s.Z @ g0, difference, atol=1e-8, rtol=1e-6)


class _Always:
    """A participation that is always the same."""

    def __init__(self, ids):
        self.ids = ids

    def draw(self, n, draw):
        return self.ids


def test_carried_on_it_tends_to_the_exact_hypergradient():
    problem, w = a_quadratic(), skewed(5)
    method = rfho(step=0.4, **STILL)
    s = play(method, problem, 60, state=method.init(problem, 5)._replace(w=w))
    _, g0 = gradients(problem, s.theta)
    torch.testing.assert_close(s.Z @ g0, problem.exact.hypergradient(w), atol=1e-6, rtol=0)


def test_it_finds_the_best_weights():
    problem = a_quadratic(curvature=1.0)
    s = play(rfho(step=0.3, outer_step=0.1, batch="all"), problem, 150)
    assert float(problem.exact.objective(s.w)) < 1e-6


def test_chunks_of_columns_do_not_matter():
    problem = a_quadratic()
    one, many = (play(rfho(columns=c, batch=4), problem, 3) for c in (1, 16))
    torch.testing.assert_close(one.Z, many.Z)


def test_traffic_is_n_plus_1_vectors_a_step_and_one_for_clients_without_weight():
    problem = a_quadratic()
    n, d = problem.clients, len(problem.start)
    w = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    floats, states = {}, {}
    for ask in ("all", "weighted"):
        fed = federation(problem)
        method = rfho(local_steps=2, ask=ask, **STILL)
        states[ask] = play(method, problem, 1, state=method.init(problem, n)._replace(w=w), fed=fed)
        floats[ask] = fed.ledger.total.floats_up
    assert floats == {"all": 2 * n * (n + 1) * d, "weighted": 2 * (n * d + 2 * n * d)}
    torch.testing.assert_close(states["all"].Z, states["weighted"].Z)


def test_the_first_fresh_step_needs_gradients_only():
    problem = a_quadratic()
    fed = federation(problem)
    s = play(rfho(step=0.1, carry=False, **STILL), problem, 3, fed=fed)
    assert fed.ledger.total.floats_up == 3 * problem.clients * len(problem.start)
    assert s.Z.shape == (problem.clients, len(problem.start))


def test_an_active_set_without_weight_leaves_the_model_alone():
    problem = a_quadratic()
    w = torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64)
    method = rfho(**STILL)
    s0 = method.init(problem, 5)._replace(w=w)
    s = method.round(replace(federation(problem), ids=torch.tensor([2, 3])), s0, Draw.of(0))
    torch.testing.assert_close(s.theta, s0.theta)
    assert s.Z.norm(dim=1).nonzero().flatten().tolist() == [2, 3]


def test_it_runs_at_the_size_of_a_small_network():
    """d > 44,000 and ten clients: a state of half a million numbers, three columns at a time."""
    images = Draw.of(0).normal(10, 4, 1, 28, 28)
    labels = Draw.of(1).integers(10, 10, 4)
    module = build("mlp", (1, 28, 28), 10, seed=0)
    problem = weighting(
        [(images[k], labels[k]) for k in range(10)],
        (images[0], labels[0]),
        FlatModel(module),
        "cross_entropy",
        dtype=Context().dtype,
    )
    assert len(problem.start) > 44_000
    s = play(rfho(columns=3, batch=2), problem, 2)
    assert s.Z.shape == (10, len(problem.start))
    assert bool(torch.isfinite(s.Z).all())
