"""Every method that a real federation can run gives on nodes what it gives locally: values, ledger, memory, resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Broken, network, nodes
from test_conformance import CASES, DISTILLERS, FIRST, Case, assert_near, recorded, sampled

from coterie.errors import UsageError
from coterie.experiment.build import ONLY_SIMULATED, assemble, run_name
from coterie.experiment.config import Config
from coterie.experiment.loop import run_rounds
from coterie.federation.remote import InProcess, Trouble
from coterie.federation.tree import named_leaves
from coterie.federation.work import Handle, Memory, rows_for_records
from coterie.methods.registry import method_entry

KEEPS = ("ditto", "pfedme", "local-train", "top-k", "count-sketch", "fedsep-redraw", "ds-fl")


def deployable(case: Case) -> bool:
    return not method_entry(case.method).make().needs & ONLY_SIMULATED


EVERY = [case for case in CASES if deployable(case) and (case in FIRST or case.method in KEEPS)]
every = pytest.mark.parametrize("case", sampled(EVERY), ids=lambda case: f"{case.method}-{case.problem}")
keeping = pytest.mark.parametrize(
    "case", [case for case in EVERY if case.method in KEEPS], ids=lambda case: f"{case.method}-{case.problem}"
)


def opened(state: Any, recall: Any) -> Any:
    """The state with the rows of its memory."""
    values: dict[str, Any] = {}
    for name, leaf in named_leaves(state):
        if isinstance(leaf, Memory):
            inside = leaf.payload
            values |= {
                f"{name}@{n}": t for n, t in named_leaves(recall(inside) if isinstance(inside, Handle) else inside)
            }
        else:
            values[name] = leaf
    return values


def config_of(case: Case, **settings: Any) -> Config:
    dtype = "float64" if case.method in DISTILLERS else "float32"
    return case.config(**{"dtype": dtype, "mode": "sequential", **settings})


def on_nodes(config: Config) -> Config:
    return config.with_run(engine="flower")


@every
def test_nodes_give_the_local_result(case: Case) -> None:
    config = config_of(case, active=0.8, rounds=2)
    local = run_rounds(assemble(config), None)
    parts = assemble(on_nodes(config), network())
    remote = run_rounds(parts, None)
    assert remote.events == local.events
    ledger, ideal = remote.ledger.as_dict(), local.ledger.total
    wire = ledger.pop("wire", None)
    assert ledger == local.ledger.as_dict()
    assert remote.summary.get("wire") == wire
    if ideal.rounds:
        assert wire["bytes_up"] > ideal.bytes_up
        assert wire["exchanges"] >= remote.summary["rounds"]
    assert_near(opened(local.state, None), opened(remote.state, parts.fed.engine.recall), 1e-6)
    for one, two in zip(local.history, remote.history, strict=True):
        assert one.keys() == two.keys()
        assert one["communication"] == two["communication"]


@pytest.mark.parametrize("method", ["meritfed", "bilevel", "fednest-weights", "top-k"])
def test_nodes_agree_with_the_vectorised_engine(method: str) -> None:
    """For some; that the two local modes agree for all is shown elsewhere."""
    config = config_of(next(c for c in EVERY if c.method == method), mode="vmap")
    local, remote = run_rounds(assemble(config), None), run_rounds(assemble(on_nodes(config), network()), None)
    torch.testing.assert_close(remote.view.model, local.view.model, rtol=1e-5, atol=1e-5)
    if local.view.weights is not None:
        torch.testing.assert_close(remote.view.weights, local.view.weights, rtol=1e-5, atol=1e-5)


@keeping
def test_server_and_nodes_are_restarted_and_go_on_bit_by_bit(case: Case, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    config = on_nodes(config_of(case, rounds=4, active=0.7))
    run_rounds(assemble(config, network()), whole)
    run_rounds(assemble(config.with_run(rounds=2), network(folder=tmp_path / "memory")), broken)
    result = run_rounds(assemble(config, network(folder=tmp_path / "memory")), broken, resume=True)
    assert [e["event"] for e in result.events] == []
    events = [json.loads(line)["event"] for line in (broken / "events.jsonl").read_text().splitlines()]
    assert events == ["resumed"]
    assert recorded(whole) == recorded(broken)
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()
    one, two = (json.loads((f / "ledger.json").read_text()) for f in (whole, broken))
    assert one["by_cause"] == two["by_cause"]


@keeping
def test_nodes_that_lost_their_memory_begin_anew_and_are_named(case: Case, tmp_path: Path) -> None:
    config = on_nodes(config_of(case, rounds=2))
    run_rounds(assemble(config.with_run(rounds=1), network()), tmp_path)
    result = run_rounds(assemble(config, network()), tmp_path, resume=True)
    assert result.summary["outcome"] == "finished"
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    lost = [event for event in events if event["event"] == "memory lost"]
    versions = [leaf.payload.versions for _, leaf in named_leaves(result.state) if isinstance(leaf, Memory)]
    if versions:
        assert sorted(event["client"] for event in lost) == list(range(5))
        assert {event["round"] for event in lost} == {2}
    else:
        assert lost == []  # it keeps none with these settings


@keeping
def test_nodes_forget_what_nobody_needs_any_more(case: Case, tmp_path: Path) -> None:
    made: list[InProcess] = []
    run_rounds(assemble(on_nodes(config_of(case, rounds=4)), network(made, folder=tmp_path)), None)
    for node in made[0].here.values():
        kept = sum(len(versions) for versions in node.store._kept.values())
        assert kept <= 3
        assert len(list(tmp_path.glob(f"{node.clients[0]}/*/*.memory"))) == kept


def test_clients_may_share_nodes() -> None:
    """A node may hold several clients, in any mixture."""
    from coterie.federation.remote import node_for

    case = next(c for c in EVERY if (c.method, c.problem) == ("ditto", "friends"))

    def grouped(config: Config, problem: Any) -> InProcess:
        groups = {"a": (1, 4), "b": (0, 2), "c": (3,)}
        return InProcess({name: node_for(problem, ks, shares_memory=True) for name, ks in groups.items()})

    config = config_of(case, active=0.7, rounds=4)
    local, remote = run_rounds(assemble(config), None), run_rounds(assemble(on_nodes(config), grouped), None)
    assert remote.events == []
    torch.testing.assert_close(remote.view.model, local.view.model, rtol=1e-6, atol=1e-6)
    assert remote.ledger.by_cause == local.ledger.by_cause


@pytest.mark.parametrize("method", ["meritfed", "primal-dual", "bilevel"])
def test_the_target_may_be_a_client(method: str) -> None:
    case = next(c for c in EVERY if c.method == method)
    config = config_of(case, target=2)
    local, remote = run_rounds(assemble(config), None), run_rounds(assemble(on_nodes(config), network()), None)
    assert remote.ledger.by_cause == local.ledger.by_cause
    torch.testing.assert_close(remote.view.model, local.view.model, rtol=1e-6, atol=1e-6)


def test_what_only_a_simulation_can_do_is_refused() -> None:
    for settings, word in (
        ({"run.method": "sgd-ideal"}, "friends"),
        ({"problem.attack": "sign-flip"}, "attack"),
    ):
        from coterie.experiment.config import load

        flags = {"run.problem": "friends", "run.engine": "flower", "problem.model": "logistic"}
        with pytest.raises(UsageError, match=word):
            assemble(load(sets=settings, flags=flags), network())


def test_a_network_engine_without_its_network_says_how_to_start_it() -> None:
    case = EVERY[0]
    with pytest.raises(UsageError, match="coterie run --engine flower"):
        assemble(on_nodes(config_of(case)))


def test_models_that_clients_keep_are_shown_only_by_nodes_that_are_willing() -> None:
    case = next(c for c in EVERY if (c.method, c.problem) == ("ditto", "friends"))

    def secretive(config: Config, problem: Any) -> InProcess:
        here = nodes(config, problem)
        for node in here.values():
            node.shares_memory = False
        return InProcess(here)

    with pytest.raises(UsageError, match="shares_memory"):
        assemble(on_nodes(config_of(case)), secretive)
    assert rows_for_records(Memory.start(torch.ones(2), 3)).shape == (3, 2)


def test_a_resumed_run_is_known_to_nodes_by_the_same_name() -> None:
    """Though threads, mode and chunk were settled, and more rounds are wanted."""
    config = on_nodes(config_of(EVERY[0], mode="auto")).with_run(threads="auto")
    parts = assemble(config, network())
    assert parts.config != config
    assert run_name(parts.config.with_run(rounds=99)) == run_name(config) == parts.fed.engine.run
    assert run_name(config.with_run(seed=5)) != run_name(config)


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_a_run_that_all_clients_left_goes_on_as_if_they_had_not(how: str, tmp_path: Path) -> None:
    """In the third round; the outcome says so, and a resumed run is bit by bit the uninterrupted one."""
    case = next(c for c in EVERY if (c.method, c.problem) == ("ditto", "friends"))
    config = on_nodes(config_of(case, rounds=4)).with_federation(timeout=0.2, patience=0.3)
    whole = run_rounds(assemble(config, network()), None)
    orders = 0

    def leaving(config: Config, problem: Any) -> InProcess:
        def change(node: Any, order: bytes, reply: bytes) -> Any:
            nonlocal orders
            orders += b'"run"' in order
            if orders > 10:
                return None if how == "silent" else Trouble("lost", "it is gone")
            return reply

        return Broken(nodes(config, problem, folder=tmp_path / "memory"), change)

    result = run_rounds(assemble(config, leaving), tmp_path)
    assert result.summary["outcome"] == "failed"
    assert "all 5 clients are gone" in result.summary["message"]
    assert result.summary["rounds"] == 2
    assert {json.loads(line)["client"] for line in (tmp_path / "events.jsonl").read_text().splitlines()} == set(
        range(5)
    )
    again = run_rounds(assemble(config, network(folder=tmp_path / "memory")), tmp_path, resume=True)
    assert again.summary["outcome"] == "finished"
    assert torch.equal(again.view.model, whole.view.model)
