"""FedNest and its variants: the series, reductions, rounds, the saddle point, the weights, and what is refused."""

import re
from collections.abc import Callable
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.errors import RunError, UsageError
from coterie.experiment.build import federate
from coterie.experiment.config import FederationTable
from coterie.federation import Batch, Federation
from coterie.methods import (
    Method,
    fedavg_s,
    fednest,
    fednest_sgd,
    fednest_weights,
    lfednest,
    lfednest_nonalt,
    lfednest_svrg,
)
from coterie.methods.nested.phases import Inverse, NestedState, fedihgp, global_hypergradient, solve
from coterie.numerics import Draw, project_capped_simplex
from coterie.problems import Context
from coterie.problems.catalogue.minimax_quadratic import minimax_quadratic
from coterie.problems.catalogue.nested_quadratic import NestedForm, nested_quadratic, quadratic_problem
from coterie.problems.catalogue.quadratic import quadratic
from coterie.problems.nested import Compositional, Nested, SingleLevel

WIDE = Context(0, torch.float64)
SMALL: dict[str, Any] = {"clients": 4, "dimension": 3, "inner_dimension": 5}
FULL: dict[str, Any] = {"batch": "all"}


def federation(problem: Any, **table: Any) -> Federation:
    return federate(problem, FederationTable(mode="vmap", **table))[0]


def rounds(method: Method, problem: Any, count: int, fed: Federation | None = None, state: Any = None) -> list[Any]:
    """The states after each of some rounds, the first one included."""
    fed = fed or federation(problem)
    states = [method.init(problem, fed.n) if state is None else state]
    for t in range(count):
        draw = Draw.of(1).round(t)
        states.append(method.round(fed.begin(t + 1, draw), states[-1], draw))
    return states


def distances(method: Method, problem: Any, epochs: int, **table: Any) -> list[float]:
    states = rounds(method, problem, epochs, federation(problem, **table))
    return [problem.measure(method.view(s))["distance_to_optimum"] for s in states]


def spectrum(problem: Any) -> tuple[float, float]:
    """μ and ℓ of the mean inner Hessian."""
    values = torch.linalg.eigvalsh(problem.exact.hessian)
    return float(values.min()), float(values.max())


# The inverse-Hessian product


def test_the_bias_of_the_series_falls_as_the_condition_number_says() -> None:
    """‖p_N − H⁻¹b‖ ≤ (1/μ) ((κ−1)/κ)^N ‖b‖, and in the end by just that factor a term."""
    problem = nested_quadratic(WIDE, **SMALL, condition=8.0)
    fed, x = federation(problem), torch.ones(3, dtype=torch.float64)
    y = problem.exact.inner(x)
    b = y - problem.exact.a.mean(0)
    truth = torch.linalg.solve(problem.exact.hessian, b)
    mu, ell = spectrum(problem)
    rate, errors = 1.0 - mu / ell, {}
    for terms in (1, 2, 4, 8, 16, 32, 33):
        p = fedihgp(fed, NestedState(x, y, "bilevel"), Inverse("deterministic", terms, ell, "all"), Draw.of(0))
        errors[terms] = float((p - truth).norm())
        assert errors[terms] <= rate**terms * float(b.norm()) / mu * (1 + 1e-9)
    assert errors[33] / errors[32] == pytest.approx(rate, rel=0.02)


def test_the_random_truncation_is_unbiased_for_the_series() -> None:
    """Its mean over draws is the series of N terms within 4 standard errors, in every coordinate."""
    problem = nested_quadratic(WIDE, **SMALL, condition=8.0)
    H, N = problem.exact.hessian, 6
    ell = spectrum(problem)[1]
    b = Draw.of(3).normal(5, dtype=torch.float64)
    series = solve(lambda v: H @ v, b, Inverse("deterministic", N, ell, "all"), Draw.of(0))
    draws = [solve(lambda v: H @ v, b, Inverse("random", N, ell, "all"), Draw.of(0).round(t)) for t in range(3000)]
    found = torch.stack(draws)
    error = found.std(0) / len(draws) ** 0.5
    assert bool(((found.mean(0) - series).abs() < 4.0 * error).all())
    possible = torch.stack([N / ell * torch.linalg.matrix_power(torch.eye(5) - H / ell, n) @ b for n in range(N)])
    torch.testing.assert_close(possible.mean(0), series)
    nearest = torch.cdist(found, possible).argmin(1).bincount(minlength=N)
    assert float((nearest - 500).abs().max()) < 4.0 * (3000 / N * (1 - 1 / N)) ** 0.5  # N' is uniform


def test_the_federated_truncation_is_one_of_the_terms() -> None:
    problem = nested_quadratic(WIDE, **SMALL)
    fed, H, ell = federation(problem), problem.exact.hessian, spectrum(problem)[1]
    s = NestedState(problem.start, problem.inner_start, "bilevel")
    b = s.y - problem.exact.a.mean(0)
    terms = [5 / ell * torch.linalg.matrix_power(torch.eye(5) - H / ell, n) @ b for n in range(5)]
    seen = set()
    for t in range(12):
        before = fed.ledger.total.rounds
        p = fedihgp(fed, s, Inverse("random", 5, ell, "all"), Draw.of(t))
        n = min(range(5), key=lambda n: float((p - terms[n]).norm()))
        torch.testing.assert_close(p, terms[n])
        assert fed.ledger.total.rounds - before == 1 + n
        seen.add(n)
    assert len(seen) >= 4


@pytest.mark.slow
def test_local_truncations_are_unbiased_too() -> None:
    """One client, so that its own series is the global one: the mean step of LFedNest is that of the series."""
    problem = nested_quadratic(WIDE, clients=1, dimension=3, inner_dimension=5)
    ell = spectrum(problem)[1]
    common: dict[str, Any] = {"outer_step": 1.0, "step": 0.1, "local_steps": 1, "terms": 4, "lipschitz": ell, **FULL}
    fed = federation(problem)

    def after(series: str, t: int) -> Tensor:
        method = lfednest(**common, series=series)
        return method.round(fed, method.init(problem, 1), Draw.of(0).round(t)).x

    found = torch.stack([after("random", t) for t in range(150)])
    error = (found.mean(0) - after("deterministic", 0)).abs()
    assert bool((error < 4.0 * found.std(0) / 150**0.5).all())
    assert len(found.round(decimals=9).unique(dim=0)) == 4  # one step for each N'


def test_conjugate_gradients_are_exact_after_as_many_products_as_dimensions() -> None:
    problem = nested_quadratic(WIDE, **SMALL, condition=50.0)
    fed, x = federation(problem), torch.ones(3, dtype=torch.float64)
    s = NestedState(x, problem.exact.inner(x), "bilevel")
    found = global_hypergradient(fed, s, Inverse("cg", 5, 1.0, "all"), Draw.of(0))
    torch.testing.assert_close(found, problem.exact.hypergradient(x), rtol=1e-8, atol=1e-8)


# Reductions


def test_one_local_step_is_gradient_descent() -> None:
    problem = _noisy()
    method = fednest(outer_step=0.2, step=0.3, local_steps=1, outer_steps=1, batch=1)
    state = rounds(method, problem, 1)[-1]
    x, y = problem.start, problem.inner_start
    everything = problem.train.columns[0].mean(0)
    y = y - 0.3 * (2.0 * y - everything - x)
    torch.testing.assert_close(state.y, y)
    p = _neumann(2.0, 5, 10.0) * y
    torch.testing.assert_close(state.x, x - 0.2 * (0.1 * x + p))


def test_noise_that_does_not_depend_on_the_point_cancels() -> None:
    """For the two local terms see the same rows: a walk on single rows is then the walk on all of them."""
    problem = _noisy()
    common: dict[str, Any] = {"outer_step": 0.2, "step": 0.3, "local_steps": 3, "outer_steps": 3}
    one, all_ = (rounds(fednest(**common, batch=batch), problem, 2)[-1] for batch in (1, "all"))
    torch.testing.assert_close(one.y, all_.y)
    torch.testing.assert_close(one.x, all_.x)
    plain = [rounds(fednest_sgd(**common, batch=batch), problem, 2)[-1].y for batch in (1, "all")]
    assert not torch.allclose(*plain, rtol=1e-3)


def _neumann(curvature: float, terms: int, ell: float) -> float:
    return sum((1.0 - curvature / ell) ** n for n in range(terms)) / ell


def _noisy() -> Any:
    """g_i = mean_r ½‖y − z_r‖² + ½‖y − x‖², f = ½‖y‖² + 0.05‖x‖² + ⟨noise_r, x⟩, noise with mean zero."""
    z = Draw.of(5).client(torch.arange(3)).normal(8, 2, dtype=torch.float64)
    noise = z - z.mean(1, keepdim=True)

    def inner(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return 0.5 * (y - batch.inputs).square().sum(1).mean() + 0.5 * (y - x).square().sum()

    def outer(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return 0.5 * y @ y + 0.05 * x @ x + (batch.inputs @ x).mean()

    start = torch.tensor([1.0, -2.0])
    return Nested(inner, outer).on(list(z), list(noise), x=start, y=start, dtype=torch.float64)


def test_clients_that_are_alike_need_no_global_hypergradient() -> None:
    form = nested_quadratic(WIDE, clients=1, dimension=3, inner_dimension=5).exact
    same = NestedForm(*(t.expand(3, *t.shape[1:]) for t in (form.H, form.C, form.c, form.a, form.e, form.rho)))
    problem = quadratic_problem(same, WIDE)
    common: dict[str, Any] = {"outer_step": 0.1, "step": 0.3, "local_steps": 3, "lipschitz": 5.0, **FULL}
    global_, light = (rounds(make(**common), problem, 5)[-1] for make in (fednest, lfednest))
    torch.testing.assert_close(global_.y, light.y)
    torch.testing.assert_close(global_.x, light.x)


@pytest.mark.parametrize("make", [fednest, fednest_sgd, lfednest, lfednest_svrg, lfednest_nonalt])
def test_step_numbers_by_client(make: Callable[..., Method]) -> None:
    """A list of equal numbers is that number; a list of different ones is every client's own walk."""
    problem = nested_quadratic(WIDE, **SMALL)
    common: dict[str, Any] = {"outer_step": 0.1, "step": 0.3, "lipschitz": 5.0, **FULL}
    one = rounds(make(**common, local_steps=3, outer_steps=2), problem, 2)[-1]
    many = rounds(make(**common, local_steps=[3] * 4, outer_steps=[2] * 4), problem, 2)[-1]
    torch.testing.assert_close(one.x, many.x)
    torch.testing.assert_close(one.y, many.y)
    taus = [1, 4, 2, 3]
    mixed = rounds(make(**common, local_steps=taus, outer_steps=1), problem, 1)[-1]
    alone = [rounds(make(**common, local_steps=t, outer_steps=1), problem, 1)[-1] for t in taus]
    if make is fednest:  # y⁺ is the mean of the walks, and walk i of a common number is walk i of its own
        fed = federation(problem)
        walks = [_inner_walks(fed, problem, t)[i] for i, t in enumerate(taus)]
        torch.testing.assert_close(mixed.y, torch.stack(walks).mean(0))
    assert all(not torch.allclose(mixed.y, other.y) for other in alone)


def _inner_walks(fed: Federation, problem: Any, steps: int) -> Tensor:
    """Every client's y_i after a corrected walk, by the formula."""
    form, x, y = problem.exact, problem.start, problem.inner_start
    q = form.hessian @ y - form.C.mean(0) @ x - form.c.mean(0)
    walks = []
    for H in form.H:
        y_i = y
        for _ in range(steps):
            y_i = y_i - 0.3 / steps * (H @ (y_i - y) + q)
        walks.append(y_i)
    return torch.stack(walks)


def test_a_step_of_zero_trains_the_inner_problem_only() -> None:
    problem = nested_quadratic(WIDE, **SMALL)
    fed = federation(problem)
    states = rounds(fednest(outer_step=0.0, step=0.3, **FULL), problem, 3, fed)
    assert torch.equal(states[-1].x, problem.start)
    assert fed.ledger.total.rounds == 3 * 2
    assert not torch.equal(states[-1].y, states[0].y)


# Rounds


def spent(method: Method, problem: Any, **table: Any) -> tuple[int, dict[str, int]]:
    """The ledger's rounds in one epoch, in all and by work."""
    fed = federation(problem, **table)
    rounds(method, problem, 1, fed)
    by_work = {cause.rpartition("/")[2]: entry.rounds for cause, entry in fed.ledger.by_cause.items()}
    return fed.ledger.total.rounds, by_work


@pytest.mark.parametrize(("T", "N"), [(1, 1), (1, 5), (3, 4)])
def test_rounds_an_epoch_are_those_of_table_2(T: int, N: int) -> None:
    """Counted by the ledger, a round an upload barrier (fed.mean): q and y in FedInn, y in LFedInn; ∇_y f and N
    products in FedIHGP, of which the series uses N − 1 and the last measures its residual; h and x in FedOut."""
    problem = nested_quadratic(WIDE, **SMALL)
    common: dict[str, Any] = {"inner_rounds": T, "terms": N, "lipschitz": 5.0, **FULL}
    total, by_work = spent(fednest(**common), problem)
    assert total == 2 * T + N + 3
    assert by_work == {
        "inner-gradient": T,
        "inner-svrg-steps": T,
        "outer-y-gradient": 1,
        "hessian-product": N,
        "hypergradient": 1,
        "outer-svrg-steps": 1,
    }
    assert spent(lfednest(**common), problem)[0] == T + 1
    assert spent(fednest_sgd(**common), problem)[0] == T + N + 3
    assert spent(lfednest_svrg(**common), problem)[0] == 2 * T + 1
    del common["inner_rounds"]
    assert spent(lfednest_nonalt(**common), problem)[0] == 1


def test_rounds_of_the_other_series_and_kinds() -> None:
    problem = nested_quadratic(WIDE, **SMALL, condition=50.0)
    assert spent(fednest(series="cg", terms=4, **FULL), problem)[0] == 2 + 4 + 3
    random = fednest(series="random", terms=4, lipschitz=50.0, **FULL)
    counts = set()
    for t in range(12):
        fed, draw = federation(problem), Draw.of(t).round(0)
        random.round(fed, random.init(problem, 4), draw)
        counts.add(fed.ledger.total.rounds - 5)
    assert counts == {0, 1, 2, 3}  # N' < N: 2T + N' + 3
    game = minimax_quadratic(WIDE, clients=3, dimension=2)
    assert spent(fednest(**FULL), game)[0] == 2 + 2  # no indirect term
    assert spent(fedavg_s(**FULL), game)[0] == 1
    rows = [(torch.ones(2, 2),)] * 2
    composed = Compositional(lambda x, b: x * b.inputs[0], lambda y, b: y @ y).on(rows, x=torch.ones(2))
    assert spent(fednest(**FULL), composed)[0] == 2 + 3  # p is exact after ∇_y f
    single = SingleLevel(lambda x, b: (b.inputs @ x).square().mean()).on(rows, x=torch.ones(2))
    assert spent(fednest(inner_rounds=3, **FULL), single)[0] == 2


# Convergence


def test_fednest_reaches_the_optimum_of_the_bilevel_problem_linearly_and_lfednest_does_not() -> None:
    problem = nested_quadratic(WIDE, **SMALL, heterogeneity=3.0)
    common: dict[str, Any] = {"outer_step": 0.8, "step": 0.8, "inner_rounds": 3, "local_steps": 2, "outer_steps": 2}
    common |= {"terms": 5, "series": "cg", **FULL}
    exact = distances(fednest(**common), problem, 18)
    assert exact[-1] < 1e-8
    common |= {"terms": 8, "series": "deterministic", "lipschitz": 5.0}
    light = distances(lfednest(**common), problem, 8)
    assert light[-1] > 1e-2


STEPS: dict[str, Any] = {"outer_step": 0.1, "step": 0.5, "local_steps": 5, **FULL}


def test_fednest_reaches_the_saddle_point_linearly_while_the_others_stall() -> None:
    """b_i kept, all clients, strong heterogeneity, τ = 5, the same steps for all."""
    problem = minimax_quadratic(WIDE, clients=30, dimension=4, scale=5.0)
    exact = distances(fednest(**STEPS, outer_steps=5), problem, 45)
    assert exact[-1] < 1e-8
    slopes = [log(exact[t + 5] / exact[t]) / 5 for t in range(5, 40, 5)]
    assert max(slopes) < -0.3  # the same factor all the way: a straight line on a logarithmic axis
    assert max(slopes) - min(slopes) < 0.1
    for method in (lfednest(**STEPS, outer_steps=5), fedavg_s(**STEPS)):
        stalled = distances(method, problem, 45)
        assert stalled[-1] > 1e-2
        assert abs(stalled[-1] - stalled[-6]) < 1e-4 * stalled[-1]


@pytest.mark.slow
def test_equal_curvatures_keep_lfednest_from_drifting_unless_step_numbers_differ() -> None:
    """The paper's own problem (spread 0): the mean of local walks is the walk of the mean, so LFedNest is exact too."""
    problem = minimax_quadratic(WIDE, clients=12, dimension=3, scale=5.0, spread=0.0)
    assert distances(lfednest(**STEPS, outer_steps=5), problem, 45)[-1] < 1e-8
    assert distances(fedavg_s(**STEPS), problem, 45)[-1] > 1e-4
    taus = {**STEPS, "local_steps": [1 + i % 6 for i in range(12)]}
    assert distances(lfednest(**taus, outer_steps=5), problem, 45)[-1] > 1e-2
    assert distances(fednest(**taus, outer_steps=5), problem, 45)[-1] < 1e-8


@pytest.mark.slow
def test_sampled_clients_leave_a_noise_floor() -> None:
    """With b_i ≠ 0 the mean b over the sampled is not zero, and no correction can know it."""
    problem = minimax_quadratic(WIDE, clients=30, dimension=4, scale=1.0)
    floor = distances(fednest(**STEPS, outer_steps=5), problem, 40, count=10)[20:]
    assert min(floor) > 1e-2
    assert max(floor) < 2.0
    quiet = minimax_quadratic(WIDE, clients=30, dimension=4, scale=0.0)
    assert distances(fednest(**STEPS, outer_steps=5), quiet, 45, count=10)[-1] < 1e-6  # b = 0: no floor


def test_compositional_and_single_level_problems_are_solved() -> None:
    draw = Draw.of(0)
    A = draw.phase("A").client(torch.arange(4)).normal(3, 3, dtype=torch.float64) + 2.0 * torch.eye(3)
    t = draw.phase("t").client(torch.arange(4)).normal(1, 3, dtype=torch.float64)

    def value(y: Tensor, batch: Batch) -> Tensor:
        return 0.5 * (y - batch.inputs[0]).square().sum()

    composed = Compositional(lambda x, b: b.inputs[0] @ x, value).on(
        [(a[None],) for a in A], [(row,) for row in t], x=torch.zeros(3), dtype=torch.float64
    )
    x = rounds(fednest(outer_step=0.2, step=1.0, local_steps=2, outer_steps=2, **FULL), composed, 50)[-1].x
    torch.testing.assert_close(A.mean(0) @ x, t.mean((0, 1)), rtol=0.0, atol=1e-6)
    curved = SingleLevel(lambda x, b: 0.5 * (b.inputs[0] @ x) @ x - x.sum()).on(
        [((a @ a.T)[None],) for a in A], x=torch.zeros(3), dtype=torch.float64
    )
    x = rounds(fednest(outer_step=0.2, outer_steps=4, **FULL), curved, 30)[-1].x
    best = torch.linalg.solve((A @ A.mT).mean(0), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(x, best, rtol=0.0, atol=1e-6)


# The weighting problem


def test_the_weights_move_along_the_exact_hypergradient() -> None:
    problem = quadratic(WIDE, clients=5, friends=3, dimension=4, rows=12, curvature=3.0)
    method = fednest_weights(outer_step=0.05, step=0.5, inner_rounds=60, local_steps=3, terms=4, series="cg", **FULL)
    state = rounds(method, problem, 1)[-1]
    w = torch.full((5,), 0.2, dtype=torch.float64)
    torch.testing.assert_close(state.theta, problem.exact.theta(w), rtol=1e-8, atol=1e-8)
    expected = project_capped_simplex(w - 0.05 * problem.exact.hypergradient(w), 1.0)
    torch.testing.assert_close(state.w, expected, rtol=1e-7, atol=1e-7)


def test_the_weights_reach_the_optimum_and_cost_what_is_said() -> None:
    problem = quadratic(WIDE, clients=5, friends=3, dimension=4, rows=12)
    method = fednest_weights(outer_step=0.2, step=1.0, inner_rounds=2, terms=3, lipschitz=1.0, **FULL)
    fed = federation(problem)
    states = rounds(method, problem, 30, fed)
    values = [float(problem.exact.objective(s.w)) for s in states]
    assert values[-1] < 1e-4 * values[0]
    assert fed.ledger.total.rounds == 30 * (2 * 2 + 3 + 1)
    slopes = next(e for cause, e in fed.ledger.by_cause.items() if cause.endswith("/slope"))
    assert slopes.floats_up == 30 * 5  # a number a client
    assert spent(method, problem, target=2)[0] == 2 * 2 + 3 + 2


def test_caps_and_partial_participation_keep_the_weights_feasible() -> None:
    problem = quadratic(WIDE, clients=6, friends=2, dimension=4, rows=12)
    method = fednest_weights(outer_step=0.5, step=1.0, terms=3, lipschitz=1.0, cap=0.3, **FULL)
    for state in rounds(method, problem, 15, federation(problem, count=3)):
        assert float(state.w.sum()) == pytest.approx(1.0, abs=1e-12)
        assert float(state.w.min()) >= 0.0
        assert float(state.w.max()) <= 0.3 + 1e-12
    fed = federation(problem, count=3)
    draw = Draw.of(1).round(0)
    view = fed.begin(1, draw)
    before, after = method.init(problem, 6), method.round(view, method.init(problem, 6), draw)
    away = [k for k in range(6) if k not in view.ids.tolist()]
    assert torch.equal(before.w[away], after.w[away])
    assert not torch.equal(before.w, after.w)


def test_clients_of_weight_0_need_not_be_asked() -> None:
    problem = quadratic(WIDE, clients=5, friends=2, dimension=4, rows=12)
    w = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    states, floats = {}, {}
    for ask in ("all", "weighted"):
        method = fednest_weights(outer_step=0.1, step=1.0, local_steps=3, terms=3, lipschitz=1.0, ask=ask, **FULL)
        fed, draw = federation(problem), Draw.of(1).round(0)
        states[ask] = method.round(fed.begin(1, draw), method.init(problem, 5)._replace(w=w), draw)
        floats[ask] = fed.ledger.total.floats_up
    assert floats == {"all": 5 * (5 * 4 + 1), "weighted": 2 * 5 * 4 + 5}
    torch.testing.assert_close(states["all"], states["weighted"])


# Clients drawn anew in each phase


def participants(method: Method, problem: Any, monkeypatch: pytest.MonkeyPatch, **table: Any) -> list[tuple[int, ...]]:
    """The clients of each phase of one round, in order."""
    seen: list[tuple[int, ...]] = []
    run = Federation._ask

    def noted(self: Federation, *args: Any, **more: Any) -> Any:
        seen.append(tuple(self.ids.tolist()))
        return run(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "_ask", noted)
        rounds(method, problem, 1, federation(problem, **table))
    return seen


@pytest.mark.parametrize(
    ("make", "sets"), [(fednest, 2 + 1 + 5 + 1), (fednest_sgd, 2 + 1 + 5 + 1), (lfednest, 3), (lfednest_svrg, 3)]
)
def test_each_phase_may_have_clients_of_its_own(make: Any, sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """T = 2 times FedInn, S_0, S_1 … S_5 and FedOut: 12 of 100 clients are hardly ever the same twice."""
    problem = nested_quadratic(WIDE, **{**SMALL, "clients": 100})
    settings = {"inner_rounds": 2, "terms": 5, "lipschitz": 20.0, **FULL}
    same = participants(make(**settings), problem, monkeypatch, count=12)
    anew = participants(make(**settings, redraw=True), problem, monkeypatch, count=12)
    assert len(set(same)) == 1
    assert len(anew) == len(same)
    assert len(set(anew)) == sets


def test_conjugate_gradients_keep_their_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = nested_quadratic(WIDE, **{**SMALL, "clients": 100})
    method = fednest(terms=5, lipschitz=20.0, series="cg", redraw=True, **FULL)
    *_, h, x = products = participants(method, problem, monkeypatch, count=12)
    assert len(set(products[3:-2])) == 1
    assert h == x


def test_where_everybody_participates_nothing_is_drawn() -> None:
    problem = nested_quadratic(WIDE, **SMALL)
    settings = {"terms": 5, "lipschitz": 20.0, **FULL}
    plain, anew = (rounds(fednest(**settings, redraw=flag), problem, 3)[-1] for flag in (False, True))
    assert torch.equal(plain.x, anew.x)
    assert torch.equal(plain.y, anew.y)


def test_the_weights_too_have_clients_of_their_own_in_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same clients in p and in the slopes: the estimate of ∂F/∂w is biased; with others it is not."""
    problem = quadratic(WIDE, clients=60, friends=20, dimension=4, rows=12)
    settings = {"inner_rounds": 2, "terms": 3, "lipschitz": 2.0, **FULL}
    same = participants(fednest_weights(**settings), problem, monkeypatch, count=12)
    anew = participants(fednest_weights(**settings, redraw=True), problem, monkeypatch, count=12)
    assert len(same) == len(anew) == 2 * 2 + 3 + 1
    assert len(set(same)) == 1
    assert len(set(anew)) == 2 + 3 + 1


# What is refused


def complaint(method: Method, problem: Any, count: int = 8) -> str:
    with pytest.raises(RunError) as error:
        rounds(method, problem, count)
    return str(error.value)


@pytest.mark.parametrize("make", [fednest, fednest_sgd, lfednest, lfednest_svrg, lfednest_nonalt])
@pytest.mark.parametrize("series", ["deterministic", "random"])
def test_a_small_lipschitz_constant_is_explained_and_the_remedy_works(make: Any, series: str) -> None:
    problem = nested_quadratic(WIDE, **SMALL, condition=20.0)
    common: dict[str, Any] = {"outer_step": 0.01, "step": 0.1, "terms": 6, "series": series, **FULL}
    text = complaint(make(**common, lipschitz=0.5), problem)
    assert "method.lipschitz = 0.5 is too small" in text
    remedy = float(re.search(r"method\.lipschitz=([\d.]+)", text)[1])
    assert remedy > 2.0
    rounds(make(**common, lipschitz=2.0 * remedy), problem, 3)


def test_what_is_left_out_of_the_series_stops_nothing() -> None:
    problem = nested_quadratic(WIDE, **SMALL, condition=20.0)
    rounds(fednest(outer_step=0.001, step=0.1, terms=1, lipschitz=0.5, **FULL), problem, 3)
    assert "too small" in complaint(fednest(outer_step=0.001, step=0.1, terms=2, lipschitz=0.05, **FULL), problem)


def test_a_small_lipschitz_constant_is_explained_on_the_weighting_problem() -> None:
    problem = quadratic(WIDE, clients=5, friends=3, dimension=4, rows=12, curvature=5.0)
    assert "method.lipschitz" in complaint(fednest_weights(outer_step=0.1, step=0.1, lipschitz=0.2, **FULL), problem)
    rounds(fednest_weights(outer_step=0.1, step=0.1, lipschitz=0.2, series="cg", **FULL), problem, 2)


def test_an_inner_loss_that_is_not_convex_is_explained() -> None:
    rows = [(torch.ones(2, 2),)] * 2
    problem = Nested(lambda x, y, b: x.sum() * y.sum() - y @ y, lambda x, y, b: (y - 1.0).square().sum()).on(
        rows, x=torch.zeros(2), y=torch.zeros(2)
    )
    text = complaint(fednest(outer_step=0.1, step=1e-3, terms=5, lipschitz=2.0, **FULL), problem, 1)
    assert "not convex" in text
    assert "ridge" in text


def test_settings_that_do_not_fit_are_refused() -> None:
    problem = nested_quadratic(WIDE, **SMALL)
    with pytest.raises(UsageError, match="3 local step numbers was given for 4 clients"):
        fednest(local_steps=[1, 2, 3]).init(problem, 4)
    with pytest.raises(UsageError, match=r"local_steps"):
        fednest(local_steps=0)
    with pytest.raises(UsageError, match=r"series"):
        lfednest(series="cg")
    weights = quadratic(WIDE, clients=5, friends=3, dimension=4, rows=12)
    with pytest.raises(UsageError, match="leaves no weights of 5 clients"):
        fednest_weights(cap=0.1).init(weights, 5)
    with pytest.raises(UsageError, match="lists 3 numbers for 5 clients"):
        fednest_weights(local_steps=[1, 2, 3]).init(weights, 5)
    assert not fedavg_s().fits(problem.offers)
    assert fednest().fits(problem.offers)
    assert fednest_weights().fits(weights.offers)
    assert not fednest().fits(weights.offers)
    assert not lfednest().fits(weights.offers)
