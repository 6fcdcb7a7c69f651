"""Hostile nodes against a server, and a hostile server against a node: each case once ended a run or leaked rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Broken, nodes
from test_methods import EVERY, config_of, on_nodes

from coterie.experiment.build import assemble
from coterie.experiment.config import Config
from coterie.experiment.loop import Result, run_rounds
from coterie.federation.remote import InProcess, Names
from coterie.federation.remote.codec import MAGIC, decode, encode
from coterie.federation.remote.messages import Declaration, Done, Reply, Trouble
from coterie.federation.tree import tree_map

NAMES = Names()
Spoil = Callable[[Reply], Any]
VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "another shape": lambda t: torch.zeros(*t.shape[:-1], t.shape[-1] + 3, dtype=t.dtype),
    "nothing": lambda t: None,
    "float16": lambda t: t.half(),
    "an extra dimension": lambda t: t[:, None],
    "a word": lambda t: "weights",
    "a number": lambda t: 3.0,
    "a list": lambda t: [t],
}
DECLARATIONS: dict[str, Callable[[Declaration], Declaration]] = {
    "a tensor for the columns": lambda c: c._replace(columns=torch.ones(3)),  # type: ignore[arg-type]
    "tensors in the columns": lambda c: c._replace(columns=((torch.ones(2), (64,)), *c.columns[1:])),  # type: ignore[arg-type]
    "a tensor in a shape": lambda c: c._replace(columns=(("float32", (torch.ones(2),)),)),  # type: ignore[arg-type]
    "a tensor for a flag": lambda c: c._replace(shares_memory=torch.ones(2)),  # type: ignore[arg-type]
    "a tensor for the ids": lambda c: c._replace(clients=torch.ones(2)),  # type: ignore[arg-type]
    "a tensor among the sizes": lambda c: c._replace(rows=(torch.ones(2),)),  # type: ignore[arg-type]
    "a truth value among the ids": lambda c: c._replace(clients=(True,)),
    "words": lambda c: Declaration("a", "b", "c", "d", "e"),  # type: ignore[arg-type]
    "other columns": lambda c: c._replace(columns=(("float32", (7,)), ("int64", ()))),
    "other sizes": lambda c: c._replace(rows=tuple(n + 1 for n in c.rows)),
    "a long text": lambda c: c._replace(columns=(("x" * 4000, ()),) * 300),
}


def changed_values(change: Callable[[torch.Tensor], Any]) -> Spoil:
    """A reply whose results, wherever they are, have every tensor replaced."""

    def spoil(reply: Reply) -> Any:
        return reply._replace(content=reply.content._replace(values=tree_map(change, reply.content.values)))

    return spoil


def hostile(spoil: Spoil, who: tuple[int, ...], kind: type = object) -> Callable[[Config, Any], Broken]:
    """A network in which the replies of some clients are spoilt: those with a content of that kind."""

    def change(node: Any, order: bytes, data: bytes) -> Any:
        reply = decode(data, NAMES)
        mine = int(str(node).removeprefix("node")) in who and isinstance(reply.content, kind)
        return encode(spoil(reply)) if mine else data

    return lambda config, problem: Broken(nodes(config, problem), change)


def run(method: str, network: Any, folder: Path | None = None, **settings: Any) -> Result:
    case = next(c for c in EVERY if c.method == method)
    quick = {"patience": 0.3, "timeout": 0.05, "rounds": 2}
    return run_rounds(assemble(on_nodes(config_of(case, **{**quick, **settings})), network), folder)


def named(result: Result) -> set[int]:
    return {event["client"] for event in result.events}


@pytest.mark.parametrize("what", DECLARATIONS)
def test_a_crooked_card_is_refused_with_a_reason_and_the_others_go_on(what: str) -> None:
    spoil = lambda reply: reply._replace(content=DECLARATIONS[what](reply.content))  # noqa: E731
    result = run("fedavg", hostile(spoil, (0,), Declaration))
    assert result.summary["outcome"] == "finished"
    refused = [event for event in result.events if event["event"] == "refused"]
    assert refused
    assert all("not let in" in event["reason"] and len(json.dumps(event)) < 1000 for event in refused)
    reached = {event["client"] for event in result.events if event["event"] == "lost"}
    assert reached == {0}  # the others were let in, though its declaration came first


@pytest.mark.parametrize("what", VALUES)
@pytest.mark.parametrize("method", ["fedavg", "meritfed", "krum"])
def test_a_result_of_another_form_is_rejected_and_the_honest_decide(what: str, method: str) -> None:
    who = (0, 1, 2)  # most of five
    honest = run(method, hostile(lambda reply: Reply(reply.number, Trouble("client error", "away")), who, Done))
    result = run(method, hostile(changed_values(VALUES[what]), who, Done))
    assert result.summary["outcome"] == honest.summary["outcome"] == "finished"
    assert torch.equal(result.view.model, honest.view.model)
    assert {event["event"] for event in result.events} == {"rejected"}
    assert named(result) == set(who)


def test_whoever_answers_alone_does_not_decide_the_form() -> None:
    def network(config: Config, problem: Any) -> InProcess:
        inner = hostile(changed_values(VALUES["an extra dimension"]), (3,), Done)(config, problem)
        inner.here = {"node3": inner.here["node3"]}
        return inner

    result = run("fedavg", network)
    assert result.view.model.dim() == 1
    assert {(event.get("client"), event["event"]) for event in result.events} >= {(3, "rejected"), (None, "skipped")}


@pytest.mark.parametrize("what", VALUES)
def test_a_target_s_result_of_another_form_skips_the_round(what: str) -> None:
    spoil = changed_values(lambda t: VALUES[what](t[None]))

    def network(config: Config, problem: Any) -> InProcess:
        def change(node: Any, order: bytes, data: bytes) -> Any:
            asks = b"goal-gradient" in order
            return encode(spoil(decode(data, NAMES))) if node == "node2" and asks else data

        return Broken(nodes(config, problem), change)

    result = run("meritfed", network, target=2)
    assert result.summary["outcome"] == "failed"
    assert "no round trained anything" in result.summary["message"]
    assert [event["event"] for event in result.events] == ["skipped", "skipped"]
    assert "the target, client 2" in result.events[0]["reason"]


@pytest.mark.parametrize(("hostile_clients", "outcome"), [(1, "finished"), (2, "finished"), (3, "diverged")])
def test_a_minority_that_is_not_finite_does_not_end_a_run_as_diverged(hostile_clients: int, outcome: str) -> None:
    """The other clients are away in the first round, which is skipped."""
    nan = changed_values(lambda t: torch.full_like(t, torch.nan))
    away: set[Any] = set()

    def change(node: Any, order: bytes, data: bytes) -> Any:
        reply = decode(data, NAMES)
        if not isinstance(reply.content, Done):
            return data
        if int(str(node).removeprefix("node")) < hostile_clients:
            return encode(nan(reply))
        if node in away:
            return data
        away.add(node)
        return encode(Reply(reply.number, Trouble("client error", "away")))

    result = run("fedavg", lambda config, problem: Broken(nodes(config, problem), change))
    assert result.summary["outcome"] == outcome
    assert ("skipped" in {event["event"] for event in result.events}) == (outcome == "finished")


def zeros(shape: list[int], number: int) -> bytes:
    """A reply of few bytes that asks for a large tensor of zeros."""
    done = ["n", "coterie.federation.remote.messages:Done", ["T"], ["t"]]
    tree = ["n", "coterie.federation.remote.messages:Reply", number, done]
    text = json.dumps({"tree": tree, "tensors": [["float32", shape, 0]]}).encode()
    return MAGIC + len(text).to_bytes(4, "little") + text


def test_a_reply_of_few_bytes_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros travel without bytes; what they would take is limited by what the server expects."""
    largest = 0
    original = torch.zeros

    def watched(*shape: Any, **options: Any) -> torch.Tensor:
        nonlocal largest
        made = original(*shape, **options)
        largest = max(largest, made.nbytes)
        return made

    def network(config: Config, problem: Any) -> InProcess:
        def change(node: Any, order: bytes, data: bytes) -> Any:
            bomb = node != "node4" and decode(order, NAMES).kind == "run"
            return zeros([1, 1 << 24], decode(data, NAMES).number) if bomb else data

        return Broken(nodes(config, problem), change)

    monkeypatch.setattr("coterie.federation.remote.codec.torch.zeros", watched)
    result = run("fedavg", network)
    assert result.summary["outcome"] == "finished"
    assert named(result) == {0, 1, 2, 3}
    assert largest < 1 << 20


def test_reasons_and_kinds_of_a_client_are_short_and_of_a_closed_set(tmp_path: Path) -> None:
    def loud(reply: Reply) -> Reply:
        return reply._replace(content=Trouble("\x1b[31mkind" * 100, "r" * 4000, ()))

    def long(reply: Reply) -> Reply:
        return reply._replace(content=Trouble("client error", "\x1b]0;title\x07" + "r" * 4000, ()))

    for spoil in (loud, long):
        result = run("fedavg", hostile(spoil, (1,), Done))
        for event in result.events:
            assert event["event"] in ("client error", "rejected")
            assert len(event["reason"]) <= 300
            assert event["reason"].isprintable()
