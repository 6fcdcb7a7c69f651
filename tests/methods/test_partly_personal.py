"""FedPer, FedRep, FedBN, APFL, IFCA and q-FFL: each reduces to something known, and follows its paper's lines."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie.errors import UsageError
from coterie.federation import Federation, LocalEngine
from coterie.federation.work import rows_for_records
from coterie.methods import Method, apfl, fedavg, fedbn, fedper, fedrep, ifca, local_train, qffl
from coterie.methods.shared.parts import Split, personal_names
from coterie.numerics import Draw
from coterie.problems import Weighting
from coterie.problems.models import FlatModel, build

LOCAL: dict[str, Any] = {"step": 0.05, "local_steps": 3, "batch": "all"}
Array = np.ndarray[Any, Any]


class Product(nn.Module):
    """a ↦ v·(Ba): a representation B and a head v, without offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2, bias=False)
        self.head = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.body.weight.copy_(torch.tensor([[0.5, -0.2, 0.1], [0.3, 0.4, -0.6]]))
            self.head.weight.copy_(torch.tensor([[0.7, -0.5]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def shard(k: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    draw = Draw.of(11).client(k)
    a = draw.phase("inputs").normal(rows, 3, dtype=torch.float64)
    return a, a @ draw.phase("truth").normal(3, dtype=torch.float64)


def problem_of(shards: list[Any], model: nn.Module | None = None) -> Weighting:
    return Weighting.on(shards, validation=shards, model=model or Product(), loss="squared", dtype="float64")


@pytest.fixture(scope="module")
def problem() -> Weighting:
    return problem_of([shard(k, 6 + 2 * k) for k in range(3)])


def play(method: Method, problem: Weighting, rounds: int, ids: list[list[int]] | None = None) -> Any:
    fed = Federation.on(LocalEngine(problem.task, problem.train, problem.valid, problem.target))
    state = method.init(problem, problem.clients)
    for t in range(rounds):
        active = fed if ids is None else Federation(fed.engine, torch.tensor(ids[t]))
        state = method.round(active, state, Draw.of(3).round(t))
    return state


def data(problem: Weighting) -> list[tuple[Array, Array]]:
    rows = [problem.train.client(k).all() for k in range(problem.clients)]
    return [(batch.inputs.numpy(), batch.labels.numpy()) for batch in rows]


def slopes(client: tuple[Array, Array], B: Array, v: Array) -> tuple[Array, Array]:
    """∇_B and ∇_v of the mean of ½ (v·Ba − b)²."""
    a, b = client
    error = a @ B.T @ v - b
    return np.outer(v, error @ a) / len(b), (a @ B.T).T @ error / len(b)


def loss(client: tuple[Array, Array], B: Array, v: Array) -> float:
    a, b = client
    return float(0.5 * np.mean((a @ B.T @ v - b) ** 2))


def first(problem: Weighting) -> tuple[Array, Array]:
    theta = problem.start.numpy()
    return theta[:6].reshape(2, 3).copy(), theta[6:].copy()


@pytest.mark.parametrize("make", [fedper, lambda **local: fedbn(**local, personal=["head.*"])], ids=["fedper", "fedbn"])
def test_equal_clients_give_fedavg(make: Any) -> None:
    """Nobody's own part differs from the others' then, so that keeping it at home changes nothing."""
    problem = problem_of([shard(0)] * 3)
    one, two = play(make(**LOCAL), problem, 3), play(fedavg(**LOCAL), problem, 3)
    models = make(**LOCAL).view(one).model
    for model in models:
        torch.testing.assert_close(model, two.x, rtol=0, atol=1e-12)


def test_one_client_of_fedrep_alternates_between_head_and_body() -> None:
    """With a step of the head only, and then of the body only, one client alone is block coordinate descent."""
    problem = problem_of([shard(0)])
    s = play(fedrep(step=0.05, local_steps=1, head_steps=1, batch="all"), problem, 4)
    (client,), (B, v) = data(problem), first(problem)
    for _ in range(4):
        v = v - 0.05 * slopes(client, B, v)[1]
        B = B - 0.05 * slopes(client, B, v)[0]
    np.testing.assert_allclose(s.x.numpy(), B.reshape(-1), atol=1e-12)
    np.testing.assert_allclose(rows_for_records(s.v)[0].numpy(), v, atol=1e-12)


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_the_papers_steps_also_with_some_clients(problem: Weighting, name: str) -> None:
    active = [[0, 1, 2], [0, 2], [1, 2]]
    method = fedper(**LOCAL) if name == "fedper" else fedrep(**LOCAL, head_steps=2)
    s = play(method, problem, 3, active)
    clients, (B, v) = data(problem), first(problem)
    heads = [v.copy() for _ in clients]
    for ids in active:
        bodies, weights = [], []
        for k in ids:
            mine = B.copy()
            if name == "fedper":
                for _ in range(3):
                    down, right = slopes(clients[k], mine, heads[k])
                    mine, heads[k] = mine - 0.05 * down, heads[k] - 0.05 * right
            else:
                for _ in range(2):
                    heads[k] = heads[k] - 0.05 * slopes(clients[k], mine, heads[k])[1]
                for _ in range(3):
                    mine = mine - 0.05 * slopes(clients[k], mine, heads[k])[0]
            bodies.append(mine)
            weights.append(len(clients[k][1]) if name == "fedper" else 1.0)
        B = np.average(bodies, axis=0, weights=weights)
    np.testing.assert_allclose(s.x.numpy(), B.reshape(-1), atol=1e-12)
    models = method.view(s).model.numpy()
    np.testing.assert_allclose(models, [[*B.reshape(-1), *head] for head in heads], atol=1e-12)


def test_only_the_common_part_is_moved(problem: Weighting) -> None:
    fed = Federation.on(LocalEngine(problem.task, problem.train, problem.valid, problem.target))
    method = fedper(**LOCAL)
    method.round(fed, method.init(problem, 3), Draw.of(0))
    total = fed.ledger.total
    assert (total.floats_up, total.floats_down) == (3 * 6, 3 * 6)


def test_personal_heads_fit_unlike_clients_better(problem: Weighting) -> None:
    """A small figure: one model for all cannot fit three different truths, three heads can do more."""
    local = {"step": 0.1, "local_steps": 5, "batch": "all"}
    models = [m.view(play(m, problem, 40)).model for m in (fedrep(**local), fedper(**local), fedavg(**local))]
    losses = [
        np.mean(
            [loss(c, t[:6].reshape(2, 3), t[6:]) for c, t in zip(data(problem), m.expand(3, -1).numpy(), strict=True)]
        )
        for m in models
    ]
    assert max(losses[:2]) < 0.7 * losses[2]


def test_parts_of_models_are_found_by_name() -> None:
    mlp, cnn = (FlatModel(build(name, (1, 8, 8), 10, 0)) for name in ("mlp", "cnn"))
    assert personal_names(mlp, 1) == ("3.weight", "3.bias")
    assert personal_names(mlp, 2) == mlp.parameter_names == ("1.weight", "1.bias", "3.weight", "3.bias")
    assert personal_names(cnn, "norm") == ("1.weight", "1.bias", "4.weight", "4.bias")
    assert personal_names(cnn, ["7.*"]) == ("7.weight", "7.bias")
    split, theta = Split.of(cnn, "norm"), torch.arange(float(cnn.size))
    x, v = split.cut(theta)
    assert len(v) == 2 * (4 + 8)
    assert torch.equal(split.join(x, v), theta)
    named = cnn.unflatten(theta)
    assert torch.equal(v, torch.cat([named[name].reshape(-1) for name in personal_names(cnn, "norm")]))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (fedbn(), "no parameter of this model personal .* use fedavg"),
        (fedper(personal=2), "all parameters of this model personal .* local-train with everyone"),
        (fedrep(personal=["neck.*"]), "no parameter"),
    ],
    ids=["fedbn", "fedper", "fedrep"],
)
def test_a_model_without_two_parts_is_refused(problem: Weighting, method: Method, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        method.init(problem, 3)


def test_apfl_without_mixing_is_fedavg_and_with_all_of_it_local_training(problem: Weighting) -> None:
    common = play(fedavg(**LOCAL, weights="uniform"), problem, 3)
    s = play(apfl(**LOCAL, mixing=0.0, adaptive=False), problem, 3)
    torch.testing.assert_close(s.x, common.x, rtol=0, atol=1e-12)
    alone = apfl(**LOCAL, mixing=1.0, adaptive=False)
    own = local_train(**LOCAL, everyone=True)
    models = own.view(play(own, problem, 3)).model
    torch.testing.assert_close(alone.view(play(alone, problem, 3)).model, models, rtol=0, atol=1e-12)


def test_apfl_takes_the_papers_steps(problem: Weighting) -> None:
    method = apfl(**LOCAL, mixing=0.3)
    s = play(method, problem, 3)
    clients, x = data(problem), problem.start.numpy().copy()
    own, alphas, mixtures = [x.copy() for _ in clients], [0.3] * 3, [x] * 3

    def slope(k: int, theta: Array) -> Array:
        down, right = slopes(clients[k], theta[:6].reshape(2, 3), theta[6:])
        return np.concatenate([down.reshape(-1), right])

    for _ in range(3):
        uploads = []
        for k in range(3):
            w = x.copy()
            for i in range(3):
                g = slope(k, alphas[k] * own[k] + (1 - alphas[k]) * w)
                if i == 0:
                    alphas[k] = float(np.clip(alphas[k] - 0.05 * g @ (own[k] - w), 0.0, 1.0))
                own[k] = own[k] - 0.05 * alphas[k] * g
                w = w - 0.05 * slope(k, w)
            mixtures[k] = alphas[k] * own[k] + (1 - alphas[k]) * w
            uploads.append(w)
        x = np.mean(uploads, axis=0)
    np.testing.assert_allclose(s.x.numpy(), x, atol=1e-12)
    np.testing.assert_allclose(method.view(s).model.numpy(), mixtures, atol=1e-12)
    assert len({round(a, 6) for a in alphas}) == 3  # each client learned its own


def test_ifca_with_one_model_is_fedavg(problem: Weighting) -> None:
    one, two = play(ifca(**LOCAL, clusters=1), problem, 3), play(fedavg(**LOCAL, weights="uniform"), problem, 3)
    torch.testing.assert_close(one.X[0], two.x, rtol=0, atol=1e-12)


def test_ifca_takes_the_papers_steps(problem: Weighting) -> None:
    method = ifca(**LOCAL, clusters=3, spread=2.0)
    active = [[0, 1, 2], [0, 2], [0, 1, 2]]
    X, choice, clients = method.init(problem, 3).X.numpy().copy(), [0, 0, 0], data(problem)
    np.testing.assert_array_equal(X[0], problem.start.numpy())
    s = play(method, problem, 3, active)
    for ids in active:
        moved: dict[int, list[Array]] = {}
        for k in ids:
            choice[k] = int(np.argmin([loss(clients[k], x[:6].reshape(2, 3), x[6:]) for x in X]))
            B, v = X[choice[k]][:6].reshape(2, 3), X[choice[k]][6:]
            for _ in range(3):
                down, right = slopes(clients[k], B, v)
                B, v = B - 0.05 * down, v - 0.05 * right
            moved.setdefault(choice[k], []).append(np.concatenate([B.reshape(-1), v]))
        for j, models in moved.items():
            X[j] = np.mean(models, axis=0)
    np.testing.assert_allclose(s.X.numpy(), X, atol=1e-12)
    assert s.choice.tolist() == choice
    weights = method.view(s).weights
    assert weights is not None
    torch.testing.assert_close(weights.sum(1), torch.ones(3, dtype=torch.float64))


def test_ifca_finds_two_groups() -> None:
    """The paper's point: clients with opposite truths part, and each group fits its own."""
    a = shard(0)[0]
    truth = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    shards = [(shard(k)[0], shard(k)[0] @ truth * (1 if k < 3 else -1)) for k in range(5)]
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.1)
    problem = problem_of(shards, model)
    method = ifca(step=0.2, local_steps=5, batch="all", spread=5.0)
    s = play(method, problem, 20)
    assert len({int(c) for c in s.choice[:3]}) == len({int(c) for c in s.choice[3:]}) == 1
    models = method.view(s).model
    torch.testing.assert_close(a @ models[0], a @ truth, atol=1e-3, rtol=0)
    torch.testing.assert_close(a @ models[4], -a @ truth, atol=1e-3, rtol=0)


def test_qffl_without_fairness_is_fedavg(problem: Weighting) -> None:
    one, two = play(qffl(**LOCAL, fairness=0.0), problem, 3), play(fedavg(**LOCAL, weights="uniform"), problem, 3)
    torch.testing.assert_close(one.x, two.x, rtol=0, atol=1e-12)


def test_qffl_takes_the_papers_steps(problem: Weighting) -> None:
    q, lipschitz = 1.7, 1 / 0.05
    s = play(qffl(**LOCAL, fairness=q), problem, 3)
    clients, x = data(problem), problem.start.numpy().copy()
    for _ in range(3):
        top, bottom = np.zeros_like(x), 0.0
        for client in clients:
            B, v = x[:6].reshape(2, 3), x[6:]
            F = loss(client, B, v)
            for _ in range(3):
                down, right = slopes(client, B, v)
                B, v = B - 0.05 * down, v - 0.05 * right
            delta = lipschitz * (x - np.concatenate([B.reshape(-1), v]))
            top += F**q * delta
            bottom += q * F ** (q - 1) * float(delta @ delta) + lipschitz * F**q
        x = x - top / bottom
    np.testing.assert_allclose(s.x.numpy(), x, atol=1e-12)


def test_qffl_makes_losses_more_even() -> None:
    """Two clients agree and one does not: the mean leaves the third behind, q-FFL less so."""
    targets = (1.0, 1.0, -2.0)
    ones = torch.ones(4, 1, dtype=torch.float64)
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    problem = problem_of([(ones, t * ones[:, 0]) for t in targets], model)
    spread = []
    for q in (0.0, 2.0):
        x = float(play(qffl(step=0.1, local_steps=1, batch="all", fairness=q), problem, 60).x)
        spread.append(max((x - t) ** 2 for t in targets))
    assert spread[1] < 0.7 * spread[0]
