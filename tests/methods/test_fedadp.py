"""fedadp: one round by hand for both angles, smoothing over the rounds a client took part in, traffic, bad input."""

from dataclasses import replace
from math import pi

import pytest
import torch
from learners import a_quadratic, federation, gradients, play

from coterie.methods import fedadp
from coterie.methods.shared.works import gradient
from coterie.methods.weights.fedadp import gompertz
from coterie.numerics import Draw


def angle(G, direction):
    return torch.stack([torch.arccos((g @ direction / (g.norm() * direction.norm())).clamp(max=1.0)) for g in G])


@pytest.mark.parametrize("to", ["global", "target"])
def test_a_round_by_hand(to):
    problem = a_quadratic()
    s = play(fedadp(step=0.2, angle=to), problem, 1)
    G, g0 = gradients(problem, problem.start)
    theta = angle(G, G.mean(0) if to == "global" else g0)
    w = torch.exp(5 * (1 - torch.exp(-torch.exp(-5 * (theta - 1)))))
    w = w / w.sum()
    torch.testing.assert_close(s.angles, theta)
    torch.testing.assert_close(s.w, w)
    torch.testing.assert_close(s.x, problem.start - 0.2 * w @ G)


def test_the_gompertz_function_falls_from_alpha_to_0():
    f = gompertz(torch.linspace(0, pi, 50, dtype=torch.float64), 5.0)
    assert bool((f[:-1] >= f[1:]).all())
    assert float(f[0]) == pytest.approx(5.0)
    assert float(f[-1]) < 2e-4
    assert float(gompertz(torch.tensor(1.0), 5.0)) == pytest.approx(5 * (1 - 2.718281828**-1))


def test_angles_are_smoothed_over_the_rounds_that_a_client_took_part_in():
    problem, seen, times = a_quadratic(), torch.zeros(5, dtype=torch.float64), torch.zeros(5)
    method, fed = fedadp(step=0.2), federation(problem, count=3)
    s = method.init(problem, 5)
    for t in range(6):
        draw = Draw.of(4).round(t)
        view = fed.begin(t + 1, draw)
        G, _ = gradients(problem, s.x)
        seen[view.ids] += angle(G[view.ids], G[view.ids].mean(0))
        times[view.ids] += 1
        s = method.round(view, s, draw)
    assert times.unique().numel() > 1
    torch.testing.assert_close(s.angles[times > 0], (seen / times)[times > 0])


def test_without_smoothing_only_this_round_counts():
    problem = a_quadratic()
    method = fedadp(step=0.2, angle="target", smooth=False)
    s = play(method, problem, 3)
    after = play(method, problem, 1, state=s)
    G, g0 = gradients(problem, s.x)
    torch.testing.assert_close(after.angles, angle(G, g0))


def test_the_angle_to_the_gradient_that_the_target_sends_as_a_client():
    """Of MeritFed's authors: client 0's own batch, or that of the client that federation.target names."""
    problem = a_quadratic()
    for where, client in (("server", 0), (2, 2)):
        fed = federation(problem, target=where)
        s = play(fedadp(step=0.2, angle="client", smooth=False, batch=3), problem, 1, fed=fed)
        G, _ = fed.gather(gradient, problem.start, draw=Draw.of(1).round(0).phase("gradient"), batch=3)
        theta = angle(G, G[client])
        torch.testing.assert_close(s.angles, theta, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(s.x, problem.start - 0.2 * torch.softmax(gompertz(s.angles, 5.0), 0) @ G)


def test_in_a_round_without_that_client_the_angles_stay():
    problem = a_quadratic()
    method, fed = fedadp(angle="client"), federation(problem)
    s = play(method, problem, 1)
    others = replace(fed, ids=torch.tensor([1, 3]))
    after = method.round(others, s, Draw.of(1).round(1))
    assert torch.equal(after.angles, s.angles)
    assert torch.equal(after.w, s.w)
    G, _ = others.gather(gradient, s.x, draw=Draw.of(1).round(1).phase("gradient"), batch="all")
    now = torch.softmax(gompertz(s.angles[others.ids], 5.0), 0)
    assert float((now - 0.5).abs().max()) > 0.01
    torch.testing.assert_close(after.x, s.x - 0.1 * now @ G)


def test_larger_clients_weigh_more_from_the_start():
    problem = a_quadratic()
    counts = torch.tensor([12, 24, 12, 12, 12])
    grown = problem.train.__class__(problem.train.columns, problem.train.offsets, counts)
    w = fedadp().init(type("P", (), {"start": problem.start, "train": grown}), 5).w
    torch.testing.assert_close(w, counts.double() / counts.sum())


@pytest.mark.parametrize(("to", "rounds"), [("global", 0), ("target", 3)])
def test_the_target_is_asked_once_a_round_or_never(to, rounds):
    problem = a_quadratic()
    fed = federation(problem, target=0)
    play(fedadp(angle=to), problem, 3, fed=fed)
    asked = {cause.rpartition("/")[2]: entry.rounds for cause, entry in fed.ledger.by_cause.items()}
    assert asked == {"gradient": 3, **({"goal-gradient": rounds} if rounds else {})}
    assert fed.ledger.total.rounds == 3 + rounds


def test_only_the_angle_to_the_target_needs_a_target():
    assert fedadp().needs == {"gradient"}
    assert fedadp(angle="client").needs == {"gradient"}
    assert fedadp(angle="target").needs == {"gradient", "target"}
