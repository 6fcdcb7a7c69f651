"""What stands between FLARE and a node, without FLARE: the transport, and the compute process of a site."""

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from networks import nodes
from test_engine import DRAW, NAMES, engine_of, kinds, node, total
from test_methods import EVERY, config_of

from coterie.engines.nvflare import transport as transports
from coterie.engines.nvflare.compute import Compute, Lost, opened, sealed
from coterie.engines.nvflare.transport import LOST, FlareTransport
from coterie.errors import RunError
from coterie.experiment.build import assemble, node_of
from coterie.experiment.config import Config
from coterie.experiment.loop import run_rounds
from coterie.federation import Federation
from coterie.federation.remote import Address, Node, Policy, Trouble
from coterie.federation.remote import engine as engines
from coterie.federation.remote.codec import decode, encode
from coterie.federation.remote.messages import PROTOCOL, Order


class Said:
    """The outcome of a call, as FLARE's stream gives it: a result, or a failure by its type and text."""

    def __init__(self, site: str, reply: Any = None, failure: tuple[str, str] | None = None) -> None:
        self.replies = [] if failure else [(site, reply)]
        self.failures = {site: SimpleNamespace(cause_type=failure[0], cause=failure[1])} if failure else {}

    def __len__(self) -> int:
        return len(self.replies)

    def __iter__(self) -> Any:
        return iter(self.replies)


Failing = Callable[[str, bytes], tuple[str, str] | None]


def transport_to(here: dict[Address, Node], fails: Failing = lambda site, order: None) -> FlareTransport:
    def call(site: str, order: bytes, timeout: float) -> Said:
        failure = fails(site, order)
        return Said(site, failure=failure) if failure else Said(site, here[site].handle(order))

    clients = {str(site): one.clients[0] for site, one in here.items()}
    return FlareTransport(call, clients, lambda: False)


def federation(fails: Failing, n: int = 3) -> tuple[Federation, FlareTransport]:
    transport = transport_to({f"site-{k}": node(k) for k in range(n)}, fails)
    engine = engine_of(transport, n, policy=Policy(timeout=0.1, patience=0.5))
    engine.connect()
    return Federation.on(engine, book=engine.book), transport


def only(site: str, *failure: str, times: int = 1) -> Failing:
    """One site fails so often, at orders of work."""
    left = [failure] * times

    def fails(who: str, order: bytes) -> Any:
        return left.pop() if who == site and left and decode(order, NAMES).kind == "run" else None

    return fails


@pytest.mark.parametrize("method", ["meritfed", "ditto", "bilevel"])
@pytest.mark.parametrize("target", ["server", 2])
def test_values_and_ledger_are_the_local_ones(method: str, target: Any) -> None:
    config = config_of(next(c for c in EVERY if c.method == method), target=target)

    def network(config: Config, problem: Any) -> FlareTransport:
        return transport_to(nodes(config, problem))

    local, remote = (
        run_rounds(assemble(config), None),
        run_rounds(assemble(config.with_run(engine="nvflare"), network), None),
    )
    assert remote.events == []
    assert remote.ledger.by_cause == local.ledger.by_cause
    torch.testing.assert_close(remote.view.model, local.view.model, rtol=1e-6, atol=1e-6)


def test_a_compute_process_that_was_lost_is_asked_again() -> None:
    fed, _ = federation(only("site-1", LOST, "its compute process has ended (code -9)"))
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0, 1, 2]
    assert kinds(fed) == []


def test_a_site_that_cannot_be_reached_is_named_and_gets_no_work() -> None:
    asked: list[str] = []
    gone = only("site-1", "str", "remote call returned rc='target_unreachable'", times=9)

    def fails(site: str, order: bytes) -> Any:
        asked.append(site)
        return gone(site, order)

    fed, _ = federation(fails)
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0, 2]
    assert kinds(fed) == [(1, "lost")]
    asked.clear()
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0, 2]
    assert kinds(fed)[0] == (1, "lost")
    assert asked.count("site-0") == 1
    assert asked.count("site-1") <= 1  # on the side, not for work


def test_silence_and_errors_are_told_apart() -> None:
    fed, _ = federation(only("site-2", "TimeoutError", "timed out"))
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0, 1]
    assert kinds(fed) == [(2, "timeout")]
    fed, _ = federation(only("site-2", "ValueError", "no such file"))
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0, 1]
    (event,) = fed.book.drain()
    assert (event["event"], event["reason"]) == ("client error", "ValueError: no such file")


def test_nobody_waits_for_a_site_that_is_not_in_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        assert len(looks) < 100

    monkeypatch.setattr(engines, "sleep", look)
    transport = transport_to({f"site-{k}": node(k) for k in (0, 2)})
    engine = engine_of(transport, 3, policy=Policy(timeout=0.1, patience=600.0))
    engine.connect()
    assert engine.present == [0, 2]


class Late(Said):
    """A reply that comes when FLARE was looked at so many times."""

    def __init__(self, site: str, reply: bytes, looks: float) -> None:
        super().__init__(site, reply)
        self.looks = looks

    def __len__(self) -> int:
        self.looks -= 1
        return int(self.looks < 0)


@pytest.mark.parametrize("there", [True, False])
def test_a_site_that_is_gone_is_not_waited_for_and_one_that_works_is(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "PROBE", 0.01)
    probes: list[bytes] = []

    def call(site: str, order: bytes, timeout: float) -> Said:
        if order:
            return Late(site, b"done", 60 if there else math.inf)
        probes.append(order)
        busy = None if len(probes) > 1 else ("TimeoutError", "timed out")
        return Said(site, order, failure=busy if there else ("str", "no path to the site"))

    transport = FlareTransport(call, {"site-0": 0}, lambda: False)
    (answer,) = transport.exchange({"site-0": b"work"}, ["site-0"], 60.0)
    assert len(probes) > there
    assert answer == (
        "site-0",
        b"done" if there else Trouble("lost", "the site cannot be reached (no path to the site)"),
    )


def test_an_aborted_job_ends_the_run_with_what_to_do() -> None:
    transport = transport_to({"site-0": node(0)})
    transport.aborted = lambda: True
    with pytest.raises(RunError, match="submit it again"):
        transport.exchange({}, (), 0.0)


def test_settings_travel_without_braces() -> None:
    text = sealed({"config": '[run]\nmethod = "x"', "sites": ["a"]})
    assert not set(text) & set("{}")
    assert opened(text) == {"config": '[run]\nmethod = "x"', "sites": ["a"]}


def test_the_compute_process_answers_and_one_that_is_killed_is_replaced(tmp_path: Path) -> None:
    config = config_of(next(c for c in EVERY if (c.method, c.problem) == ("ditto", "quadratic")))
    compute = Compute({"config": config.as_toml(), "client": 3, "memory": str(tmp_path), "load": "", "site": "site-4"})
    order = encode(Order(PROTOCOL, 1, "whoami", "r", (), None, ()))
    try:
        assert compute.ask(order) == node_of(config, (3,)).handle(order)
        first = compute.process
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises(Lost, match="code -9"):
            compute.ask(order)
        assert decode(compute.ask(order), NAMES).content.clients == (3,)
        assert compute.process not in (None, first)
    finally:
        compute.close()
    assert compute.process is None
