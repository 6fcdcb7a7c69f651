"""Rows that pass through a fixed backbone once: the same steps, the same count of points, and only where it pays."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie.experiment.build import federate
from coterie.experiment.config import FederationTable
from coterie.methods import Method, fednest, lfednest
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.catalogue.hyper_representation import HeadLoss, hyper_representation
from coterie.problems.nested import Nested, NestedProblem
from coterie.problems.tasks import seen

WIDE = Context(0, torch.float64)


def small() -> NestedProblem:
    return hyper_representation(WIDE, clients=4, hidden=6, classes=2, partition="shards")


def after(method: Method, problem: NestedProblem, **table: Any) -> tuple[Tensor, int]:
    """x and y after two rounds, and how many rows were touched."""
    fed = federate(problem, FederationTable(**table))[0]
    state = method.init(problem, fed.n)
    for t in range(2):
        draw = Draw.of(1).round(t)
        state = method.round(fed.begin(t + 1, draw), state, draw)
    return torch.cat([state.x, state.y]), fed.ledger.total.points


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often rows were passed through x for all batches."""
    found: list[int] = []
    plain = seen.seen_rows

    def counted(*args: Any) -> Any:
        rows = plain(*args)
        found.append(rows is not None)
        return rows

    monkeypatch.setattr("coterie.problems.nested.seen_rows", counted)
    return found


@pytest.mark.parametrize("mode", ["vmap", "sequential"])
@pytest.mark.parametrize("make", [fednest, lfednest])
def test_steps_and_points_are_those_of_the_batches(make, mode, passes, monkeypatch) -> None:
    method, problem = make(batch=32, local_steps=30, outer_steps=2), small()
    once, points = after(method, problem, mode=mode)
    assert sum(passes) > 0
    passes.clear()
    monkeypatch.setattr(seen, "LESS", 10**6)
    each, counted = after(method, problem, mode=mode)
    assert passes
    assert not any(passes)
    torch.testing.assert_close(once, each, rtol=1e-10, atol=1e-12)
    assert points == counted > 0


def test_clients_of_unequal_size(passes, monkeypatch) -> None:
    sizes = (7, 12, 9)
    shards = [
        (Draw.of(k).normal(n, 5, dtype=torch.float64), Draw.of(9 + k).integers(3, n)) for k, n in enumerate(sizes)
    ]
    torch.manual_seed(0)
    backbone, head = nn.Sequential(nn.Linear(5, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 3))
    loss = HeadLoss(0.1)
    problem = Nested(loss, loss).on(shards, shards, x=backbone.double(), y=head.double(), dtype=torch.float64)
    method = fednest(batch=8, local_steps=6)
    once, points = after(method, problem, mode="vmap")
    assert all(passes)
    monkeypatch.setattr(seen, "LESS", 10**6)
    each, counted = after(method, problem, mode="vmap")
    torch.testing.assert_close(once, each, rtol=1e-10, atol=1e-12)
    assert points == counted


def test_it_is_left_out_where_it_would_not_pay_or_not_be_the_same(passes, monkeypatch) -> None:
    problem = small()
    after(fednest(batch=8, local_steps=2), problem, mode="vmap")  # fewer rows in batches than at the client
    after(fednest(batch="all", local_steps=9), problem, mode="vmap")
    monkeypatch.setattr(seen, "wanted", lambda: True)  # portable processes keep their bits
    after(fednest(batch=32, local_steps=30), problem, mode="vmap")
    assert not any(passes)
    monkeypatch.setattr(seen, "wanted", lambda: False)
    monkeypatch.setattr(HeadLoss, "through_x", False)  # a loss that may look at inputs otherwise
    passes.clear()
    after(fednest(batch=32, local_steps=30), problem, mode="vmap")
    assert passes == []
