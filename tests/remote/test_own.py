"""A server that has no client's rows, and clients that bring their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import coterie
from coterie import methods
from coterie.engines.own import ClientData, at_server, run_here
from coterie.errors import UsageError
from coterie.federation.remote import InProcess, Store


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def rows(k: int, n: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(k))
    y = (x @ torch.arange(12.0).reshape(4, 3)).argmax(1)
    return x, y if k < 2 else 2 - y


def nodes(folder: Path | None = None, **settings: Any) -> InProcess:
    def one(k: int) -> Any:
        data = ClientData(rows(k, 20 + k), net(), "cross_entropy", **settings)
        return data.node(k, modules=(), store=Store(folder and folder / str(k)), shares_memory=True)

    return InProcess({k: one(k) for k in range(3)})


@pytest.mark.parametrize(
    "method",
    [methods.meritfed(step=0.5), methods.fedadp(), methods.top_k(), methods.bilevel(local_steps=2)],
    ids=lambda m: m.name,
)
def test_it_is_what_the_same_rows_give_in_one_process(method: Any, tmp_path: Path) -> None:
    problem = at_server(net(), "cross_entropy", 3, rows(9), rows(8))
    remote = run_here(problem, method, nodes(), tmp_path / "out", {"rounds": 3}, {"patience": 1.0})
    shards = [rows(k, 20 + k) for k in range(3)]
    here = coterie.Weighting.on(shards, rows(9), model=net(), loss="cross_entropy", test=rows(8))
    local = coterie.fit(here, method, rounds=3, mode="sequential")
    torch.testing.assert_close(remote.view.model, local._result.view.model, rtol=1e-5, atol=1e-6)
    assert remote.ledger.by_cause == local.ledger.by_cause
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["final"]["test_accuracy"] == local.summary["final"]["test_accuracy"]


def test_a_second_start_goes_on(tmp_path: Path) -> None:
    method = methods.top_k(k=4)
    problem = at_server(net(), "cross_entropy", 3, rows(9), None)
    whole = run_here(problem, method, nodes(), tmp_path / "whole", {"rounds": 4}, {})
    run_here(problem, method, nodes(tmp_path / "memory"), tmp_path / "out", {"rounds": 2}, {})
    again = run_here(problem, method, nodes(tmp_path / "memory"), tmp_path / "out", {"rounds": 4}, {})
    assert torch.equal(again.view.model, whole.view.model)
    assert [line["round"] for line in again.history] == [0, 1, 2, 3, 4]


def test_a_target_at_a_client_is_asked_there(tmp_path: Path) -> None:
    problem = at_server(net(), "cross_entropy", 3, rows(9), None)
    line = nodes(valid=rows(7))
    one = run_here(problem, methods.meritfed(), line, tmp_path / "one", {"rounds": 2}, {"target": 1})
    here = at_server(net(), "cross_entropy", 3, rows(7), None)
    two = run_here(here, methods.meritfed(), line, tmp_path / "two", {"rounds": 2}, {})
    torch.testing.assert_close(one.view.model, two.view.model)
    assert one.ledger.total.rounds > two.ledger.total.rounds


def test_a_server_needs_some_rows_and_a_method_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="some rows"):
        at_server(net(), "cross_entropy", 3, None, None)
    without = at_server(net(), "cross_entropy", 3, None, rows(8))
    with pytest.raises(UsageError, match="needs target"):
        run_here(without, methods.meritfed(), nodes(), tmp_path, {}, {})
    assert (
        run_here(without, methods.fedavg(), nodes(), tmp_path / "o", {"rounds": 1}, {}).summary["outcome"] == "finished"
    )
