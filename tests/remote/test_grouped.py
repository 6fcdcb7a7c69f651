"""Groups of clients, as Ray's actors hold them, without Ray: the bits are those of the local engine, and a group that
was lost is refilled."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_conformance import DISTILLERS, FIRST, assert_same, recorded, sampled
from test_methods import EVERY, KEEPS, Case, opened

from coterie.engines.ray.group import Group, GroupSpec, group_spec
from coterie.engines.ray.launch import groups
from coterie.engines.ray.memory import BundleStore, MemoryBundles, as_array
from coterie.errors import UsageError
from coterie.experiment.build import Network, assemble, federate
from coterie.experiment.config import Config, load
from coterie.experiment.loop import run_rounds
from coterie.federation.remote import Address, Message, Trouble
from coterie.federation.remote.node import part_of
from coterie.federation.shards import pack

CHUNK = 2  # five clients in groups of 2, 2 + 1


class InGroups:
    """Groups in this process; `losses` are those that end, as a killed process would, at their next order."""

    def __init__(self, specs: list[GroupSpec], memory: Path | None, chosen: dict[str, Any]) -> None:
        self.specs, self.memory, self.chosen = specs, MemoryBundles(memory), chosen
        self.memory.of = {i: set(self.memory.bundles) for i in range(len(specs))}
        self.here: dict[Address, Group] = {i: self.born(i) for i in range(len(specs))}
        self.losses: list[Address] = []

    def born(self, i: Any) -> Group:
        group = Group(self.specs[i])
        group.refill({name: self.memory.bundles[name] for name in self.memory.of[i]})
        return group

    def nodes(self) -> Mapping[Address, int | None]:
        return dict.fromkeys(self.here)

    def exchange(
        self, orders: Mapping[Address, Message], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        return [(i, self.answer(i, bytes(order))) for i, order in orders.items()]

    def answer(self, i: Address, data: bytes) -> bytes | Trouble:
        reply, news, needed = self.here[i].handle(data[:11], as_array(data[11:]))
        if i in self.losses and b'"run"' in data:  # it did the work, and its answer is lost with it
            self.losses.remove(i)
            self.here[i] = self.born(i)
            return Trouble("lost", "killed")
        if news is not None:
            self.memory.add(i, *news)
        self.memory.only(i, needed)
        return bytes(reply)


def in_groups(made: list[InGroups] | None = None, memory: Path | None = None, workers: int = 2) -> Network:
    def make(config: Config, problem: Any) -> InGroups:
        _, chosen = federate(problem, config.federation)
        at = config.federation.target
        parts = [
            group_spec(problem, some, at_target=at in some, threads=1, **chosen)
            for some in groups(problem.clients, chosen["chunk"], workers)
        ]
        transport = InGroups(parts, memory, chosen)
        if made is not None:
            made.append(transport)
        return transport

    return make


def config_of(case: Case, **settings: Any) -> Config:
    dtype = "float64" if case.method in DISTILLERS else "float32"
    return case.config(**{"dtype": dtype, "mode": "vmap", "chunk": CHUNK, "rounds": 2, **settings})


def on_ray(config: Config) -> Config:
    return config.with_run(engine="ray")


def assert_bits(config: Config, network: Network) -> None:
    """The local result to the last bit, and its ledger."""
    local, parts = run_rounds(assemble(config), None), assemble(on_ray(config), network)
    remote = run_rounds(parts, None)
    assert remote.events == local.events
    assert remote.ledger.by_cause == local.ledger.by_cause
    assert_same(opened(local.state, None), opened(remote.state, parts.fed.engine.recall))
    assert parts.config.federation.chunk == CHUNK
    for one, two in zip(local.history, remote.history, strict=True):
        assert {**one, "seconds": 0} == {**two, "seconds": 0}


@pytest.mark.parametrize("case", sampled(EVERY), ids=lambda case: f"{case.method}-{case.problem}")
def test_groups_give_the_local_bits(case: Case) -> None:
    assert_bits(config_of(case), in_groups())


@pytest.mark.parametrize("method", ["meritfed", "primal-dual", "bilevel"])
def test_the_target_may_be_in_a_group(method: str) -> None:
    assert_bits(config_of(next(c for c in EVERY if c.method == method), target=3), in_groups())


keeping_first = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in FIRST else [pytest.mark.slow])  # a second problem of the same method
        for case in EVERY
        if case.method in KEEPS
    ],
    ids=lambda case: f"{case.method}-{case.problem}",
)


@keeping_first
def test_a_group_that_is_lost_is_refilled_and_no_bit_changes(case: Case) -> None:
    made: list[InGroups] = []
    config = config_of(case, rounds=3)
    whole = run_rounds(assemble(on_ray(config), in_groups()), None)
    parts = assemble(on_ray(config), in_groups(made))
    made[0].losses = [1, 0]
    broken = run_rounds(parts, None)
    asked = bool(whole.ledger.wire.exchanges)  # one method trains at the target alone, here at the server
    assert made[0].losses == ([] if asked else [1, 0])
    assert broken.ledger.wire.exchanges == whole.ledger.wire.exchanges + asked
    assert broken.events == []
    assert torch.equal(whole.view.model, broken.view.model)


@keeping_first
def test_a_resumed_run_is_refilled_with_other_groups_and_no_bit_changes(case: Case, tmp_path: Path) -> None:
    whole, broken, memory = (tmp_path / name for name in ("whole", "broken", "memory"))
    for folder in (whole, broken):
        folder.mkdir()
    config = on_ray(config_of(case, rounds=4, active=0.7, mode="sequential"))
    run_rounds(assemble(config, in_groups()), whole)
    run_rounds(assemble(config.with_run(rounds=2), in_groups(memory=memory)), broken)
    run_rounds(assemble(config, in_groups(memory=memory, workers=1)), broken, resume=True)
    events = [json.loads(line)["event"] for line in (broken / "events.jsonl").read_text().splitlines()]
    assert events == ["resumed"]
    assert recorded(whole) == recorded(broken)
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()


def test_a_bundle_holds_what_several_works_keep() -> None:
    store, other = BundleStore(), BundleStore()
    store.put("r", 0, 5, torch.ones(2))
    store.put("r", 1, 6, torch.zeros(2))
    store.put("r", 0, 7, (torch.ones(3), torch.zeros(1)))
    news = store.news()
    assert news is not None
    assert store.news() is None
    other.refill(*news, clients={0})
    assert torch.equal(other.get("r", 0, 5), torch.ones(2))
    assert torch.equal(other.get("r", 0, 7)[0], torch.ones(3))
    assert other.get("r", 1, 6) is None
    assert other.needed() == store.needed() == [news[0]]


def test_bundles_that_nobody_needs_are_dropped(tmp_path: Path) -> None:
    case = next(c for c in EVERY if (c.method, c.problem) == ("ditto", "friends"))
    run_rounds(assemble(on_ray(config_of(case, rounds=6)), in_groups(memory=tmp_path)), None)
    assert 0 < len(list(tmp_path.glob("*.memory"))) <= 2 * 3  # of two groups, the state's and two that may be needed


def test_groups_are_cut_between_chunks_and_nobody_is_alone() -> None:
    assert groups(10, 2, 2) == [range(4), range(4, 10)]
    assert groups(5, 2, 2) == [range(2), range(2, 5)]
    assert groups(5, 1, 8) == [range(2), range(2, 5)]
    assert groups(100_000, 5000, 2) == [range(50_000), range(50_000, 100_000)]
    assert groups(3, 3, 2) == [range(3)]
    for n, chunk, workers in ((7, 3, 2), (64, 5, 4), (9, 4, 3)):
        some = groups(n, chunk, workers)
        assert [k for group in some for k in group] == list(range(n))
        assert all(len(group) > 1 and group.start % chunk == 0 for group in some)


def test_a_part_pads_as_the_whole_does_and_shares_its_rows() -> None:
    whole = pack([torch.arange(float(n))[:, None] for n in (3, 5, 8, 8)])
    part = part_of(whole, (0, 1))
    assert part is not None
    assert (part.capacity, part.ragged) == (8, True)
    assert part.columns[0].data_ptr() == whole.columns[0].data_ptr()
    assert part.shared_by(torch.tensor([1])).capacity == 8
    apart = part_of(whole, (3, 0))
    assert apart is not None
    assert apart.client(1).all().inputs.flatten().tolist() == [0.0, 1.0, 2.0]


def test_an_engine_table_is_checked() -> None:
    assert load(sets={"engine.workers": 3}).engine.workers == 3
    assert "engine" not in load().as_dict()
    with pytest.raises(UsageError, match="adress"):
        load(sets={"engine.adress": "x"})
