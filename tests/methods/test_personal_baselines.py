"""Ditto and pFedMe: each reduces to something known, and each follows its paper's lines."""

import pytest
import torch

from coterie.errors import UsageError
from coterie.federation import Federation, LocalEngine
from coterie.methods import ditto, fedavg, pfedme
from coterie.numerics import Draw
from coterie.problems import Weighting
from coterie.problems.base import Context
from coterie.problems.catalogue.quadratic import quadratic


@pytest.fixture(scope="module")
def problem() -> Weighting:
    return quadratic(Context(seed=1, dtype=torch.float64), clients=4, friends=2, dimension=5, rows=20, curvature=2.0)


def federation(problem: Weighting) -> Federation:
    return Federation.on(LocalEngine(problem.task, problem.train, problem.valid, problem.target))


def test_ditto_global_model_is_fedavg(problem: Weighting) -> None:
    walk = {"step": 0.1, "local_steps": 4, "batch": 5}
    one, two = ditto(**walk), fedavg(**walk, weights="uniform")
    a, b = one.init(problem, 4), two.init(problem, 4)
    for t in range(3):
        a, b = (m.round(federation(problem), s, Draw.of(0).round(t)) for m, s in ((one, a), (two, b)))
    assert torch.equal(a.x, b.x)


def test_ditto_with_a_large_penalty_follows_the_global_model(problem: Weighting) -> None:
    method = ditto(step=0.01, penalty=90.0, personal_steps=50, batch=20)
    s = method.init(problem, 4)
    for t in range(30):
        s = method.round(federation(problem), s, Draw.of(0).round(t))
    last = method.round(federation(problem), s, Draw.of(0).round(30))
    assert (last.v - s.x).norm() < 0.1 * (problem.exact.target_optimum - s.x).norm()


def test_ditto_without_pull_is_the_target_alone(problem: Weighting) -> None:
    method = ditto(step=0.2, penalty=1e-9, personal_steps=50, batch=20)
    s = method.init(problem, 4)
    for t in range(20):
        s = method.round(federation(problem), s, Draw.of(0).round(t))
    assert (s.v - problem.exact.target_optimum).norm() < 1e-4


def test_pfedme_personal_model_is_the_proximal_point(problem: Weighting) -> None:
    """One step, with a batch so large that it stands for the whole shard (rows are drawn with replacement)."""
    method = pfedme(step=0.01, local_steps=1, penalty=5.0, accuracy=1e-20, inner_steps=400, inner_step=0.1, batch=4000)
    s = method.round(federation(problem), method.init(problem, 4), Draw.of(0))
    h = problem.exact.target_hessian
    exact = torch.linalg.solve(h + 5.0 * torch.eye(5), h @ problem.exact.target_optimum + 5.0 * s.x)
    assert torch.allclose(s.theta, exact, atol=0.05)


@pytest.mark.slow
def test_pfedme_personal_model_leaves_the_global_one_for_the_targets_rows(problem: Weighting) -> None:
    method = pfedme(step=0.1, local_steps=200, penalty=5.0, accuracy=1e-20, inner_steps=50, inner_step=0.1, batch=20)
    s = method.round(federation(problem), method.init(problem, 4), Draw.of(0))
    assert (s.theta - problem.exact.target_optimum).norm() < 1e-6
    assert (s.x - problem.exact.target_optimum).norm() > 0.1


def test_pfedme_stops_a_subproblem_at_its_accuracy(problem: Weighting) -> None:
    """A loose δ leaves the model where it starts: the gradient is small enough at once."""
    method = pfedme(accuracy=1e6, batch=20)
    s = method.round(federation(problem), method.init(problem, 4), Draw.of(0))
    assert torch.equal(s.x, problem.start)


def test_pfedme_mixing_interpolates(problem: Weighting) -> None:
    whole, half = (
        pfedme(mixing=b, batch=20).round(federation(problem), pfedme().init(problem, 4), Draw.of(0)) for b in (1.0, 0.5)
    )
    assert torch.allclose(half.x, 0.5 * problem.start + 0.5 * whole.x)


def test_pfedme_personal_models_that_are_left_out_change_no_other(problem: Weighting) -> None:
    """θ is a function of the new x alone: every third of them is the same whether the others were found or not."""
    often, seldom = pfedme(batch=5), pfedme(batch=5, personal_every=3)
    a, b = often.init(problem, 4), seldom.init(problem, 4)
    fed = federation(problem)
    for t in range(6):
        before = b
        a, b = (m.round(fed, s, Draw.of(0).round(t)) for m, s in ((often, a), (seldom, b)))
        assert torch.equal(a.x, b.x)
        assert torch.equal(b.theta, a.theta if t % 3 == 2 else before.theta)


def test_pfedme_everyone_finds_personal_models_in_every_round() -> None:
    with pytest.raises(UsageError, match="personal_every"):
        pfedme(everyone=True, personal_every=2)
