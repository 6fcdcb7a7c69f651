"""primal-dual: the hypergradient at the saddle point, one step by hand, traffic, absent clients, bad input."""

import json
from dataclasses import replace

import pytest
import torch
from learners import a_quadratic, a_toy, federation, gradients, play, skewed

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.experiment.run import run
from coterie.methods import primal_dual
from coterie.numerics import Draw, project_ball, project_simplex

FROZEN = {"warmup": 10**6, "batch": "all"}


@pytest.mark.parametrize(
    ("problem", "settings", "rounds"),
    [
        (a_quadratic(), {"step": 0.3, "dual_step": 0.6, "local_steps": 10}, 15),
        (a_toy(), {"step": 0.05, "dual_step": 0.1, "local_steps": 10, "radius": 100.0}, 25),
    ],
    ids=["quadratic", "toy"],
)
def test_the_hypergradient_at_the_saddle_point_is_exact(problem, settings, rounds):
    method = primal_dual(**settings, **FROZEN)
    w = skewed(problem.clients)
    s = play(method, problem, rounds, state=method.init(problem, problem.clients)._replace(w=w))
    G, _ = gradients(problem, s.theta)
    exact = problem.exact.hypergradient(w)
    assert torch.equal(s.w, w)
    torch.testing.assert_close(s.theta, problem.exact.theta(w), atol=1e-6, rtol=0)
    torch.testing.assert_close(G @ s.lam, exact, atol=1e-6, rtol=0)


def test_the_dual_variable_is_minus_the_adjoint():
    problem = a_quadratic()
    s = play(primal_dual(step=0.3, dual_step=0.6, local_steps=10, **FROZEN), problem, 15)
    H = torch.einsum("k,kij->ij", s.w, problem.exact.hessians)
    _, g0 = gradients(problem, s.theta)
    torch.testing.assert_close(H @ s.lam, -g0, atol=1e-6, rtol=0)


def test_it_finds_the_best_weights():
    problem = a_quadratic(curvature=1.0)
    s = play(primal_dual(step=0.3, dual_step=0.5, outer_step=0.05, batch="all"), problem, 300)
    assert float(problem.exact.objective(s.w)) < 1e-6
    torch.testing.assert_close(s.w, problem.exact.weights, atol=1e-3, rtol=0)


def test_two_inner_steps_by_hand():
    """The slope uses θ and λ of the last answers, from before the update that they lead to."""
    problem = a_quadratic()
    form, n = problem.exact, problem.clients
    eta, mu, alpha, gamma, radius = 0.1, 0.3, 0.05, 1.5, 0.2
    theta, lam, w = problem.start, torch.full((4,), 0.3, dtype=torch.float64), skewed(n)
    method = primal_dual(
        step=eta,
        dual_step=mu,
        outer_step=alpha,
        augmentation=gamma,
        radius=radius,
        local_steps=2,
        batch="all",
    )
    s = play(method, problem, 1, state=method.init(problem, n)._replace(lam=lam, w=w))
    H = torch.einsum("k,kij->ij", w, form.hessians)
    for _ in range(2):
        G, g0 = gradients(problem, theta)
        slope = G @ lam
        theta, lam = theta - eta * (g0 + H @ lam + gamma * w @ G), project_ball(lam + mu * w @ G, radius)
    torch.testing.assert_close(s.theta, theta)
    torch.testing.assert_close(s.lam, lam)
    torch.testing.assert_close(s.w, project_simplex(w - alpha * slope))
    assert float(s.lam.norm()) <= radius * (1 + 1e-12)


def test_without_a_dual_variable_it_is_gradient_descent_on_the_augmented_goal():
    """λ = 0 and frozen: θ descends on L_0 + Γ Σ w_k L_k and the weights do not move."""
    problem = a_quadratic()
    s = play(primal_dual(step=0.1, dual_step=1e-200, augmentation=2.0, batch="all"), problem, 5)
    theta = problem.start
    for _ in range(5):
        G, g0 = gradients(problem, theta)
        theta = theta - 0.1 * (g0 + 2.0 * G.mean(0))
    torch.testing.assert_close(s.theta, theta)
    torch.testing.assert_close(s.w, torch.full_like(s.w, 1 / problem.clients))


def test_absent_clients_keep_their_slope_at_zero_and_the_others_stand_in_for_them():
    problem = a_quadratic()
    ids = torch.tensor([0, 3])
    fed = replace(federation(problem), ids=ids)
    lam, w = torch.full((4,), 0.1, dtype=torch.float64), skewed(5)
    method = primal_dual(step=0.1, dual_step=0.2, outer_step=0.01, batch="all")
    s0 = method.init(problem, 5)._replace(lam=lam, w=w)
    s = method.round(fed, s0, Draw.of(0))
    G, g0 = gradients(problem, s0.theta)
    slope = torch.zeros(5, dtype=torch.float64)
    slope[ids] = 5 / 2 * (G @ lam)[ids]
    H = 5 / 2 * torch.einsum("k,kij->ij", w[ids], problem.exact.hessians[ids])
    g = 5 / 2 * w[ids] @ G[ids]
    torch.testing.assert_close(s.w, project_simplex(w - 0.01 * slope))
    torch.testing.assert_close(s.theta, s0.theta - 0.1 * (g0 + H @ lam + g))
    torch.testing.assert_close(s.lam, lam + 0.2 * g)


def test_every_inner_step_has_its_own_active_set():
    problem = a_quadratic(clients=20, friends=3)
    method, fed = primal_dual(local_steps=4), federation(problem, count=3)
    state = method.init(problem, 20)
    draw = Draw.of(0).round(0)
    method.round(fed.begin(1, draw), state, draw)
    sets = {tuple(fed.sample(draw=draw.step(k)).ids.tolist()) for k in range(1, 4)}
    assert len(sets) == 3
    assert fed.ledger.total.floats_up == 4 * 3 * 2 * 4


@pytest.mark.parametrize("steps", [1, 3])
def test_traffic_is_2kd_floats_up_and_one_more_with_the_scalar_at_the_client(steps):
    problem = a_quadratic()
    n, d = problem.clients, len(problem.start)
    results = {}
    for place, extra in (("server", 0), ("client", 1)):
        fed = federation(problem)
        results[place] = play(primal_dual(local_steps=steps, scalar=place), problem, 2, fed=fed)
        assert fed.ledger.total.floats_up == 2 * n * (2 * steps * d + extra)
        assert fed.ledger.total.floats_down == 2 * n * 2 * steps * d
        assert fed.ledger.total.rounds == 2 * steps
    torch.testing.assert_close(results["client"].w, results["server"].w)


def test_products_of_clients_without_weight_can_be_spared():
    problem = a_quadratic()
    n, d = problem.clients, len(problem.start)
    w = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    lam = torch.full((d,), 0.2, dtype=torch.float64)
    floats, states = {}, {}
    for ask in ("all", "weighted"):
        fed = federation(problem)
        method = primal_dual(ask=ask, batch="all", scalar="client")
        states[ask] = play(method, problem, 1, state=method.init(problem, n)._replace(w=w, lam=lam), fed=fed)
        floats[ask] = fed.ledger.total.floats_up
    assert floats == {"all": n * (2 * d + 1), "weighted": n * (d + 1) + 2 * d}
    for one, other in zip(states["all"][:3], states["weighted"][:3], strict=True):
        torch.testing.assert_close(one, other)


def test_warmup_leaves_the_weights_alone():
    problem = a_quadratic()
    method = primal_dual(warmup=3)
    s = play(method, problem, 3)
    assert torch.equal(s.w, torch.full_like(s.w, 1 / 5))
    assert float(s.lam.norm()) > 0
    assert not torch.equal(play(method, problem, 4).w, s.w)


def test_steps_without_an_active_client_are_skipped_and_counted(tmp_path):
    config = load(
        sets={"federation.active": 0.2, "problem.clients": 3},
        flags={"run.method": "primal-dual", "run.problem": "quadratic", "run.rounds": 30, "run.baselines": []},
    )
    summary = run(config, tmp_path / "out", lambda name, is_baseline: None)
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    skipped = [e for e in events if e["event"] == "skipped"]
    assert summary["outcome"] == "finished"
    assert 5 < len(skipped) < 28
    assert summary["communication"]["rounds"] == 30 - len(skipped)


def test_bad_settings_are_refused_with_their_names():
    for key, value in (("radius", 0), ("radius", -1.0), ("augmentation", -1), ("step", 0), ("local_steps", 0)):
        with pytest.raises(UsageError, match=f"method.{key}"):
            load(sets={f"method.{key}": value}, flags={"run.method": "primal-dual"})
        with pytest.raises(UsageError, match=key):
            primal_dual(**{key: value})


@pytest.mark.parametrize(("gamma", "warned"), [(1.0, True), (2.5, False)])
def test_a_small_gamma_is_warned_of_once_with_the_bound_of_theorem_1(gamma, warned):
    problem = a_quadratic(curvature=2.0)
    bound = problem.exact.curvature.smooth / problem.exact.curvature.convex
    assert 1.0 < bound < 2.5
    fed = federation(problem)
    play(primal_dual(augmentation=gamma, step=0.01), problem, 3, fed=fed)
    texts = [e["reason"] for e in fed.book.drain() if e["event"] == "warning"]
    assert len(texts) == warned
    if warned:
        assert f"{bound:.4g}" in texts[0]
        assert "method.augmentation = 1" in texts[0]


def test_no_warning_where_the_constants_are_unknown():
    sets = {"run.rounds": 1, "run.problem": "friends", "run.method": "primal-dual", "run.baselines": []}
    parts = assemble(load(sets=sets))
    result = run_rounds(parts, None)
    assert result.summary["outcome"] == "finished"
    assert result.state.bound is None


def test_the_record_has_the_residuals_of_the_saddle_point():
    problem = a_quadratic()
    method = primal_dual(step=0.3, dual_step=0.6, local_steps=10, **FROZEN)
    start = method.round(federation(problem), method.init(problem, problem.clients), Draw.of(0))
    G, g0 = gradients(problem, problem.start)
    one = primal_dual(step=0.3, dual_step=0.6, **FROZEN)
    more = one.view(one.round(federation(problem), one.init(problem, problem.clients), Draw.of(0))).more
    assert more["primal_residual"] == pytest.approx(float((start.w @ G).norm()))
    assert more["dual_residual"] == pytest.approx(float(g0.norm()))  # λ = 0
    settled = method.view(play(method, problem, 15)).more
    assert max(settled["primal_residual"], settled["dual_residual"]) < 1e-6
