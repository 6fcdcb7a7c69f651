"""The nested image problems on digits: what they minimise, what they measure, and the paper's claims in small."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad

from coterie.errors import UsageError
from coterie.experiment.build import assemble, federate
from coterie.experiment.config import FederationTable, resolve
from coterie.experiment.loop import run_rounds
from coterie.federation import Batch
from coterie.methods.nested.phases import Inverse, NestedState, global_hypergradient
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.base import View
from coterie.problems.catalogue.hyper_representation import HeadLoss, hyper_representation
from coterie.problems.catalogue.loss_tuning import loss_tuning
from coterie.problems.catalogue.meta_learning import meta_learning
from coterie.problems.data.dealt import measured
from coterie.problems.data.sets import complete, known
from coterie.problems.nested import Nested

WIDE = Context(0, torch.float64)


def final(
    method: str, problem: str, rounds: int, settings: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    tables = {
        "run": {"method": method, "problem": problem, "rounds": rounds, "record": rounds, "threads": 1},
        "problem": more,
        "method": settings or {},
        "federation": {"mode": "vmap"},
    }
    return run_rounds(assemble(resolve(tables)), None).summary["final"]


def test_balanced_accuracy_is_the_mean_over_classes() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 3])
    outputs = F.one_hot(torch.tensor([0, 0, 0, 1, 1, 0]), 4).double()
    found = measured(outputs, labels)
    assert found["test_accuracy"] == pytest.approx(4 / 6)
    assert found["balanced_accuracy"] == pytest.approx((3 / 4 + 1 + 0) / 3)


def test_backbone_outside_and_head_inside() -> None:
    problem = hyper_representation(WIDE, clients=10, partition="shards", hidden=30, ridge=0.5)
    assert problem.start.numel() == 64 * 30 + 30
    assert problem.inner_start.numel() == 30 * 10 + 10
    assert problem.train.counts.tolist() == problem.valid.counts.tolist()
    x, y, batch = problem.start, problem.inner_start, problem.train.client(0).all()
    W, b = x[: 64 * 30].view(30, 64), x[64 * 30 :]
    V, c = y[:300].view(10, 30), y[300:]
    outputs = torch.relu(batch.inputs.flatten(1) @ W.T + b) @ V.T + c
    loss = F.cross_entropy(outputs, batch.labels)
    torch.testing.assert_close(problem.task.f(x, y, batch), loss)
    torch.testing.assert_close(problem.task.g(x, y, batch), loss + 0.25 * y @ y)
    assert {"test_accuracy", "balanced_accuracy", "test_loss"} <= set(problem.measure(View(x, inner=y)))


@pytest.mark.parametrize("padded", [False, True])
def test_the_head_s_derivatives_are_those_of_the_losses(padded: bool) -> None:
    problem = hyper_representation(WIDE, clients=10, hidden=12, ridge=0.5)
    task, x, y = problem.task, problem.start, problem.inner_start
    rows = problem.train.client(0).all()
    batch = Batch(rows.columns, torch.arange(len(rows.inputs)).lt(5).to(x)) if padded else rows
    v = Draw.of(1).normal(len(y), dtype=x.dtype)
    by_hand = (task.inner_gradient(x, y, batch), task.outer_gradient(x, y, batch), task.inner_hvp(x, y, v, batch))
    slope = grad(task.g, argnums=1)
    by_autograd = (slope(x, y, batch), grad(task.f, argnums=1)(x, y, batch))
    product = grad(lambda y_: slope(x, y_, batch) @ v)(y)
    torch.testing.assert_close(by_hand, (*by_autograd, product), rtol=1e-12, atol=1e-12)


def test_another_head_is_differentiated_as_ever() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    head = nn.Sequential(nn.Linear(3, 3, bias=False))
    rows = [(Draw.of(k).normal(6, 4), Draw.of(k).integers(3, 6)) for k in range(2)]
    task = Nested(HeadLoss(0.1), HeadLoss()).on(rows, x=net, y=head).task
    x, y, batch = task.x.start, task.y.start, Batch(rows[0])
    torch.testing.assert_close(task.inner_gradient(x, y, batch), grad(task.g, argnums=1)(x, y, batch))


@pytest.mark.data
@pytest.mark.skipif(complete(known("mnist")) is None, reason="MNIST is not here")
def test_the_paper_s_sizes_on_mnist() -> None:
    problem = hyper_representation(Context(), data="mnist", clients=100, partition="shards")
    assert problem.start.numel() == 157_000
    assert problem.inner_start.numel() == 2_010
    assert set(problem.train.counts.tolist()) == set(problem.valid.counts.tolist()) == {300}
    classes = [len(problem.train.client(k).columns[-1].unique()) for k in range(100)]
    assert sum(n <= 2 for n in classes) > 80


def test_the_tuned_loss_starts_untuned_and_is_balanced() -> None:
    problem = loss_tuning(WIDE, clients=4, hidden=[12])
    x, y, batch = problem.start, problem.inner_start, problem.train.client(0).all()
    outputs = problem.task.y(y)(batch.inputs)
    plain = F.cross_entropy(0.5 * outputs, batch.labels) + 0.0005 * y @ y
    torch.testing.assert_close(problem.task.g(x, y, batch), plain)
    assert float(problem.task.direct_gradient(x, y, batch).norm()) == 0.0  # x acts through y*(x) only
    assert float(problem.task.cross(x, y, torch.ones_like(y), batch).norm()) > 0.0
    (weights,) = problem.task.outer.args
    assert bool((weights.diff() > 0).all())  # the rarer, the heavier
    labels = torch.cat([stack.columns[-1] for stack in (problem.train, problem.valid)])
    assert float(weights[labels].mean()) == pytest.approx(1.0, abs=0.05)  # but for rows that could not be dealt
    with pytest.raises(UsageError, match=r"problem\.imbalance"):
        loss_tuning(WIDE, imbalance=1000.0)


def test_the_meta_gradient_is_that_of_the_composition() -> None:
    problem = meta_learning(WIDE, clients=4, hidden=5)
    task, x = problem.task, problem.start

    def adapted(x_: Tensor) -> Tensor:
        r = [task.inner.args[0](x_, problem.train.client(k).all()) for k in range(4)]
        return torch.stack(r).mean(0)

    def objective(x_: Tensor) -> Tensor:
        y = adapted(x_)
        return torch.stack([task.f(x_, y, problem.valid.client(k).all()) for k in range(4)]).mean()

    fed, _ = federate(problem, FederationTable(mode="vmap"))
    state = NestedState(x, adapted(x), "compositional")
    found = global_hypergradient(fed, state, Inverse("cg", 1, 1.0, "all"), Draw.of(0))
    torch.testing.assert_close(found, grad(objective)(x), rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_on_shards_global_hypergradients_and_corrected_walks_win() -> None:
    """Figure 2a and 2b in small: FedNest above FedNest_SGD above LFedNest."""
    common: dict[str, Any] = {"clients": 20, "partition": "shards", "hidden": 50}
    found = {name: final(name, "hyper-representation", 8, **common) for name in ("fednest", "fednest-sgd", "lfednest")}
    scores = {name: measures["test_accuracy"] for name, measures in found.items()}
    assert scores["fednest"] > 0.88
    assert scores["fednest"] > scores["fednest-sgd"] > scores["lfednest"]


@pytest.mark.slow
def test_a_tuned_loss_beats_the_untuned_one() -> None:
    """Figure 3a in small: class-balanced accuracy with and without outer steps."""
    common: dict[str, Any] = {"clients": 5, "hidden": [30]}
    tuned = final("fednest", "loss-tuning", 25, **common)
    plain = final("fednest", "loss-tuning", 25, {"outer_step": 0.0}, **common)
    assert tuned["balanced_accuracy"] > plain["balanced_accuracy"] + 0.05


def test_meta_learning_learns() -> None:
    assert final("fednest", "meta-learning", 20)["test_accuracy"] > 0.85


@pytest.mark.parametrize("make", [hyper_representation, loss_tuning])
def test_rows_for_choosing_are_neither_tested_nor_trained_on(make: Any) -> None:
    """They are cut off the test rows: what is dealt to clients stays as it is."""
    settings = {"clients": 4, "test": 100}
    plain, apart = make(Context(0), **settings), make(Context(0), **settings, selection=40)
    assert all(torch.equal(a, b) for a, b in zip(plain.train.columns, apart.train.columns, strict=True))
    before, after = (p.measure(View(p.start, inner=p.inner_start)) for p in (plain, apart))
    assert "selection_accuracy" not in before
    assert 0.0 <= after["selection_accuracy"] <= 1.0
    mixed = 0.6 * after["test_loss"] + 0.4 * after["selection_loss"]
    assert before["test_loss"] == pytest.approx(mixed, rel=1e-5)
    with pytest.raises(UsageError, match=r"problem\.selection = 100 leaves none"):
        make(Context(0), **settings, selection=100)
