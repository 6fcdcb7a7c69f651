"""meritfed: one round by hand, reductions, the second-order model, which rows judge, the server's rules, traffic."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from learners import WIDE, a_quadratic, a_toy, federation, gradients, play, skewed

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.federation import Shard, pack
from coterie.federation.ledger import Entry
from coterie.methods import fedavg, meritfed, meritfed_zo, sgd_full, sgd_ideal
from coterie.methods.shared.optimisers import UpdateRule
from coterie.methods.weights.mirror import Judge, first_order, goal_gradient, judging_batch, mirror_descent
from coterie.numerics import Draw, entropic_step, uniform
from coterie.problems import Context
from coterie.problems.catalogue import registry
from coterie.problems.catalogue.friends import friends
from coterie.problems.catalogue.mean_estimation import mean_estimation

SMALL = {"friends": 2, "near": 3, "far": 2, "samples": 40, "validation": 30, "dimension": 4}


def means(**settings):
    return mean_estimation(WIDE, **{**SMALL, **settings})


def started(method, problem, w):
    return method.init(problem, problem.clients)._replace(w=w)


def ledger(problem, method, rounds=1, **table):
    fed = federation(problem, **table)
    play(method, problem, rounds, fed=fed)
    moved = {cause: entry for cause, entry in fed.ledger.by_cause.items() if entry != Entry(points=entry.points)}
    return {cause.rpartition("/")[2]: entry for cause, entry in moved.items()}


def test_a_round_by_hand():
    problem, gamma, alpha = a_quadratic(), 0.3, 2.0
    x, w = problem.start, skewed(5)
    method = meritfed(step=gamma, mirror_step=alpha, mirror_steps=3)
    s = play(method, problem, 1, state=started(method, problem, w))
    G, _ = gradients(problem, x)
    for _ in range(3):
        _, v = gradients(problem, x - gamma * w @ G)
        w = w * torch.exp(alpha * gamma * G @ v)
        w = w / w.sum()
    torch.testing.assert_close(s.w, w)
    torch.testing.assert_close(s.x, x - gamma * w @ G)


def test_the_slope_is_the_derivative_of_the_loss_after_the_step():
    problem, step, h = a_toy(clients=4, dimension=6, rows=12), 0.1, 1e-6
    fed, draw, w = federation(problem), Draw.of(0), skewed(4)
    x = draw.normal(6, dtype=torch.float64)
    G, _ = gradients(problem, x)

    def phi(u):
        return problem.task.full_loss(x - step * u @ G, problem.target.valid)

    slope = first_order(Judge("validation", "all").at(fed, 0, draw), x, G, step=step)(w, 0)
    basis = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(slope, torch.stack([(phi(w + h * e) - phi(w - h * e)) / (2 * h) for e in basis]))


@pytest.mark.parametrize("batch", ["all", 5])
def test_without_mirror_steps_it_is_sgd_full(batch):
    problem = means()
    one = play(meritfed(step=0.3, mirror_steps=0, batch=batch), problem, 4)
    two = play(sgd_full(step=0.3, batch=batch), problem, 4)
    torch.testing.assert_close(one.x, two.x)
    torch.testing.assert_close(one.w, uniform(7, like=one.w))


def test_with_the_ideal_weights_it_is_sgd_ideal():
    """A weight of 0 stays 0 in mirror descent, so weights on the friends stay on the friends."""
    problem, ideal = means(), sgd_ideal(step=0.3, batch=5)
    w = ideal.init(problem, 7).w
    assert w.tolist() == [0.5, 0.5, 0, 0, 0, 0, 0]
    fixed = meritfed(step=0.3, mirror_steps=0, batch=5)
    torch.testing.assert_close(play(fixed, problem, 4, state=started(fixed, problem, w)).x, play(ideal, problem, 4).x)
    learned = meritfed(step=0.3, mirror_step=5.0, batch=5)
    s = play(learned, problem, 4, state=started(learned, problem, w))
    assert not s.w[2:].any()
    assert float(s.w[:2].sum()) == pytest.approx(1.0)


def test_exact_weights_have_the_variance_of_the_friends_alone():
    """σ²/G: with a = 2γ/d the iterates spread by a/(2 − a) σ²/(G · batch) around the friends' pooled mean."""
    spread, a, batch = {}, 0.5, 10
    for G in (1, 5):
        problem = means(friends=G, near=1, far=1, samples=200)
        method = meritfed(step=a * 4 / 2, mirror_steps=0, batch=batch)
        w = sgd_ideal().init(problem, G + 2).w
        rows = problem.train.columns[0].reshape(G + 2, 200, 4)[:G]
        s, path, fed = started(method, problem, w), [], federation(problem)
        for t in range(500):
            s = method.round(fed, s, Draw.of(2).round(t))
            path.append(s.x)
        sigma2 = float((rows - rows.mean(1, keepdim=True)).square().mean())
        pooled = float((torch.stack(path[20:]) - rows.mean((0, 1))).square().mean())
        spread[G] = pooled / (a / (2 - a) * sigma2 / batch)
    assert spread[1] == pytest.approx(1.0, rel=0.15)
    assert spread[5] == pytest.approx(1 / 5, rel=0.15)


QUADRATICS = {
    "few clients": lambda: a_quadratic(clients=4, dimension=6, rows=12, curvature=3.0),
    "many clients": lambda: a_quadratic(clients=9, dimension=3, rows=12, curvature=3.0),
    "means": means,
}


@pytest.mark.parametrize("name", QUADRATICS)
@pytest.mark.parametrize("settings", [{}, {"average": True, "local_steps": 3}], ids=["plain", "walks"])
def test_the_second_order_model_is_exact_for_quadratic_losses(name, settings):
    problem = QUADRATICS[name]()
    common = {"step": 0.3, "mirror_step": 20.0, "mirror_steps": 15, **settings}
    one, two = (play(meritfed(**common, solver=solver), problem, 2) for solver in ("mirror", "quadratic"))
    torch.testing.assert_close(one.w, two.w, atol=1e-9, rtol=0)
    torch.testing.assert_close(one.x, two.x, atol=1e-9, rtol=0)
    linear = play(meritfed(**common, solver="quadratic", rank=0), problem, 2)
    assert float((linear.w - one.w).abs().max()) > 1e-4  # so curvature matters here


@pytest.mark.parametrize("rank", [0, 1, None])
def test_the_first_mirror_step_needs_no_curvature(rank):
    problem = a_toy(clients=4, dimension=6, rows=12)
    common = {"step": 0.05, "mirror_step": 3.0, "mirror_steps": 1}
    one, two = play(meritfed(**common), problem, 3), play(meritfed(**common, solver="quadratic", rank=rank), problem, 3)
    torch.testing.assert_close(one.w, two.w)


def test_a_higher_rank_comes_closer_to_mirror_descent():
    problem = friends(Context(0, torch.float64), model="logistic", clients=6, friends=2, test=1600)
    common = {"step": 2.0, "mirror_step": 1.0, "mirror_steps": 10}
    exact = play(meritfed(**common), problem, 2).w
    gaps = [
        float((play(meritfed(**common, solver="quadratic", rank=rank), problem, 2).w - exact).abs().sum())
        for rank in (0, 2, None)
    ]
    assert gaps[0] > 1.5 * gaps[1] > 3 * gaps[2]
    assert gaps[2] < 0.1 * gaps[0]


def test_one_exchange_is_enough_for_the_second_order_model():
    problem, rounds, steps = a_quadratic(), 3, 7
    d, K = len(problem.start), problem.clients
    asked = ledger(problem, meritfed(mirror_steps=steps), rounds, target=0)
    assert asked["gradient"].rounds == rounds
    assert asked["gradient"].floats_up == rounds * K * d
    assert asked["goal-gradient"].rounds == rounds * steps
    assert (asked["goal-gradient"].floats_up, asked["goal-gradient"].floats_down) == (rounds * steps * d,) * 2
    for rank, r in ((None, min(K - 1, d)), (2, 2), (0, 0)):
        model = ledger(problem, meritfed(mirror_steps=steps, solver="quadratic", rank=rank), rounds, target=0)
        assert set(model) == {"gradient", "goal-model"}
        assert model["goal-model"].rounds == rounds
        assert model["goal-model"].floats_up == rounds * (d + r * r)
        assert model["goal-model"].floats_down == rounds * (r + 1) * d


def test_a_target_at_the_server_costs_nothing():
    assert set(ledger(a_quadratic(), meritfed())) == {"gradient"}


def test_weights_restart_or_go_on():
    problem = a_quadratic()
    common = {"step": 0.1, "mirror_step": 3.0, "mirror_steps": 2}
    first = play(meritfed(**common), problem, 1)
    again = play(meritfed(**common, restart=True), problem, 1, state=first)
    G, _ = gradients(problem, first.x)
    w = uniform(5, like=first.w)
    for _ in range(2):
        w = entropic_step(w, -0.1 * G @ gradients(problem, first.x - 0.1 * w @ G)[1], 3.0)
    torch.testing.assert_close(again.w, w)
    assert not torch.allclose(play(meritfed(**common), problem, 1, state=first).w, w, atol=1e-3)


def test_the_mean_of_the_mirror_iterates():
    slopes = Draw.of(0).normal(4, 3, dtype=torch.float64)
    w = start = uniform(3, like=slopes)
    seen = [w := entropic_step(w, slope, 0.5) for slope in slopes]
    settings = {"step": 0.5, "steps": 4}
    torch.testing.assert_close(mirror_descent(start, lambda w, i: slopes[i], **settings), seen[-1])
    mean = mirror_descent(start, lambda w, i: slopes[i], **settings, average=True)
    torch.testing.assert_close(mean, torch.stack(seen).mean(0))
    assert mirror_descent(start, lambda w, i: slopes[i], step=0.5, steps=0, average=True) is start


def test_each_mirror_step_may_continue_from_the_mean_so_far():
    """As the authors do: step from the running mean, then take the new iterate into it."""
    slopes = Draw.of(0).normal(4, 3, dtype=torch.float64)
    start = mean = uniform(3, like=slopes)
    seen = []
    for slope in slopes:
        seen.append(entropic_step(mean, slope, 0.5))
        mean = torch.stack(seen).mean(0)
    found = mirror_descent(start, lambda w, i: slopes[i], step=0.5, steps=4, average="continue")
    torch.testing.assert_close(found, mean)
    without = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    assert float(mirror_descent(without, lambda w, i: slopes[i], step=0.5, steps=4, average="continue")[0]) == 0.0
    problem = a_quadratic()
    for make in (meritfed, meritfed_zo):
        found = [play(make(mirror_step=5.0, average=kind), problem, 2).w for kind in (False, True, "continue")]
        assert not torch.allclose(found[1], found[2])
        assert not torch.allclose(found[0], found[2])


def test_the_exponent_is_cut_after_some_rounds():
    problem, common = a_quadratic(), {"step": 0.1, "mirror_steps": 3}
    two = play(meritfed(**common, mirror_step=5.0), problem, 2)
    cut = play(meritfed(**common, mirror_step=5.0, cut=2), problem, 3)
    torch.testing.assert_close(cut.w, play(meritfed(**common, mirror_step=0.5), problem, 1, state=two).w)
    later, never = (play(meritfed(**common, mirror_step=5.0, cut=after), problem, 3) for after in (3, None))
    assert torch.equal(later.w, never.w)
    assert not torch.allclose(cut.w, never.w)


def test_several_local_steps_average_the_walks():
    problem = a_quadratic()
    walk = {"step": 0.1, "local_steps": 4, "batch": "all"}
    one = play(meritfed(**walk, mirror_steps=0), problem, 3)
    two = play(fedavg(**walk, weights="uniform"), problem, 3)
    torch.testing.assert_close(one.x, two.x)
    learned = play(meritfed(**walk, mirror_step=3.0), problem, 30)
    assert float(learned.w[:3].sum()) > 0.95 > float(one.w[:3].sum())


@pytest.mark.parametrize(
    ("server", "theirs"),
    [
        (UpdateRule("sgd", 0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (UpdateRule("momentum", 0.1, 0.8), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8)),
        (UpdateRule("adam", 0.1, 0.8, 0.95), lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95))),
    ],
    ids=lambda s: s.rule if isinstance(s, UpdateRule) else "",
)
def test_the_servers_rules_are_those_of_torch(server, theirs):
    x = Draw.of(0).normal(6, dtype=torch.float64)
    parameter = torch.nn.Parameter(x.clone())
    optimiser, moments = theirs([parameter]), server.start(x)
    for t in range(1, 6):
        p = Draw.of(t).normal(6, dtype=torch.float64)
        parameter.grad = p
        optimiser.step()
        x, moments = server.move(x, p, moments, t)
    torch.testing.assert_close(x, parameter.detach())


@pytest.mark.parametrize(("server", "step"), [("momentum", 0.05), ("adam", 0.05)])
def test_learned_weights_go_with_the_servers_rule(server, step):
    problem = means(near=0, distance=3.0, samples=200, validation=500)
    plain = {"step": 0.5, "mirror_step": 1.0, "mirror_steps": 3}
    s = play(meritfed(**plain, server=server, server_step=step), problem, 150)
    assert float(s.w[:2].sum()) > 0.95
    assert float(s.x.norm()) < 0.2 * float(problem.start.norm())
    one, two = (play(meritfed(**plain, **more), problem, 3) for more in ({"server": "momentum", "momentum": 0.0}, {}))
    assert torch.equal(one.x, two.x)


def test_training_rows_of_the_target_judge():
    problem = means()
    on_train = replace(problem, target=Shard(problem.task, None, problem.target.train))
    one, two = play(meritfed(data="train"), problem, 2), play(meritfed(), on_train, 2)
    torch.testing.assert_close(one.w, two.w)
    assert not torch.equal(one.w, play(meritfed(), problem, 2).w)


@pytest.mark.parametrize(("solver", "asked", "times"), [("mirror", "goal-gradient", 3), ("quadratic", "goal-model", 1)])
def test_a_client_that_is_the_target_is_asked_for_its_own_training_rows(solver, asked, times):
    problem = a_quadratic()
    fed = federation(problem, target=2)
    mirror = {"mirror_step": 0.1, "mirror_steps": 3, "solver": solver}
    s = play(meritfed(data="train", **mirror), problem, 2, fed=fed)
    own = replace(problem, target=Shard(problem.task, None, problem.train.client(2)))
    torch.testing.assert_close(s.w, play(meritfed(**mirror), own, 2).w)
    entry = fed.ledger.by_cause[f"mirror/{asked}"]
    r = 0 if solver == "mirror" else 4
    assert (entry.rounds, entry.floats_up) == (2 * times, 2 * times * (4 + r * r))
    assert entry.floats_down == 2 * times * (1 + r) * 4


def test_a_target_without_training_rows_is_refused_where_they_are_asked_for():
    with pytest.raises(UsageError, match=r"validation rows only; say which client it is by federation\.target"):
        play(meritfed(data="train"), a_quadratic(), 1)


def blocks_of(problem, method, rounds):
    """Which held-out rows were asked for, exchange by exchange: each row says its own number."""
    numbers = torch.arange(problem.target.valid.capacity, dtype=torch.float64)[:, None].expand(-1, 4)
    rows = pack([numbers]).client(0)
    seen = []

    class Spy:
        offers, mixes_rows, model = problem.task.offers, False, problem.task.model
        full_gradient = staticmethod(problem.task.full_gradient)

        @staticmethod
        def gradient(theta, batch):
            if len(batch.inputs) == 5:
                seen.append(batch.inputs[:, 0].long().tolist())
            return problem.task.gradient(theta, batch)

    play(method, replace(problem, target=Shard(Spy, None, rows)), rounds)
    return seen


def test_fresh_rows_are_seen_once_a_pass():
    problem = means(validation=20)
    settings = {"data": "fresh", "mirror_batch": 5, "mirror_steps": 2}
    by_round = blocks_of(problem, meritfed(**settings), 8)
    assert by_round[::2] == by_round[1::2]  # MD: one function a round
    for a_pass in (by_round[:8:2], by_round[8::2]):
        assert sorted(chain(*a_pass)) == list(range(20))
    assert by_round[:8] != by_round[8:]
    by_step = blocks_of(problem, meritfed(**settings, mirror="smd"), 4)
    assert sorted(chain(*by_step[:4])) == sorted(chain(*by_step[4:])) == list(range(20))
    assert by_step[:4] == by_round[::2][:4]  # one stream


def test_more_fresh_rows_than_there_are_are_refused():
    with pytest.raises(UsageError, match=r"method\.mirror_batch = 31 rows, but the target holds 30; lower it"):
        meritfed(data="fresh", mirror_batch=31).init(means(), 7)
    rows = means().target.valid
    static = type("S", (), {"data": "fresh", "batch": 30, "block": 3})
    assert len(judging_batch(rows, static, Draw.of(0)).inputs) == 30


def test_one_client_and_zero_gradients_change_nothing():
    alone = means(friends=1, near=0, far=0)
    still = replace(means(), start=torch.zeros(4, dtype=torch.float64))
    still = replace(still, train=replace(still.train, columns=(torch.zeros_like(still.train.columns[0]),)))
    for solver in ("mirror", "quadratic"):
        s = play(meritfed(solver=solver), alone, 3)
        assert s.w.tolist() == [1.0]
        torch.testing.assert_close(s.x, play(sgd_full(), alone, 3).x)
        s = play(meritfed(solver=solver), still, 3)
        torch.testing.assert_close(s.w, uniform(7, like=s.w))
        assert not s.x.any()


def test_missing_clients_keep_their_weight():
    problem, w = a_quadratic(), skewed(5)
    method = meritfed(mirror_step=5.0)
    fed = federation(problem, count=2)
    draw = Draw.of(1).round(0)
    view = fed.begin(1, draw)
    s = method.round(view, started(method, problem, w), draw)
    absent = [k for k in range(5) if k not in view.ids.tolist()]
    assert torch.equal(s.w[absent], w[absent])
    assert float(s.w.sum()) == pytest.approx(1.0)
    assert not torch.allclose(s.w, w)


def test_the_paper_in_small_near_clients_help_and_far_ones_are_left_out():
    """With μ small MeritFed pools the near clients' samples and beats SGD-Ideal; SGD-Full stalls at the mean of all."""
    sizes = {"friends": 2, "near": 20, "far": 10, "samples": 50, "dimension": 5, "shift": 0.001}
    plain, rounds = {"step": 0.2, "batch": 20}, 120
    learned = meritfed(**plain, mirror_step=2.0, data="fresh", mirror_batch=20, solver="quadratic")
    methods = {"learned": learned, "ideal": sgd_ideal(**plain), "full": sgd_full(**plain)}
    errors, far = dict.fromkeys(methods, 0.0), 0.0
    for seed in range(3):
        problem = mean_estimation(Context(seed, torch.float64), **sizes, validation=20 * rounds)
        for name, method in methods.items():
            s = play(method, problem, rounds)
            errors[name] += float(s.x.square().sum()) / 3
            far += problem.measure(method.view(s))["far_weight"] / 3 if name == "learned" else 0.0
    assert 5 * errors["learned"] < errors["ideal"]
    assert far < 0.1
    assert errors["full"] == pytest.approx((10 / 32) ** 2, rel=0.3)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"federation.target": 99}, "federation.target is client 99, but there are clients 0 … 5 only"),
        ({"method.mirror_steps": -1}, "method.mirror_steps = -1"),
        ({"method.momentum": 1.0}, "method.momentum = 1.0"),
        ({"method.data": "test"}, "method.data = 'test'"),
    ],
)
def test_bad_settings_are_explained(sets, message):
    with pytest.raises(UsageError, match=message):
        assemble(load(sets={**sets, "federation.mode": "vmap"}, flags={"run.problem": "quadratic"}))


@pytest.mark.parametrize("method", ["meritfed", "meritfed-zo", "tawt"])
def test_without_a_target_the_run_is_refused_with_methods_that_fit(method, monkeypatch):
    bare = replace(registry.problem_entry("quadratic"), name="bare")
    vars(bare)["make"] = lambda context: replace(a_quadratic(), target=None)
    monkeypatch.setattr(registry, "PROBLEMS", (*registry.PROBLEMS, bare))
    with pytest.raises(UsageError, match=f"{method} needs target; problem bare offers .*fedadp"):
        assemble(load(flags={"run.problem": "bare", "run.method": method}))


def test_the_state_survives_a_checkpoint(tmp_path):
    sets = {"method.server": "adam", "method.data": "fresh", "method.mirror_batch": 5, "federation.mode": "vmap"}
    config = load(sets=sets, flags={"run.problem": "quadratic", "run.rounds": 6})
    whole = run_rounds(assemble(config), None)
    run_rounds(assemble(config.with_run(rounds=3)), tmp_path)
    resumed = run_rounds(assemble(config), tmp_path, resume=True)
    for one, two in zip(whole.state.moments, resumed.state.moments, strict=True):
        assert torch.equal(one, two)
    assert torch.equal(whole.state.x, resumed.state.x)
    assert resumed.state.rounds == 6


def test_the_default_asks_for_all_held_out_rows():
    problem = a_quadratic()
    fed = federation(problem)
    ask = Judge("validation", "all").at(fed, 0, Draw.of(0))
    torch.testing.assert_close(ask(goal_gradient, problem.start, 0), gradients(problem, problem.start)[1])


@pytest.mark.parametrize("data", ["validation", "train"])
def test_a_quadratic_loss_at_the_server_is_asked_once_for_all_mirror_steps(data):
    problem = means()
    method = meritfed(step=0.5, mirror_step=3.0, mirror_steps=20, data=data)
    found, asked = play(method, problem, 2), replace(problem.task, quadratic=False)
    plain = replace(problem, task=asked, target=replace(problem.target, task=asked))
    expected = play(method, plain, 2)
    torch.testing.assert_close(found.w, expected.w, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.x, expected.x, rtol=1e-9, atol=1e-12)
    assert float((found.w - uniform(problem.clients, like=found.w)).abs().max()) > 0.01


def test_a_target_that_is_a_client_is_asked_every_time():
    asked = ledger(means(), meritfed(mirror_steps=7), target=0)["goal-gradient"]
    assert asked.rounds == 7
