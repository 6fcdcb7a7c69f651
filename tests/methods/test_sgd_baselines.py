"""sgd-full and sgd-ideal: what they average and whom they ask; all of MeritFed's methods on odd input."""

from dataclasses import replace

import pytest
import torch
from learners import WIDE, a_quadratic, a_toy, federation, gradients, play

from coterie.errors import NoClients, UsageError
from coterie.experiment.build import check_needs
from coterie.methods import fedadp, fixed_weights, meritfed, meritfed_zo, sgd_full, sgd_ideal, tawt
from coterie.numerics import Draw, uniform
from coterie.problems.catalogue.mean_estimation import mean_estimation

LEARNERS = {
    "meritfed": meritfed(),
    "meritfed, quadratic": meritfed(solver="quadratic"),
    "meritfed, walks": meritfed(local_steps=3, server="adam"),
    "meritfed-zo": meritfed_zo(),
    "fedadp": fedadp(),
    "fedadp, target": fedadp(angle="target", smooth=False),
    "tawt": tawt(),
}
every = pytest.mark.parametrize("method", LEARNERS.values(), ids=LEARNERS.keys())


def means(**settings):
    sizes = {"friends": 2, "near": 2, "far": 2, "samples": 20, "validation": 50, "dimension": 4}
    return mean_estimation(WIDE, **{**sizes, **settings})


def test_full_is_the_mean_of_all_and_ideal_of_the_friends():
    problem = a_quadratic()
    G, _ = gradients(problem, problem.start)
    torch.testing.assert_close(play(sgd_full(step=0.2), problem, 1).x, problem.start - 0.2 * G.mean(0))
    torch.testing.assert_close(play(sgd_ideal(step=0.2), problem, 1).x, problem.start - 0.2 * G[:3].mean(0))


def test_full_is_fixed_weights_with_equal_ones():
    problem = means()
    one, two = play(sgd_full(step=0.2, batch=5), problem, 3), play(fixed_weights(step=0.2, batch=5), problem, 3)
    torch.testing.assert_close(one.x, two.theta)


def test_ideal_asks_nobody_but_the_friends():
    problem = a_quadratic()
    fed = federation(problem)
    play(sgd_ideal(), problem, 4, fed=fed)
    assert fed.ledger.total.floats_up == fed.ledger.total.floats_down == 4 * 3 * 4
    assert fed.ledger.total.rounds == 4


def test_a_round_without_a_friend_is_no_round():
    problem = a_quadratic(friends=1)
    fed, method = federation(problem), sgd_ideal()
    strangers = replace(fed, ids=torch.tensor([1, 4]))
    with pytest.raises(NoClients):
        method.round(strangers, method.init(problem, 5), Draw.of(0))


def test_ideal_needs_to_know_the_friends():
    with pytest.raises(UsageError, match="sgd-ideal needs friends; problem toy-cosine offers gradient, hvp, target"):
        check_needs(sgd_ideal(), a_toy(clients=3, dimension=4, rows=12), "toy-cosine")


@every
def test_one_client_keeps_all_the_weight(method):
    problem = means(friends=1, near=0, far=0)
    s = play(method, problem, 2)
    assert s.w.tolist() == [1.0]
    assert bool(torch.isfinite(s.x).all())


@every
def test_zero_gradients_from_all_leave_everything_as_it_was(method):
    problem = means()
    still = replace(problem.train, columns=(torch.zeros_like(problem.train.columns[0]),))
    start = torch.zeros_like(problem.start)
    s = play(method, replace(problem, train=still, start=start), 3)
    assert not s.x.any()
    torch.testing.assert_close(s.w, uniform(6, like=s.w))
