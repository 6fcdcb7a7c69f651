"""afl: a two-client game with a known minimax point, one step by hand, averages, traffic."""

import pytest
import torch
from learners import a_quadratic, federation, gradients, play
from torch import nn

from coterie.methods import afl
from coterie.numerics import project_simplex
from coterie.problems.models import FlatModel
from coterie.problems.weighting import weighting


def two_clients():
    """L_1 = ½(θ − 1)², L_2 = 2(θ + 1)²: equal at θ = −1/3, where 2/3 ∇L_1 + 1/3 ∇L_2 = 0."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    one, two = torch.tensor([[1.0]]), torch.tensor([[2.0]])
    shards = [(one, torch.tensor([1.0])), (two, torch.tensor([-2.0]))]
    return weighting(shards, None, FlatModel(net), "squared", dtype=torch.float64)


@pytest.mark.parametrize(("output", "accuracy"), [("last", 1e-3), ("average", 2e-2)])
def test_the_minimax_point_of_two_clients(output, accuracy):
    method = afl(step=0.1, outer_step=0.1, output=output, batch="all")
    view = method.view(play(method, two_clients(), 400))
    assert float(view.model) == pytest.approx(-1 / 3, abs=accuracy)
    assert view.weights.tolist() == pytest.approx([2 / 3, 1 / 3], abs=accuracy)


def test_one_step_by_hand():
    problem = a_quadratic()
    s = play(afl(step=0.1, outer_step=0.01, batch="all"), problem, 1)
    G, _ = gradients(problem, problem.start)
    L = 0.5 * torch.einsum("ki,kij,kj->k", *(problem.exact.optima, problem.exact.hessians, problem.exact.optima))
    w = torch.full((5,), 0.2, dtype=torch.float64)
    torch.testing.assert_close(s.theta, -0.1 * w @ G)
    torch.testing.assert_close(s.w, project_simplex(w + 0.01 * L))


def test_it_needs_no_target_and_sends_one_number_more_than_fedavg():
    problem = two_clients()
    fed = federation(problem)
    play(afl(), problem, 3, fed=fed)
    assert fed.ledger.total.floats_up == 3 * 2 * (1 + 1)
    assert afl().needs == {"gradient"}
