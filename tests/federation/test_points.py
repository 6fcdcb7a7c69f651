"""Points, the rows that works touch: the papers' formulas, and the same number in every mode."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from coterie.federation import Federation, Ledger, LocalEngine, pack
from coterie.federation.ledger import Entry
from coterie.methods import Method, bilevel, fedavg, local_svrg, meritfed, pfedme
from coterie.numerics import Draw
from coterie.problems import Weighting
from coterie.problems.base import Context
from coterie.problems.catalogue.groups import groups
from coterie.problems.catalogue.quadratic import quadratic

K, ROWS, VALID = 5, 20, 20
SVRG: dict[str, Any] = {"step": 0.1, "local_steps": 3, "steps": 10, "batch": 4}


def small() -> Weighting:
    return quadratic(Context(seed=0, dtype=torch.float64), clients=K, friends=3, dimension=3, rows=ROWS)


def engine_of(problem: Weighting, **options: Any) -> LocalEngine:
    return LocalEngine(problem.task, problem.train, problem.valid, problem.target, **options)


def points(method: Method, engine: Any, problem: Weighting, rounds: int = 1) -> Entry:
    fed = Federation.on(engine)
    state = method.init(problem, fed.n)
    for t in range(rounds):
        state = method.round(replace(fed, round=t + 1), state, Draw.of(0).round(t))
    return fed.ledger.total


def refreshes(problem: Weighting, method: Method) -> int:
    """How often anchors were renewed in one round, by the passes over all rows that were made: those of Local-SVRG."""
    seen = []
    task = problem.task
    whole = type(task).full_gradient

    class Watched(type(task)):  # type: ignore[misc]
        def full_gradient(self, theta: Any, rows: Any) -> Any:
            seen.append(int(rows.count))
            return whole(self, theta, rows)

    watched = Watched(**{name: getattr(task, name) for name in task.__dataclass_fields__})
    points(method, engine_of(replace(problem, task=watched), mode="sequential"), problem)
    return len(seen) - K  # every client has its first anchor


def test_fedavg_touches_a_batch_per_step_at_each_client() -> None:
    problem = small()
    assert points(fedavg(local_steps=6, batch=7), engine_of(problem), problem, 3).points == 3 * K * 6 * 7
    assert points(fedavg(local_steps=6, batch="all"), engine_of(problem), problem).points == K * 6 * ROWS


def test_local_svrg_touches_a_batch_per_step_and_all_rows_per_anchor() -> None:
    problem = small()
    for refresh in (1e-9, 0.3, 1.0):
        method = local_svrg(**SVRG, refresh=refresh)
        anchors = {1e-9: 0, 1.0: K * 10}.get(refresh, refreshes(problem, method))
        assert points(method, engine_of(problem), problem).points == K * 10 * 4 + (K + anchors) * ROWS
    assert 0 < refreshes(problem, local_svrg(**SVRG, refresh=0.3)) < K * 10


def test_bilevel_touches_what_its_two_solves_and_the_hypergradient_need() -> None:
    problem = small()
    found = points(bilevel(**SVRG, system_step=0.1, refresh=1e-9, cap=1.0), engine_of(problem), problem)
    solve = K * 10 * 4 + K * ROWS
    assert found.points == 2 * solve + K * ROWS + int(problem.target.valid.count)  # loss and gradient by one pass


def test_meritfed_touches_a_batch_per_client_and_the_target_once_per_mirror_step() -> None:
    problem = small()
    found = points(meritfed(batch=5, mirror_steps=4, mirror="smd", mirror_batch=3), engine_of(problem), problem)
    assert found.points == K * 5 + 4 * 3


@pytest.mark.parametrize("ragged", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("make", [lambda: bilevel(**SVRG, system_step=0.1, refresh=0.3, cap=1.0), pfedme])
def test_every_mode_and_chunk_counts_the_same(make: Any, ragged: bool) -> None:
    problem = groups(Context(seed=0), data="digits", clients=5, train=30, model="logistic")
    if ragged:
        shards = [tuple(c[: 30 - 4 * k] for c in problem.train.client(k).columns) for k in range(5)]
        problem = replace(problem, train=pack(shards))
    found = {
        (mode, chunk): points(make(), engine_of(problem, mode=mode, chunk=chunk), problem).points
        for mode in ("vmap", "sequential")
        for chunk in (None, 1, 2)
    }
    assert len(set(found.values())) == 1
    assert min(found.values()) > 0


def test_a_ledger_of_an_earlier_version_is_read() -> None:
    ledger = Ledger()
    ledger.record("a/b", rounds=2, points=7)
    assert Ledger.from_dict(json.loads(json.dumps(ledger.as_dict()))).total == Entry(2, points=7)
    old = ledger.as_dict()
    for entry in (old["total"], *old["by_cause"].values()):
        del entry["points"]
    assert Ledger.from_dict(old).total == Entry(2)
