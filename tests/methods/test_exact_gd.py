"""exact-gd: its step is the projected exact hypergradient step; size limit; traffic; nobody with weight."""

from dataclasses import replace

import pytest
import torch
from learners import a_quadratic, a_toy, federation, play, skewed

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.methods import exact_gd
from coterie.numerics import Draw, project_simplex


@pytest.mark.parametrize(("problem", "steps"), [(a_quadratic(), 1), (a_toy(), 8)], ids=["quadratic", "toy"])
def test_a_step_is_the_exact_projected_step(problem, steps):
    w = skewed(problem.clients)
    method = exact_gd(outer_step=0.003, local_steps=steps)
    s = play(method, problem, 1, state=method.init(problem, problem.clients)._replace(w=w))
    torch.testing.assert_close(s.w, project_simplex(w - 0.003 * problem.exact.hypergradient(w)), atol=1e-10, rtol=0)
    torch.testing.assert_close(s.theta, problem.exact.theta(w), atol=1e-8, rtol=0)


def test_gradient_steps_tend_to_the_same():
    problem = a_quadratic()
    newton, gradient = exact_gd(local_steps=1), exact_gd(inner="gradient", step=0.5, local_steps=60)
    torch.testing.assert_close(play(newton, problem, 2).w, play(gradient, problem, 2).w, atol=1e-9, rtol=0)


def test_it_finds_the_best_weights():
    problem = a_quadratic(curvature=1.0)
    s = play(exact_gd(outer_step=0.2, local_steps=1), problem, 100)
    torch.testing.assert_close(s.w, problem.exact.weights, atol=1e-3, rtol=0)


def test_traffic_is_quadratic_in_d():
    problem = a_quadratic()
    n, d = problem.clients, len(problem.start)
    fed = federation(problem)
    play(exact_gd(inner="gradient", local_steps=3), problem, 1, fed=fed)
    assert fed.ledger.total.floats_up == n * (3 * d + d + d * d)
    assert fed.ledger.total.rounds == 3 + 2


def test_large_models_are_refused_with_what_to_use_instead():
    sets = {"run.problem": "friends", "run.method": "exact-gd", "run.baselines": []}
    with pytest.raises(UsageError, match=r"4,810 parameters.*2,000.*primal-dual"):
        run_rounds(assemble(load(sets=sets)), None)


def test_a_singular_hessian_is_explained_and_damping_helps():
    """Without a ridge, softmax regression does not fix θ."""
    sets = {"run.problem": "friends", "run.method": "exact-gd", "problem.model": "logistic", "run.baselines": []}
    sets |= {"run.rounds": 1, "run.dtype": "float64", "method.inner": "gradient", "problem.clients": 3}
    sets |= {"problem.friends": 1}
    summary = run_rounds(assemble(load(sets=sets)), None).summary
    assert summary["outcome"] == "failed"
    assert "method.damping" in summary["message"]
    assert run_rounds(assemble(load(sets={**sets, "method.damping": 1e-2})), None).summary["outcome"] == "finished"


def test_nothing_moves_where_nobody_active_has_weight():
    problem = a_quadratic()
    method = exact_gd(local_steps=1)
    w = torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64)
    s0 = method.init(problem, 5)._replace(w=w)
    s = method.round(replace(federation(problem), ids=torch.tensor([2, 3])), s0, Draw.of(0))
    torch.testing.assert_close(s.theta, s0.theta)
    torch.testing.assert_close(s.w, w)
