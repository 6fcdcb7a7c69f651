"""FedLAW, FedAWA, FedDisco and FedCE: each is FedAvg at one end, and its weights follow from formulas written here."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from learners import WIDE, a_quadratic, federation, play
from test_collaborate import local, own_shards
from torch import Tensor

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.federation import Call, LocalEngine
from coterie.federation.api import Replies
from coterie.federation.work import name_of
from coterie.methods import fedavg, fedawa, fedce, feddisco, fedlaw
from coterie.methods.shared.works import local_sgd
from coterie.methods.weights.fedawa import disagreement
from coterie.methods.weights.fedce import apartness, contributions
from coterie.methods.weights.feddisco import disco_weights
from coterie.methods.weights.fedlaw import fused, slopes
from coterie.numerics import Draw
from coterie.problems.catalogue.friends import friends

WALK: dict[str, Any] = {"step": 0.1, "local_steps": 3, "batch": 4}
WHOLE: dict[str, Any] = {"step": 0.1, "local_steps": 2, "batch": "all"}


@pytest.fixture(scope="module")
def unequal() -> Any:
    """Two classes in the plane; the clients differ in their numbers of rows and in their shares of the classes."""
    shards = []
    for (x, y), (few, many) in zip(own_shards(), ((5, 20), (20, 20), (12, 3), (9, 1)), strict=True):
        rows = torch.cat([(y == 0).nonzero()[:few, 0], (y == 1).nonzero()[:many, 0]])
        shards.append((x[rows].double(), y[rows]))
    return local(shards, target=shards[1], dtype="float64")


def uploads(problem: Any, x: Tensor, t: int, **walk: Any) -> Tensor:
    """The models after the local steps of round t."""
    settings = {"step": walk["step"], "steps": walk["local_steps"], "batch": walk["batch"]}
    U: Tensor = federation(problem).gather(local_sgd, x, draw=Draw.of(1).round(t).phase("walk"), **settings).rows
    return U


@pytest.mark.parametrize(
    "method",
    [
        fedlaw(**WALK, weight_steps=0),
        fedawa(**WALK, weight_steps=0),
        feddisco(**WALK, severity=0.0, margin=0.0),
    ],
    ids=["fedlaw", "fedawa", "feddisco"],
)
def test_at_one_end_it_is_fedavg(unequal: Any, method: Any) -> None:
    s = play(method, unequal, 3)
    torch.testing.assert_close(s.x, play(fedavg(**WALK), unequal, 3).x)
    torch.testing.assert_close(s.w, unequal.train.counts / unequal.train.counts.sum(dtype=torch.float64))


# FedLAW


def test_fedlaw_slopes_are_those_of_autograd(unequal: Any) -> None:
    U, at = Draw.of(2).normal(4, 6, dtype=torch.float64), torch.tensor([0.3, -0.2, 0.5, 0.1, -0.4], dtype=torch.float64)
    rows = unequal.target.valid
    wanted = torch.func.grad(lambda p: unequal.task.full_loss(fused(U, p), rows))(at)
    torch.testing.assert_close(slopes(U, at, unequal.task.full_gradient(fused(U, at), rows)), wanted)


def test_fedlaw_is_adam_on_weights_and_shrinkage(unequal: Any) -> None:
    """Two rounds with torch's own Adam and autograd; every round starts from the sizes and no shrinkage."""
    method = fedlaw(**WALK, weight_step=0.1, weight_steps=4)
    x, sizes = unequal.start, unequal.train.counts.double()
    for t in range(2):
        U = uploads(unequal, x, t, **WALK)
        z = (sizes / sizes.sum()).log().requires_grad_()
        s = torch.zeros((), dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.Adam([z, s], lr=0.1, betas=(0.5, 0.999))
        for _ in range(4):
            optimiser.zero_grad()
            unequal.task.full_loss(s.exp() * (z.softmax(0) @ U), unequal.target.valid).backward()
            optimiser.step()
        x = (s.exp() * (z.softmax(0) @ U)).detach()
    found = play(method, unequal, 2)
    torch.testing.assert_close(found.x, x)
    torch.testing.assert_close(found.w, z.softmax(0).detach())
    torch.testing.assert_close(found.shrinkage, s.exp().detach())
    assert method.view(found).more["shrinkage"] == pytest.approx(float(s.detach().exp()))


def test_fedlaw_asks_the_target_once_a_round() -> None:
    problem, K, d = a_quadratic(), 5, 4
    fed = federation(problem, target=0)
    play(fedlaw(), problem, 2, fed=fed)
    asked = fed.ledger.by_cause["fedlaw/learn-weights"]
    assert (asked.rounds, asked.floats_down, asked.floats_up) == (2, 2 * (K * d + K + 1), 2 * (K + 1))


def test_fedlaw_gives_its_weight_to_friends() -> None:
    problem = friends(WIDE, model="logistic", clients=6, friends=2, test=1300)
    s = play(fedlaw(step=0.5, local_steps=3, weight_step=0.05), problem, 4)
    assert float(s.w[:2].sum()) > 0.6
    ours, theirs = (problem.task.full_loss(x, problem.test) for x in (s.x, play(fedavg(step=0.5), problem, 4).x))
    assert float(ours) < 0.8 * float(theirs)


# FedAWA


def test_fedawa_disagreement_and_step_in_numpy(unequal: Any) -> None:
    method = fedawa(**WALK, weight_step=0.05)
    s = play(method, unequal, 1)
    n, x = unequal.train.counts.double().numpy(), unequal.start.numpy()
    U = uploads(unequal, unequal.start, 0, **WALK).numpy()

    def goal(z: Any) -> float:
        w = np.exp(z) / np.exp(z).sum()
        cosines = (U @ x) / (np.linalg.norm(U, axis=1) * np.linalg.norm(x))
        moved = U - x
        return float(w @ (1 - cosines) + w @ np.linalg.norm(moved - w @ moved, axis=1))

    z, h = np.log(n / n.sum()), 1e-6
    moved, costs = torch.tensor(U - x), 1.0 - torch.cosine_similarity(torch.tensor(U), unequal.start[None])
    assert float(disagreement(torch.tensor(z), moved, costs)) == pytest.approx(goal(z), rel=1e-12)
    slope = np.array([(goal(z + h * e) - goal(z - h * e)) / (2 * h) for e in np.eye(4)])
    z = z - 0.05 * slope / (np.abs(slope) + 1e-8)  # the first step of Adam
    np.testing.assert_allclose(s.w, np.exp(z) / np.exp(z).sum(), rtol=1e-6)


def test_fedawa_takes_weight_from_a_client_that_pulls_elsewhere() -> None:
    moved = torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.9, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    slope = torch.func.grad(disagreement)(torch.zeros(4, dtype=torch.float64), moved, torch.zeros(4).double())
    assert float(slope[3]) > 0 > float(slope[:3].max())


# FedDisco


def test_feddisco_weights_in_numpy(unequal: Any) -> None:
    fed = federation(unequal)
    s = play(feddisco(**WALK, severity=0.6, margin=0.05), unequal, 3, fed=fed)
    shares, n = [], unequal.train.counts.double().numpy()
    for k in range(4):
        labels = unequal.train.client(k).all().labels.numpy()
        shares.append(np.linalg.norm(np.array([(labels == 0).mean(), (labels == 1).mean()]) - 0.5))
    np.testing.assert_allclose(s.discrepancies, shares, rtol=1e-12)
    positive = np.maximum(n / n.sum() - 0.6 * np.array(shares) + 0.05, 0.0)
    assert 0.0 < (positive > 0).mean() < 1.0
    np.testing.assert_allclose(s.w, positive / positive.sum(), rtol=1e-12)
    asked = fed.ledger.by_cause["feddisco/discrepancy"]
    assert (asked.rounds, asked.floats_down, asked.floats_up) == (1, 0, 4)  # one number per client, once
    x = unequal.start
    for t in range(3):
        x = s.w @ uploads(unequal, x, t, **WALK)
    torch.testing.assert_close(s.x, x)


def test_feddisco_asks_a_client_again_whose_discrepancy_did_not_arrive(unequal: Any) -> None:
    class Losing(LocalEngine):
        def execute(self, call: Call, ids: Tensor) -> Iterator[Replies]:
            lost = ids == (2 if name_of(call.work) == "feddisco/discrepancy" else -1)
            return super().execute(call, ids[~lost])

    fed, engine = federation(unequal), federation(unequal).engine
    lossy = replace(fed, engine=Losing(engine.task, engine.train, engine.valid, engine.target))
    method, whole = feddisco(**WALK), play(feddisco(**WALK), unequal, 2)
    first = play(method, unequal, 1, fed=lossy)
    assert first.asked.tolist() == [1.0, 1.0, 0.0, 1.0]
    second = method.round(fed.begin(2, Draw.of(1).round(1)), first, Draw.of(1).round(1))
    torch.testing.assert_close(second.discrepancies, whole.discrepancies)
    assert second.asked.tolist() == [1.0] * 4


def test_feddisco_needs_classes() -> None:
    with pytest.raises(UsageError, match="feddisco needs classes; problem quadratic offers"):
        assemble(load(flags={"run.problem": "quadratic", "run.method": "feddisco"}))


def test_feddisco_takes_the_sizes_where_no_weight_is_positive() -> None:
    assert disco_weights(torch.tensor([1, 3]), torch.ones(2), 9.0, 0.1).tolist() == [0.25, 0.75]


# FedCE


@pytest.mark.parametrize("combine", ["product", "sum"])
def test_fedce_two_rounds_in_numpy(combine: Any) -> None:
    problem = a_quadratic()
    x, w, uploaded, sums = problem.start.numpy(), np.full(5, 0.2), None, np.zeros((2, 5))
    for t in range(2):
        if uploaded is not None:
            for k in range(5):
                without = torch.tensor((x - w[k] * uploaded[k]) / (1.0 - w[k]))
                sums[1, k] += float(problem.task.full_loss(without, problem.train.client(k)))
        uploaded = uploads(problem, torch.tensor(x), t, **WHOLE).numpy()
        moved = uploaded - x
        for k in range(5):
            others = sum(w[j] * moved[j] for j in range(5) if j != k)
            sums[0, k] += 1.0 - moved[k] @ others / (np.linalg.norm(moved[k]) * np.linalg.norm(others))
        c = np.maximum(sums[0] / sums[0].sum(), 1e-3)
        e = np.maximum(sums[1] / sums[1].sum(), 1e-3) if t else np.full(5, 0.2)
        w = c * e if combine == "product" else c + e
        w = w / w.sum()
        x = x + w @ moved
    s = play(fedce(**WHOLE, combine=combine), problem, 2)
    np.testing.assert_allclose(s.w, w, rtol=1e-9)
    np.testing.assert_allclose(s.x, x, rtol=1e-9)


def test_fedce_with_equal_clients_is_fedavg(unequal: Any) -> None:
    shard = (unequal.train.client(1).all().inputs, unequal.train.client(1).all().labels)
    problem = local([shard] * 3, dtype="float64")
    s = play(fedce(**WHOLE), problem, 3)
    torch.testing.assert_close(s.w, torch.full((3,), 1 / 3, dtype=torch.float64))
    torch.testing.assert_close(s.x, play(fedavg(**WHOLE), problem, 3).x)


def test_fedce_gives_weight_to_what_the_others_lack() -> None:
    moved = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    assert int(apartness(moved, torch.full((3,), 1 / 3)).argmax()) == 2
    sums = torch.tensor([[0.2, 0.2, 0.6], [1.0, 1.0, 1.0], [1.0, 0.0, 3.0], [1.0, 0.0, 1.0]])
    w = contributions(sums, "product")  # client 1 has no error yet and counts as the others do on average
    torch.testing.assert_close(w, torch.tensor([0.2, 0.4, 1.8]) / 2.4)


def test_fedce_traffic() -> None:
    problem = a_quadratic()
    fed = federation(problem)
    play(fedce(), problem, 3, fed=fed)
    total = fed.ledger.total
    assert (total.rounds, total.floats_down, total.floats_up) == (3, 3 * 5 * (4 + 1), 3 * 5 * (4 + 2))
