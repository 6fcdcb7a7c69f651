"""tawt: rounds by hand, every second round, traffic; it finds the friends."""

from dataclasses import replace

import torch
from learners import WIDE, a_quadratic, federation, gradients, play, skewed

from coterie.methods import tawt
from coterie.numerics import Draw
from coterie.problems.catalogue.mean_estimation import mean_estimation


def test_two_rounds_by_hand():
    problem, w = a_quadratic(), skewed(5)
    method = tawt(step=0.2, mirror_step=0.7)
    s = play(method, problem, 2, state=method.init(problem, 5)._replace(w=w))
    G, g0 = gradients(problem, problem.start)
    w = w * torch.exp(0.7 * (G @ g0) / (G.norm(dim=1) * g0.norm()))
    w = w / w.sum()
    x = problem.start - 0.2 * w @ G
    x = x - 0.2 * w @ gradients(problem, x)[0]  # the second round leaves the weights alone
    torch.testing.assert_close(s.w, w)
    torch.testing.assert_close(s.x, x)


def test_the_cosine_to_the_gradient_that_the_target_sends_as_a_client():
    """Of MeritFed's authors: client 0's own gradient, and c = 100 γ; nothing is asked of the target."""
    problem = a_quadratic()
    fed = federation(problem, target=1)
    s = play(tawt(step=0.003, angle="client"), problem, 1, fed=fed)
    G, _ = gradients(problem, problem.start)
    w = torch.softmax(0.3 * (G @ G[1]) / (G.norm(dim=1) * G[1].norm()), 0)
    torch.testing.assert_close(s.w, w)
    assert fed.ledger.total.rounds == 1
    assert tawt(angle="client").needs == {"gradient"}
    others = replace(fed, ids=torch.tensor([0, 2]))
    torch.testing.assert_close(tawt(angle="client", every=1).round(others, s, Draw.of(0)).w, s.w)


def test_the_target_is_asked_every_second_round():
    problem = a_quadratic()
    for every, times in ((2, 3), (1, 5), (5, 1)):
        fed = federation(problem, target=0)
        play(tawt(every=every), problem, 5, fed=fed)
        asked = {cause.rpartition("/")[2]: entry for cause, entry in fed.ledger.by_cause.items()}
        assert asked["gradient"].rounds == 5
        assert (asked["goal-gradient"].rounds, asked["goal-gradient"].floats_up) == (times, times * 4)


def test_it_finds_the_friends():
    problem = mean_estimation(WIDE, friends=3, near=0, far=3, dimension=4, samples=100, validation=500, distance=3.0)
    s = play(tawt(step=0.5, mirror_step=1.0), problem, 60)
    assert float(s.w[:3].sum()) > 0.95
