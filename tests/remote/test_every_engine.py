"""What every engine must keep, with its own transport and its own division of clients, but no network: values, ledger,
failures, resume. The networks themselves: test_ray.py, test_nvflare.py here, and the deployed tests of Flower."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from networks import network, nodes
from test_conformance import assert_near, recorded
from test_flare_parts import transport_to
from test_grouped import in_groups
from test_methods import EVERY, opened

from coterie.cli.engines import ENGINES
from coterie.experiment.build import Network, assemble
from coterie.experiment.config import Config
from coterie.experiment.loop import run_rounds
from coterie.federation.remote import Address, Message, Transport, Trouble


def of_sites(memory: Path | None) -> Network:
    return lambda config, problem: transport_to(nodes(config, problem, folder=memory))


NETWORKS: dict[str, Callable[[Path | None], Network]] = {
    "embedded": lambda memory: network(folder=memory),
    "flower": lambda memory: network(folder=memory),
    "nvflare": of_sites,
    "ray": lambda memory: in_groups(memory=memory),
}
MODES = {"embedded": "sequential", "flower": "sequential", "nvflare": "sequential", "ray": "vmap"}
engines = pytest.mark.parametrize("engine", NETWORKS)
CASES = [("fedavg", "server"), ("ditto", "server"), ("meritfed", "server"), ("meritfed", 3), ("top-k", "server")]


def config_for(engine: str, method: str, **settings: Any) -> Config:
    case = next(c for c in EVERY if c.method == method)
    return case.config(**{"dtype": "float32", "mode": MODES[engine], "chunk": 2, "rounds": 3, **settings})


class Without(Transport):
    """A network on which one node falls silent after so many exchanges with it."""

    def __init__(self, inner: Any, gone: Address, after: int) -> None:
        self.inner, self.gone, self.after = inner, gone, after
        self.chosen = getattr(inner, "chosen", None)

    def nodes(self) -> Mapping[Address, int | None]:
        return self.inner.nodes()

    def exchange(
        self, orders: Mapping[Address, Message], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        self.after -= self.gone in orders
        if self.after >= 0 or self.gone not in orders:
            return self.inner.exchange(orders, needed, timeout)
        here = {node: data for node, data in orders.items() if node != self.gone}
        return self.inner.exchange(here, [node for node in needed if node != self.gone], timeout)


def test_no_engine_is_left_out() -> None:
    assert NETWORKS.keys() == ENGINES.keys()


@engines
@pytest.mark.parametrize(("method", "target"), CASES)
def test_values_and_ledger_are_those_of_the_local_engine(engine: str, method: str, target: Any) -> None:
    config = config_for(engine, method, target=target)
    local, parts = run_rounds(assemble(config), None), assemble(config.with_run(engine=engine), NETWORKS[engine](None))
    remote = run_rounds(parts, None)
    assert remote.events == local.events == []
    assert remote.ledger.by_cause == local.ledger.by_cause
    tolerance = 0.0 if engine == "ray" else 1e-6
    assert_near(opened(local.state, None), opened(remote.state, parts.fed.engine.recall), tolerance)


@engines
def test_whoever_is_silent_is_named_and_the_others_go_on(engine: str) -> None:
    whom: list[int] = []

    def make(config: Config, problem: Any) -> Transport:
        inner = NETWORKS[engine](None)(config, problem)
        gone = list(inner.nodes())[-1]
        whom.extend(inner.here[gone].node.clients if engine == "ray" else [4])
        return Without(inner, gone, after=2)  # it says who it is, and works in the first round

    config = config_for(engine, "ditto", timeout=0.05, retries=0).with_run(engine=engine)
    result = run_rounds(assemble(config, make), None)
    assert result.summary["outcome"] == "finished"
    assert {event["client"] for event in result.events} == set(whom)
    assert {event["round"] for event in result.events} == {2, 3}
    assert [e["event"] for e in result.events if e["client"] == whom[0]] == ["timeout", "lost"]


@engines
@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_resumed_run_is_the_uninterrupted_one(engine: str, method: str, tmp_path: Path) -> None:
    whole, broken, memory = (tmp_path / name for name in ("whole", "broken", "memory"))
    for folder in (whole, broken):
        folder.mkdir()
    config = config_for(engine, method, rounds=4, active=0.7).with_run(engine=engine)
    run_rounds(assemble(config, NETWORKS[engine](None)), whole)
    run_rounds(assemble(config.with_run(rounds=2), NETWORKS[engine](memory)), broken)
    run_rounds(assemble(config, NETWORKS[engine](memory)), broken, resume=True)
    assert [json.loads(line)["event"] for line in (broken / "events.jsonl").read_text().splitlines()] == ["resumed"]
    assert recorded(whole) == recorded(broken)
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()
