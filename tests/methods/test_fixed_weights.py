"""fixed-weights: each choice reaches its own optimum; weights are checked; what it needs follows from the choice."""

import pytest
import torch
from learners import a_quadratic, federation, play

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.methods import fixed_weights


@pytest.mark.parametrize("weights", ["avg", "opt", [1.0, 0.0, 3.0, 0.0, 0.0]], ids=str)
def test_it_reaches_the_optimum_for_its_weights(weights):
    problem = a_quadratic()
    w = {
        "avg": torch.full((5,), 0.2, dtype=torch.float64),
        "opt": problem.exact.weights,
        "[1.0, 0.0, 3.0, 0.0, 0.0]": torch.tensor([0.25, 0, 0.75, 0, 0], dtype=torch.float64),
    }[str(weights)]
    method = fixed_weights(step=0.5, weights=weights, batch="all")
    s = play(method, problem, 80)
    torch.testing.assert_close(s.theta, problem.exact.theta(w), atol=1e-8, rtol=0)
    torch.testing.assert_close(method.view(s).weights, w)


def test_val_learns_from_the_target_and_asks_nobody():
    problem = a_quadratic()
    fed = federation(problem)
    method = fixed_weights(step=0.5, weights="val", batch="all")
    s = play(method, problem, 80, fed=fed)
    torch.testing.assert_close(s.theta, problem.exact.target_optimum, atol=1e-8, rtol=0)
    assert method.view(s).weights is None
    assert fed.ledger.total.floats_up == 0


def test_own_weights_must_fit_the_clients():
    problem = a_quadratic()
    with pytest.raises(UsageError, match="2 numbers, but there are 5 clients"):
        fixed_weights(weights=[0.5, 0.5]).init(problem, 5)
    with pytest.raises(UsageError, match="sums to 0"):
        fixed_weights(weights=[0.0] * 5).init(problem, 5)
    with pytest.raises(UsageError, match=r"method\.weights"):
        load(sets={"method.weights": [-1.0, 2.0]}, flags={"run.method": "fixed-weights"})
    with pytest.raises(UsageError, match=r"method\.weights"):
        load(sets={"method.weights": "best"}, flags={"run.method": "fixed-weights"})


def test_opt_is_refused_where_the_best_weights_are_unknown():
    sets = {"run.problem": "friends", "run.method": "fixed-weights", "method.weights": "opt"}
    with pytest.raises(UsageError, match="needs optimal-weights"):
        assemble(load(sets=sets))


def test_missing_clients_are_stood_in_for():
    problem = a_quadratic()
    fed = federation(problem, count=2)
    s = play(fixed_weights(step=0.1, batch="all"), problem, 1, fed=fed)
    assert fed.ledger.total.floats_up == 2 * len(problem.start)
    assert float(s.theta.norm()) > 0
