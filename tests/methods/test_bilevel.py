"""Algorithms 2 and 3 on the quadratic whose F, ∇F and w* are known."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from coterie.errors import UsageError
from coterie.federation import Federation, LocalEngine
from coterie.methods import Method, bilevel, bilevel_accelerated, local_svrg
from coterie.methods.baselines.local_svrg import SVRGSteps
from coterie.methods.weights.bilevel import OUTER_STEP, hypergradient
from coterie.numerics import Draw, project_capped_simplex, uniform
from coterie.problems import Weighting
from coterie.problems.base import Context
from coterie.problems.catalogue.groups import groups
from coterie.problems.catalogue.quadratic import quadratic

INNER: dict[str, Any] = {"step": 0.5, "system_step": 0.5, "local_steps": 1, "steps": 40, "batch": 10, "refresh": 0.3}


def setting(curvature: float = 1.0, seed: int = 0) -> tuple[Weighting, Federation]:
    context = Context(seed=seed, dtype=torch.float64)
    problem = quadratic(context, clients=5, friends=3, dimension=5, rows=20, curvature=curvature)
    return problem, Federation.on(LocalEngine(problem.task, problem.train, problem.valid, problem.target))


def trace(method: Method, problem: Weighting, fed: Federation, rounds: int) -> list[torch.Tensor]:
    state, weights = method.init(problem, fed.n), []
    for t in range(rounds):
        state = method.round(fed, state, Draw.of(0).round(t))
        weights.append(method.view(state).weights)
    return weights


@pytest.mark.parametrize("average", [False, True])
def test_hypergradient_is_exact_to_the_accuracy_of_the_inner_solves(average: bool) -> None:
    problem, fed = setting(curvature=2.0)
    w = project_capped_simplex(torch.tensor([0.5, 0.3, 0.1, 0.1, 0.0], dtype=torch.float64), 1.0)
    exact = problem.exact.hypergradient(w)
    errors = []
    for steps in (8, 30, 120):
        svrg = SVRGSteps(0.4, 1, 0.3, steps, 10, average, 1.0)
        found = hypergradient(fed, problem.start, w, svrg, svrg, Draw.of(1))
        errors.append(float((found.gradient - exact).norm() / exact.norm()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < (1e-3 if average else 1e-8)


@pytest.mark.slow
def test_accelerated_reaches_the_optimum_at_the_promised_rate() -> None:
    """F(w_ag) − F* = O(1/s²): the log-log slope from s = 4 to s = 32 is at most −2."""
    problem, fed = setting()
    weights = trace(bilevel_accelerated(**INNER, outer_step=0.05, cap=1.0), problem, fed, 32)
    values = {s: float(problem.exact.objective(weights[s - 1])) for s in (4, 8, 16, 32)}
    slope = math.log(values[32] / values[4]) / math.log(32 / 4)
    assert slope <= -2.0
    assert values[32] < 1e-3 * float(problem.exact.objective(uniform(5, like=problem.start)))
    assert (weights[-1] - problem.exact.weights).norm() < 0.05


@pytest.mark.slow
def test_algorithm_three_reaches_a_stationary_point_of_a_non_convex_objective() -> None:
    problem, fed = setting(curvature=2.0, seed=2)
    settings = {**INNER, "step": 0.3, "system_step": 0.3, "steps": 30}
    weights = trace(bilevel(**settings, outer_step=0.04, cap=0.6), problem, fed, 25)
    before = problem.exact.stationarity(uniform(5, like=problem.start), cap=0.6)
    assert problem.exact.stationarity(weights[-1], cap=0.6) < 0.05 * before


def test_rounds_an_outer_step_equal_the_formula() -> None:
    problem, fed = setting()
    method = bilevel(step=0.1, system_step=0.1, local_steps=3, steps=10, batch=5, refresh=0.1, cap=1.0)
    method.round(fed, method.init(problem, fed.n), Draw.of(0))
    assert fed.ledger.total.rounds == 2 * (1 + math.ceil(10 / 3)) + 1
    d, K = problem.task.model.size, fed.n
    up = 2 * (K + 4 * K * d) + 2 * K  # acknowledgements and averages, then a hypergradient and a loss by client
    down = K * d + 4 * K * d + 3 * K * d + 4 * K * d + 2 * K * d  # start; x; h, θ, ∇L_0; h; θ and h
    assert (fed.ledger.total.floats_up, fed.ledger.total.floats_down) == (up, down)


def test_the_record_holds_distance_hypergradient_and_stationarity() -> None:
    problem, fed = setting()
    method = bilevel(**INNER, outer_step=0.05, cap=1.0)
    state = method.round(fed, method.init(problem, fed.n), Draw.of(0))
    more = method.view(state).more
    gaps = problem.exact.optima - state.theta
    losses = 0.5 * torch.einsum("ki,kij,kj->k", gaps, problem.exact.hessians, gaps)
    gap = problem.exact.target_optimum - state.theta
    goal = 0.5 * gap @ problem.exact.target_hessian @ gap
    assert more["statistical_distance"] == pytest.approx(float((losses - goal).norm()), rel=1e-9)
    assert more["hypergradient"] == pytest.approx(
        problem.exact.hypergradient(uniform(5, like=state.w)).tolist(), rel=1e-3
    )
    assert more["gradient_mapping"] == pytest.approx(float((uniform(5, like=state.w) - state.w).norm() / 0.05))


@pytest.mark.parametrize("make", [bilevel, bilevel_accelerated])
def test_the_gradient_mapping_is_that_of_the_step_taken(make: Any) -> None:
    """Against the closed form at the weights where the gradient was taken; at the new weights, a corner, it is 0."""
    problem, fed = setting()
    method = make(**INNER, outer_step=20.0, cap=1.0)
    w = uniform(5, like=problem.start)
    state = method.round(fed, method.init(problem, fed.n), Draw.of(0))
    exact = (w - project_capped_simplex(w - 20.0 * problem.exact.hypergradient(w), 1.0)).norm() / 20.0
    assert method.view(state).more["gradient_mapping"] == pytest.approx(float(exact), rel=1e-3)
    corner = method.view(state).weights
    assert (corner - project_capped_simplex(corner - 20.0 * state.gradient, 1.0)).norm() == 0.0


def test_the_random_iterate_is_each_of_the_iterates_with_equal_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of s iterates the last is kept with probability 1/s: then each of them is with the same."""
    problem, fed = setting()
    method = bilevel(**{**INNER, "steps": 1}, outer_step=0.02, cap=1.0, output="random")
    asked: list[float] = []
    plain = Draw.bernoulli

    def coin(draw: Draw, p: Any, *shape: int) -> torch.Tensor:
        if draw.label != "output":
            return plain(draw, p, *shape)
        asked.append(p)
        return torch.tensor(len(asked) != 3)  # the second is kept, the third is not

    monkeypatch.setattr(Draw, "bernoulli", coin)
    state, met = method.init(problem, fed.n), []
    for t in range(3):
        met.append(state.w)
        state = method.round(fed, state, Draw.of(0).round(t))
    assert asked == pytest.approx([1.0, 1 / 2, 1 / 3])
    assert torch.equal(method.view(state).weights, met[1])
    assert torch.equal(method.view(state).model, state.kept[0])


def test_default_steps_with_a_client_missing_take_the_plain_step() -> None:
    """The hypergradient is not exact then, and spectral steps are for exact ones."""
    problem, fed = setting()
    method = bilevel()
    state = method.round(fed, method.init(problem, fed.n), Draw.of(0).round(0))
    assert state.curvature.largest > 0.0
    assert state.spectral.points == 1
    after = method.round(replace(fed, ids=fed.ids[:-1]), state, Draw.of(0).round(1))
    plain = project_capped_simplex(state.w - OUTER_STEP * after.gradient, 1.0)
    assert torch.equal(after.w, plain)
    assert after.spectral.points == 0
    assert after.gradient[-1] == 0.0


@pytest.mark.parametrize(("make", "power"), [(bilevel, 2), (bilevel_accelerated, 4)])
def test_inner_solves_grow_as_the_theorems_have_it(make: Any, power: int) -> None:
    problem, fed = setting()
    mu, gamma = 2.0, 0.2
    for tau in (1, 4):
        knobs = {**INNER, "local_steps": tau, "step": gamma, "system_step": gamma}
        method = make(**knobs, convexity=mu, schedule="theorem", constant=10.0, outer_step=0.01, cap=1.0)
        state, rounds = method.init(problem, fed.n), [fed.ledger.total.rounds]
        for t in range(2):
            state = method.round(fed, state, Draw.of(0).round(t))
            rounds.append(fed.ledger.total.rounds)
        for s in range(2):
            M = max(1 / gamma, (s + 1) ** (power / 2) * math.sqrt(10.0))
            T = math.log(10.0 * (s + 1) ** power / gamma) / (gamma * mu) if tau == 1 else M * math.log(M**3) / mu
            assert rounds[s + 1] - rounds[s] == 2 * (1 + math.ceil(math.ceil(T) / tau)) + 1
    with pytest.raises(UsageError, match=r"method\.convexity"):
        make(schedule="theorem")


def test_weights_respect_the_cap() -> None:
    problem, fed = setting()
    for w in trace(bilevel(**{**INNER, "steps": 5}, outer_step=0.5, cap=0.3), problem, fed, 5):
        assert float(w.max()) <= 0.3
        assert float(w.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("make", [bilevel, bilevel_accelerated])
def test_settings_out_of_range_are_refused(make: Any) -> None:
    problem, _ = setting()
    with pytest.raises(UsageError, match=r"method.cap = 0.1 .* at least 1/5"):
        make(cap=0.1).init(problem, 5)
    for bad in ({"cap": 1.5}, {"cap": 0.0}, {"local_steps": 0}, {"refresh": 0.0}, {"refresh": 1.2}, {"step": -1.0}):
        with pytest.raises(UsageError, match=next(iter(bad))):
            make(**bad)


@pytest.mark.slow
def test_the_minority_finds_its_peers_on_digits() -> None:
    """The picture of the paper's figures 4–6, small: strangers have permuted labels and turned images."""
    problem = groups(Context(seed=0), data="digits", setting=4)
    engine = LocalEngine(problem.task, problem.train, problem.valid, problem.target)
    learned, equal = bilevel(), local_svrg(steps=20)
    a, b = learned.init(problem, 15), equal.init(problem, 15)
    for t in range(30):
        draw = Draw.of(0).round(t)
        a, b = learned.round(Federation.on(engine), a, draw), equal.round(Federation.on(engine), b, draw)
    assert float(a.w[:5].sum()) >= 0.9
    good, plain = (problem.measure(m.view(s))["test_accuracy"] for m, s in ((learned, a), (equal, b)))
    assert good > plain + 0.03
