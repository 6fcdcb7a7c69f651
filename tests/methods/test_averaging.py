"""FedProx, SCAFFOLD and rules at the server: each reduces to FedAvg, follows its paper's lines, and shows its point."""

from typing import Any

import numpy as np
import pytest
import torch

from coterie.errors import UsageError
from coterie.federation import Federation, LocalEngine
from coterie.federation.work import rows_for_records
from coterie.methods import Method, fedadam, fedavg, fedavgm, fedprox, fedyogi, meritfed, scaffold
from coterie.methods.shared.optimisers import UpdateRule
from coterie.numerics import Draw
from coterie.problems import Weighting
from coterie.problems.base import Context
from coterie.problems.catalogue.quadratic import quadratic

CLIENTS, DIMENSION = 4, 3
LOCAL: dict[str, Any] = {"step": 0.1, "local_steps": 4}
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def problem() -> Weighting:
    context = Context(seed=1, dtype=torch.float64)
    return quadratic(context, clients=CLIENTS, friends=2, dimension=DIMENSION, rows=12, curvature=2.0)


def play(method: Method, problem: Weighting, rounds: int, ids: list[list[int]] | None = None) -> Any:
    """The state after some rounds, of which each has its own active clients where these are given."""
    fed = Federation.on(LocalEngine(problem.task, problem.train, problem.valid, problem.target))
    state = method.init(problem, problem.clients)
    for t in range(rounds):
        active = fed if ids is None else Federation(fed.engine, torch.tensor(ids[t]))
        state = method.round(active, state, Draw.of(3).round(t))
    return state


def data(problem: Weighting) -> list[tuple[Array, Array]]:
    """Inputs and labels of every client, for NumPy: the loss is ½ (a·θ − b)², meaned."""
    rows = [problem.train.client(k).all() for k in range(problem.clients)]
    return [(batch.inputs.numpy(), batch.labels.numpy()) for batch in rows]


def slope(client: tuple[Array, Array], theta: Array) -> Array:
    a, b = client
    return a.T @ (a @ theta - b) / len(b)


def test_numpy_has_the_gradient_of_the_problem(problem: Weighting) -> None:
    theta = np.arange(DIMENSION, dtype=float)
    for k, client in enumerate(data(problem)):
        exact = problem.task.full_gradient(torch.from_numpy(theta), problem.train.client(k))
        np.testing.assert_allclose(exact.numpy(), slope(client, theta), atol=1e-12)


@pytest.mark.parametrize("batch", [5, "all"])
@pytest.mark.parametrize(
    "reduced",
    [
        lambda local: fedprox(**local, penalty=0.0),
        lambda local: fedavgm(**local, momentum=0.0),
        lambda local: fedavg(**local, server="momentum(1.0, 0.0)"),
        lambda local: fedavg(**local, server="sgd(1)"),
    ],
    ids=["fedprox", "fedavgm", "momentum", "sgd"],
)
def test_it_reduces_to_fedavg(problem: Weighting, reduced: Any, batch: Any) -> None:
    local = {**LOCAL, "batch": batch}
    one, two = play(reduced(local), problem, 4), play(fedavg(**local), problem, 4)
    torch.testing.assert_close(one.x, two.x, rtol=0, atol=1e-12)


def test_adam_with_a_large_adaptivity_is_a_small_step(problem: Weighting) -> None:
    """τ → ∞ with η/τ fixed, β = 0 and β₂ = 1: the root of the squares stays τ."""
    for make in (fedadam, fedyogi):
        fixed = {"momentum": 0.0, "second_momentum": 1 - 1e-12}
        one = play(make(**LOCAL, server_step=1e9, adaptivity=2e9, **fixed), problem, 3)
        two = play(fedavg(**LOCAL, server="sgd(0.25)"), problem, 3)  # √v = τ too, because v starts at τ²
        torch.testing.assert_close(one.x, two.x, rtol=0, atol=1e-8)


def test_fedprox_takes_the_papers_steps(problem: Weighting) -> None:
    s = play(fedprox(**LOCAL, batch="all", penalty=0.7, weights="uniform"), problem, 3)
    x = problem.start.numpy().copy()
    for _ in range(3):
        models = []
        for client in data(problem):
            y = x.copy()
            for _ in range(4):
                y = y - 0.1 * (slope(client, y) + 0.7 * (y - x))
            models.append(y)
        x = np.mean(models, axis=0)
    np.testing.assert_allclose(s.x.numpy(), x, atol=1e-12)


def test_fedprox_holds_clients_near_the_common_model(problem: Weighting) -> None:
    """The fixed point of the local steps is the proximal point, so a larger μ moves less."""
    exact = []
    for penalty in (1.0, 3.0, 9.0):
        method = fedprox(step=0.08, local_steps=90, batch="all", penalty=penalty, weights="uniform")
        moved = play(method, problem, 1).x.numpy() - problem.start.numpy()
        eye, x = np.eye(DIMENSION), problem.start.numpy()
        points = [
            np.linalg.solve(a.T @ a / len(b) + penalty * eye, a.T @ b / len(b) + penalty * x) for a, b in data(problem)
        ]
        np.testing.assert_allclose(moved, np.mean(points, axis=0) - x, atol=1e-6)
        exact.append(float(np.linalg.norm(moved)))
    assert exact[0] > exact[1] > exact[2]


def test_the_first_round_of_scaffold_is_fedavg(problem: Weighting) -> None:
    for batch in (5, "all"):
        local = {**LOCAL, "batch": batch}
        one, two = play(scaffold(**local), problem, 1), play(fedavg(**local, weights="uniform"), problem, 1)
        torch.testing.assert_close(one.x, two.x, rtol=0, atol=1e-12)


def test_scaffold_takes_the_papers_steps_also_with_some_clients(problem: Weighting) -> None:
    active = [[0, 1, 2, 3], [0, 2], [1, 2, 3], [0, 3]]
    s = play(scaffold(**LOCAL, batch="all", server="sgd(0.8)"), problem, 4, active)
    x, c, own = problem.start.numpy().copy(), np.zeros(DIMENSION), np.zeros((CLIENTS, DIMENSION))
    clients = data(problem)
    for ids in active:
        moves, changes = [], []
        for k in ids:
            y = x.copy()
            for _ in range(4):
                y = y - 0.1 * (slope(clients[k], y) - own[k] + c)
            new = own[k] - c + (x - y) / (4 * 0.1)
            moves.append(y - x)
            changes.append(new - own[k])
            own[k] = new
        x = x + 0.8 * np.mean(moves, axis=0)
        c = c + len(ids) / CLIENTS * np.mean(changes, axis=0)
    np.testing.assert_allclose(s.x.numpy(), x, atol=1e-12)
    np.testing.assert_allclose(s.c.numpy(), c, atol=1e-12)
    np.testing.assert_allclose(rows_for_records(s.variates).numpy(), own, atol=1e-12)
    np.testing.assert_allclose(s.c.numpy(), own.mean(0), atol=1e-12)  # the invariant that |A|/n keeps


def test_scaffold_reaches_the_optimum_where_local_steps_of_fedavg_drift(problem: Weighting) -> None:
    """The paper's point: with several local steps and unlike clients FedAvg stops elsewhere."""
    clients = data(problem)
    hessian = np.mean([a.T @ a / len(b) for a, b in clients], axis=0)
    optimum = np.linalg.solve(hessian, np.mean([a.T @ b / len(b) for a, b in clients], axis=0))
    local = {"step": 0.2, "local_steps": 3, "batch": "all"}
    found = [play(m, problem, 20).x.numpy() for m in (scaffold(**local), fedavg(**local, weights="uniform"))]
    near, far = (float(np.linalg.norm(x - optimum)) for x in found)
    assert near < 1e-3 < 0.03 < far


@pytest.mark.parametrize("rule", ["momentum", "adam", "yogi"])
def test_the_server_takes_the_papers_steps(problem: Weighting, rule: str) -> None:
    eta, beta, second, tau = 0.3, 0.8, 0.95, 0.02
    local = {**LOCAL, "batch": "all", "weights": "uniform"}
    given: dict[str, Any] = {"server_step": eta, "momentum": beta}
    adaptive = {"second_momentum": second, "adaptivity": tau}
    made = {
        "momentum": lambda: fedavgm(**local, **given),
        "adam": lambda: fedadam(**local, **given, **adaptive),
        "yogi": lambda: fedyogi(**local, **given, **adaptive),
    }[rule]()
    written = f"{rule}({eta}, {beta}" + ("" if rule == "momentum" else f", {second}, {tau}") + ")"
    x, m, v = problem.start.numpy().copy(), np.zeros(DIMENSION), np.full(DIMENSION, tau**2)
    for _ in range(5):
        models = []
        for client in data(problem):
            y = x.copy()
            for _ in range(4):
                y = y - 0.1 * slope(client, y)
            models.append(y)
        delta = np.mean(models, axis=0) - x  # the paper's sign
        if rule == "momentum":
            m = beta * m + delta
            x = x + eta * m
            continue
        m = beta * m + (1 - beta) * delta
        if rule == "adam":
            v = second * v + (1 - second) * delta**2
        else:
            v = v - (1 - second) * delta**2 * np.sign(v - delta**2)
        x = x + eta * m / (np.sqrt(v) + tau)
    for method in (made, fedavg(**local, server=written)):
        np.testing.assert_allclose(play(method, problem, 5).x.numpy(), x, atol=1e-12)


def test_adaptive_steps_help_where_curvatures_differ() -> None:
    """A small figure: coordinates of very unequal scale, on which one step size must be small."""
    rows = torch.diag(torch.tensor([10.0, 1.0, 0.1], dtype=torch.float64)).repeat(4, 1)
    labels = rows @ torch.ones(3, dtype=torch.float64)
    net = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    shards = [(rows, labels)] * 2
    problem = Weighting.on(shards, test=shards[0], model=net, loss="squared", dtype="float64")
    local = {"step": 0.01, "local_steps": 5, "batch": "all"}
    plain, adam = (play(m, problem, 40).x for m in (fedavg(**local), fedadam(**local, server_step=0.1)))
    assert (adam - 1).abs().max() < 0.8 * (plain - 1).abs().max()


def test_meritfed_takes_the_same_value(problem: Weighting) -> None:
    one = play(meritfed(step=0.1, server="adam", server_step=0.02, momentum=0.7, second_momentum=0.9), problem, 3)
    two = play(meritfed(step=0.1, server="adam(0.02, 0.7, 0.9)"), problem, 3)
    assert torch.equal(one.x, two.x)
    for server in ("yogi(0.02)", "adam(0.02, 0.9, 0.99, 0.001)"):
        assert bool(play(meritfed(step=0.1, server=server), problem, 3).x.isfinite().all())


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("rmsprop", "a rule is one of sgd"),
        ("sgd(0.1, 0.9)", "sgd takes 1 numbers at most: step"),
        ("adam(-1)", "step is -1; it must be positive"),
        ("momentum(1, 1)", "momentum is 1; it must be at least 0 and below 1"),
        ("adam(one)", "could not convert"),
        ("sgd(nan)", "step is nan"),
    ],
)
def test_a_rule_that_is_none_is_explained(server: str, words: str) -> None:
    with pytest.raises(UsageError, match="server.*" + words.replace("(", r"\(")):
        fedavg(server=server)


def test_a_rule_may_leave_numbers_out() -> None:
    assert UpdateRule.of("yogi( 0.1 ,0.5)", step=1.0, second_momentum=0.9, adaptivity=0.01) == UpdateRule(
        "yogi", 0.1, 0.5, 0.9, 0.01
    )
