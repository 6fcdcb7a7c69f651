"""FedBiO, FedBiOAcc, SimFBO and FedMBO: the centralised algorithm, local steps by NumPy, rounds, figures, refusals."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "problems"))

from learners import WIDE, federation, play
from nested_cases import CASES

from coterie.errors import RunError, UsageError
from coterie.methods import Method, fedbio, fedbioacc, fedmbo, simfbo
from coterie.methods.nested.fedmbo import parallel_hypergradient
from coterie.methods.nested.phases import Inverse, NestedState
from coterie.numerics import Draw
from coterie.problems.catalogue.nested_quadratic import NestedForm, nested_quadratic, quadratic_problem

SMALL: dict[str, Any] = {"clients": 4, "dimension": 3, "inner_dimension": 5}
STEPS: dict[str, Any] = {"step": 0.2, "system_step": 0.25, "outer_step": 0.1, "batch": "all"}
SIZES = (0.1, 0.2, 0.25)  # of x, y and v
Array = np.ndarray[Any, Any]
Point = tuple[Array, ...]


class Clients:
    """The quadratic in NumPy: the three directions of each client, and of their mean."""

    def __init__(self, form: NestedForm) -> None:
        self.m = len(form.H)
        self.H, self.C, self.c, self.a, self.e, self.rho = (
            getattr(form, name).numpy() for name in ("H", "C", "c", "a", "e", "rho")
        )

    def direction(self, i: int, p: Point) -> Point:
        x, y, v = p
        d_x = self.rho[i] * (x - self.e[i]) - self.C[i].T @ v
        return d_x, self.H[i] @ y - self.C[i] @ x - self.c[i], self.H[i] @ v + y - self.a[i]

    def mean(self, p: Point) -> Point:
        return average([self.direction(i, p) for i in range(self.m)])


def average(points: list[Point]) -> Point:
    return tuple(np.mean(parts, axis=0) for parts in zip(*points, strict=True))


def step(p: Point, d: Point, scale: float = 1.0) -> Point:
    return tuple(at - scale * size * along for at, size, along in zip(p, SIZES, d, strict=True))


def zero() -> Point:
    return np.zeros(3), np.zeros(5), np.zeros(5)


def triple(state: Any) -> list[Any]:
    point = state.at if hasattr(state, "m_x") else state
    return [point.x.numpy(), point.y.numpy(), point.v.numpy()]


def assert_close(state: Any, expected: Point, tolerance: float = 1e-10) -> None:
    for found, want in zip(triple(state), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=0.0, atol=tolerance)


def problem_and_clients(**settings: Any) -> tuple[Any, Clients]:
    problem = nested_quadratic(WIDE, **SMALL, **settings)
    return problem, Clients(problem.exact)


ACCELERATED: dict[str, Any] = {"forget": 0.3, "decay": None}


# Reductions


@pytest.mark.parametrize("method", [fedbio(**STEPS, local_steps=1), fedbioacc(**STEPS, local_steps=1, **ACCELERATED)])
def test_one_local_step_is_the_centralised_algorithm(method: Method) -> None:
    """With full batches recursive momentum is the plain direction."""
    problem, clients = problem_and_clients()
    p = zero()
    for _ in range(6):
        p = step(p, clients.mean(p))
    assert_close(play(method, problem, 6), p)


def test_simfbo_with_one_local_step_is_the_centralised_algorithm_with_the_servers_steps() -> None:
    problem, clients = problem_and_clients()
    local = {**STEPS, "step": 0.01, "system_step": 0.02, "outer_step": 0.03}
    server = {"server_step": 0.2, "server_system_step": 0.25, "server_outer_step": 0.1}
    p = zero()
    for _ in range(6):
        p = step(p, clients.mean(p))
    assert_close(play(simfbo(**local, **server, local_steps=1), problem, 6), p)


# Local steps, by NumPy


def walk(clients: Clients, i: int, p: Point, count: int, decay: float = 1.0) -> tuple[Point, Point]:
    """A client's local steps: where they end, and the weighted sum of its directions."""
    total = zero()
    for k in range(count):
        d = clients.direction(i, p)
        total = tuple(q + decay**k * along for q, along in zip(total, d, strict=True))
        p = step(p, d, decay**k)
    return p, total


def test_fedbio_averages_the_points_after_local_steps() -> None:
    problem, clients = problem_and_clients()
    p = zero()
    for _ in range(2):
        p = average([walk(clients, i, p, 3)[0] for i in range(clients.m)])
    assert_close(play(fedbio(**STEPS, local_steps=3), problem, 2), p)


def test_simfbo_averages_the_weighted_directions_and_with_the_local_steps_the_points() -> None:
    problem, clients = problem_and_clients()
    p = zero()
    for _ in range(2):
        q = average([walk(clients, i, p, 3, 0.5)[1] for i in range(clients.m)])
        p = step(p, q, 2.0)
    double = {"server_step": 0.4, "server_system_step": 0.5, "server_outer_step": 0.2}
    assert_close(play(simfbo(**STEPS, **double, decay=0.5, local_steps=3), problem, 2), p)
    plain, bio = (play(make(**STEPS, local_steps=3), problem, 2) for make in (simfbo, fedbio))
    torch.testing.assert_close(tuple(plain)[:3], tuple(bio)[:3], rtol=0.0, atol=1e-12)


def test_shrofbo_normalises_by_the_weights_of_each_client() -> None:
    problem, clients = problem_and_clients()
    counts, decay = [1, 4, 2, 3], 0.5
    mass = [sum(decay**k for k in range(count)) for count in counts]
    p = zero()
    for _ in range(2):
        sums = [walk(clients, i, p, counts[i], decay)[1] for i in range(clients.m)]
        q = average([tuple(part / mass[i] for part in total) for i, total in enumerate(sums)])
        p = step(p, q, float(np.mean(mass)))
    found = play(simfbo(**STEPS, decay=decay, local_steps=counts, normalise=True), problem, 2)
    assert_close(found, p)
    same, normal = (play(simfbo(**STEPS, local_steps=3, normalise=flag), problem, 2) for flag in (False, True))
    torch.testing.assert_close(tuple(same)[:3], tuple(normal)[:3], rtol=0.0, atol=1e-12)


def test_fedbioacc_is_its_recursion() -> None:
    """Three local steps along momenta, averaged points, momenta at the average from the clients' last points."""
    problem, clients = problem_and_clients()
    c, decay, I = 0.3, 4.0, 3
    alpha = [(1.0 + t / decay) ** (-1.0 / 3.0) for t in range(2 * I)]

    def next_momentum(i: int, m: Point, new: Point, old: Point, t: int) -> Point:
        keep = 1.0 - c * alpha[t] ** 2
        parts = zip(clients.direction(i, new), m, clients.direction(i, old), strict=True)
        return tuple(d + keep * (moment - o) for d, moment, o in parts)

    p, m = zero(), clients.mean(zero())
    for r in range(2):
        ends, befores, momenta = [], [], []
        for i in range(clients.m):
            point, moment, before = p, m, p
            for k in range(I):
                t = r * I + k
                if k:
                    moment = next_momentum(i, moment, point, before, t - 1)
                before = point
                point = step(point, moment, alpha[t])
            ends.append(point)
            befores.append(before)
            momenta.append(moment)
        p = average(ends)
        last = (r + 1) * I - 1
        m = average([next_momentum(i, momenta[i], p, befores[i], last) for i in range(clients.m)])
    state = play(fedbioacc(**STEPS, local_steps=I, forget=c, decay=decay), problem, 2)
    assert_close(state, p)
    for found, want in zip((state.m_x, state.m_y, state.m_v), m, strict=True):
        np.testing.assert_allclose(found.numpy(), want, rtol=0.0, atol=1e-10)


def test_the_linear_systems_variable_stays_in_its_ball() -> None:
    problem, _ = problem_and_clients(heterogeneity=3.0)
    for make in (fedbio, simfbo, fedbioacc):
        state = play(make(**STEPS, local_steps=2, radius=0.1), problem, 3)
        v = triple(state)[2]
        assert np.linalg.norm(v) <= 0.1 + 1e-12
        free = triple(play(make(**STEPS, local_steps=2), problem, 3))[2]
        assert np.linalg.norm(free) > 0.1


# Fixed points


def solution(form: NestedForm) -> Point:
    """x*, y*(x*) and v*: there D_y = D_v = 0, and D_x is the closed hypergradient, 0."""
    x = form.optimum
    y = form.inner(x)
    v = -torch.linalg.solve(form.hessian, y - form.a.mean(0))
    return x.numpy(), y.numpy(), v.numpy()


def placed(state: Any, p: Point) -> Any:
    return state._replace(**dict(zip("xyv", map(torch.from_numpy, p), strict=True)))


def test_the_directions_at_the_solution_are_0_and_elsewhere_in_x_the_closed_hypergradient() -> None:
    problem, clients = problem_and_clients()
    form, p = problem.exact, solution(problem.exact)
    assert max(float(np.abs(d).max()) for d in clients.mean(p)) < 1e-9
    x = torch.ones(3, dtype=torch.float64)
    y = form.inner(x)
    there = (x.numpy(), y.numpy(), -torch.linalg.solve(form.hessian, y - form.a.mean(0)).numpy())
    state = placed(fedbio(**STEPS).init(problem, 4), there)
    after = play(fedbio(**STEPS, local_steps=1), problem, 1, state=state)
    torch.testing.assert_close((x - after.x) / 0.1, form.hypergradient(x), rtol=0.0, atol=1e-9)


def test_fedbioacc_rests_at_the_solution_and_local_steps_without_correction_do_not() -> None:
    problem, _ = problem_and_clients()
    p = solution(problem.exact)
    method = fedbioacc(**STEPS, local_steps=3, forget=0.0, decay=None)
    state = method.init(problem, 4)
    rest = play(method, problem, 3, state=state._replace(at=placed(state.at, p)))
    assert_close(rest, p, 1e-9)
    plain = fedbio(**STEPS, local_steps=3)
    after = play(plain, problem, 3, state=placed(plain.init(problem, 4), p))
    assert min(np.linalg.norm(found - want) for found, want in zip(triple(after), p, strict=True)) > 1e-3


def test_clients_that_are_alike_do_not_drift() -> None:
    form = nested_quadratic(WIDE, clients=1, dimension=3, inner_dimension=5).exact
    same = NestedForm(*(t.expand(3, *t.shape[1:]) for t in (form.H, form.C, form.c, form.a, form.e, form.rho)))
    problem, p = quadratic_problem(same, WIDE), solution(same)
    for method in (fedbio(**STEPS, local_steps=3), simfbo(**STEPS, local_steps=[1, 3, 2])):
        assert_close(play(method, problem, 2, state=placed(method.init(problem, 3), p)), p, 1e-9)


# FedMBO


def alike(form: NestedForm) -> NestedForm:
    """The same Hessian at all clients; all else differs."""
    return NestedForm(form.hessian.expand_as(form.H), form.C, form.c, form.a, form.e, form.rho)


def test_fedmbo_with_equal_hessians_is_the_centralised_algorithm() -> None:
    """Then each chain is the series of the mean Hessian, and the pairs of clients cancel in the means but in C p."""
    base = nested_quadratic(WIDE, **SMALL).exact
    form = alike(NestedForm(base.H, base.C[:1].expand_as(base.C), base.c, base.a, base.e, base.rho))
    T, N, ell = 2, 4, 6.0
    H, C = form.hessian.numpy(), form.C[0].numpy()
    c, a = form.c.mean(0).numpy(), form.a.mean(0).numpy()
    x, y = np.zeros(3), np.zeros(5)
    for _ in range(3):
        for _ in range(T):
            y = y - 0.2 * (H @ y - C @ x - c)
        p = sum(np.linalg.matrix_power(np.eye(5) - H / ell, n) @ (y - a) for n in range(N)) / ell
        x = x - 0.3 * ((form.rho[:, None].numpy() * (x - form.e.numpy())).mean(0) + C.T @ p)
    settings: dict[str, Any] = {"step": 0.2, "outer_step": 0.3, "inner_rounds": T, "terms": N, "lipschitz": ell}
    state = play(fedmbo(**settings, batch="all"), quadratic_problem(form, WIDE), 3)
    np.testing.assert_allclose(state.y.numpy(), y, rtol=0.0, atol=1e-10)
    np.testing.assert_allclose(state.x.numpy(), x, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("series", ["deterministic", "random"])
def test_chains_through_single_clients_are_unbiased_for_the_series_of_the_mean_hessian(series: Any) -> None:
    """Where clients differ in everything: the mean over draws is the closed form within 4 standard errors."""
    problem, _ = problem_and_clients()
    form, fed, N, ell = problem.exact, federation(problem), 3, 6.0
    x, y = torch.ones(3, dtype=torch.float64), torch.full((5,), 0.5, dtype=torch.float64)
    s, inverse = NestedState(x, y, "bilevel"), Inverse(series, N, ell, "all")
    found = torch.stack([parallel_hypergradient(fed, s, inverse, Draw.of(0).round(t)) for t in range(40)])
    p = (
        sum(torch.linalg.matrix_power(torch.eye(5) - form.hessian / ell, n) for n in range(N))
        @ (y - form.a.mean(0))
        / ell
    )
    expected = (form.rho[:, None] * (x - form.e)).mean(0) + form.C.mean(0).T @ p
    error = (found.mean(0) - expected).abs()
    assert bool((error < 4.0 * found.std(0) / 40**0.5).all())
    assert bool((found.std(0) > 1e-3).all())  # clients differ, so that single chains do


def test_a_long_series_gives_the_closed_hypergradient() -> None:
    base = nested_quadratic(WIDE, clients=3, dimension=2, inner_dimension=3, condition=2.0).exact
    form = alike(NestedForm(base.H, base.C[:1].expand_as(base.C), base.c, base.a, base.e, base.rho))
    problem, x = quadratic_problem(form, WIDE), torch.ones(2, dtype=torch.float64)
    s, inverse = NestedState(x, form.inner(x), "bilevel"), Inverse("deterministic", 20, 1.5, "all")
    h = parallel_hypergradient(federation(problem), s, inverse, Draw.of(0))
    torch.testing.assert_close(h, form.hypergradient(x), rtol=0.0, atol=1e-6)


def test_chains_whose_clients_do_not_reply_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = nested_quadratic(WIDE, **{**SMALL, "clients": 8})
    method = fedmbo(batch="all", terms=3, redraw=True)
    fed = federation(problem, active=0.5)
    state = play(method, problem, 3, fed=fed)
    assert bool(torch.isfinite(state.x).all())
    assert not torch.equal(state.x, problem.start)


def test_a_small_lipschitz_constant_is_explained() -> None:
    problem, _ = problem_and_clients(condition=20.0)
    with pytest.raises(RunError, match=r"method\.lipschitz = 0\.5 is too small"):
        play(fedmbo(lipschitz=0.5, terms=6, batch="all"), problem, 3)


# Rounds and numbers


def spent(method: Method, problem: Any, count: int = 1) -> tuple[int, int]:
    """Rounds and numbers up."""
    fed = federation(problem)
    play(method, problem, count, fed=fed)
    return fed.ledger.total.rounds, fed.ledger.total.floats_up


def test_rounds_and_numbers_are_those_of_the_papers() -> None:
    problem, _ = problem_and_clients()
    m, d_x, d_y = 4, 3, 5
    assert spent(fedbio(**STEPS), problem, 2) == (2, 2 * m * (d_x + 2 * d_y))
    assert spent(simfbo(**STEPS), problem, 2) == (2, 2 * m * (d_x + 2 * d_y))
    assert spent(fedbioacc(**STEPS), problem, 2) == (2 * 2 + 1, (2 * 2 + 1) * m * (d_x + 2 * d_y))
    T, N = 3, 4
    rounds, up = spent(fedmbo(step=0.1, outer_step=0.1, lipschitz=9.0, inner_rounds=T, terms=N, batch="all"), problem)
    assert (rounds, up) == (T + N + 1, m * ((T + 1 + (N - 1)) * d_y + d_x))
    random = {"inner_rounds": T, "terms": N, "series": "random", "lipschitz": 9.0, "batch": "all"}
    rounds, up = spent(fedmbo(step=0.1, outer_step=0.1, **random), problem)
    counts = Draw.of(1).round(0).phase("outer").phase("truncation").integers(N, m)
    assert rounds == T + 2 + int(counts.max())
    assert up == m * ((T + 1) * d_y + d_x) + int(counts.sum()) * d_y


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("make", [fedbio, fedbioacc, simfbo, fedmbo])
def test_every_kind_of_problem_is_solved(make: Callable[..., Method], kind: str) -> None:
    """The hypergradient, by the mean losses, shrinks."""
    problem = CASES[kind]()
    steps = {"step": 0.2, "outer_step": 0.1, "batch": "all"} | ({} if make is fedmbo else {"local_steps": 2})
    state = play(make(**steps), problem, 3)
    x = (state.at if make is fedbioacc else state).x
    assert bool(torch.isfinite(x).all())
    assert not torch.equal(x, problem.start)


def test_a_list_of_local_steps_must_fit_the_clients() -> None:
    problem, _ = problem_and_clients()
    with pytest.raises(UsageError, match="3 local step numbers was given for 4 clients"):
        simfbo(**STEPS, local_steps=[1, 2, 3]).init(problem, 4)


# A figure

LARGE: dict[str, Any] = {"step": 0.5, "system_step": 0.5, "outer_step": 0.3, "batch": "all"}

LARGE: dict[str, Any] = {"step": 0.5, "system_step": 0.5, "outer_step": 0.3, "batch": "all"}


def test_momentum_corrects_the_drift_of_local_steps() -> None:
    """FedBiOAcc's point: at equal local steps and as many rounds, it is nearer to x* than FedBiO and SimFBO."""
    problem = nested_quadratic(WIDE, clients=4, dimension=2, inner_dimension=3, condition=2.0, heterogeneity=2.0)
    distance = {}
    for make in (fedbio, simfbo, fedbioacc):
        more = {"forget": 0.05, "decay": 50.0} if make is fedbioacc else {}
        state = play(make(**LARGE, local_steps=3, **more), problem, 20)
        distance[make.__name__] = float(np.linalg.norm(triple(state)[0] - problem.exact.optimum.numpy()))
    assert distance["fedbioacc"] < 0.3 * distance["fedbio"]
    assert distance["simfbo"] == pytest.approx(distance["fedbio"], rel=1e-6)
