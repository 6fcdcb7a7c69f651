"""Compression at nodes: what the local engine's stage gives, residuals that stay at the node, and exact resume."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Broken, network, nodes
from test_conformance import recorded
from test_every_engine import NETWORKS
from test_grouped import InGroups, in_groups
from test_own import net, rows
from test_own import nodes as own_nodes

from coterie import methods
from coterie.engines.own import at_server, run_here
from coterie.experiment.build import assemble, make_problem
from coterie.experiment.config import Config, resolve
from coterie.experiment.loop import run_rounds
from coterie.federation.api import Call
from coterie.federation.remote import InProcess, Names
from coterie.federation.remote.channel import expanded, message_form
from coterie.federation.remote.codec import decode, encode
from coterie.federation.remote.expectations import Form
from coterie.federation.remote.messages import COMPRESSORS, CompressOrder, MemoryVersions, Reply
from coterie.federation.stages.compression import Compression
from coterie.federation.tree import tree_flatten
from coterie.federation.work import Handle, Static, remote_memories
from coterie.methods.shared.works import gradient, local_sgd
from coterie.numerics import Draw
from coterie.numerics.sparse import Sparse

METHODS = {"fedavg": {"local_steps": 2}, "meritfed": {"mirror_steps": 1, "mirror_step": 1.0}}


def config_for(method: str, kind: str, *, rounds: int = 3, **federation: Any) -> Config:
    return resolve(
        {
            "run": {"problem": "friends", "method": method, "rounds": rounds, "dtype": "float64", "baselines": []},
            "problem": {"model": "logistic", "clients": 5, "friends": 2, "validation": 20, "test": 20},
            "method": {**METHODS.get(method, {}), "batch": 8},
            "federation": {"mode": "sequential", "compress": kind, "ratio": 0.2, "clip": "none", **federation},
        }
    )


def on_nodes(config: Config) -> Config:
    return config.with_run(engine="flower")


CASES = [
    ("fedavg", "top-k", True, "flower"),
    ("fedavg", "random-k", False, "nvflare"),
    ("fedavg", "sketch", True, "ray"),
    ("meritfed", "top-k", False, "ray"),
    ("meritfed", "random-k", True, "flower"),
    ("meritfed", "sketch", False, "nvflare"),
]  # the others are slow
EVERY = list(product(METHODS, COMPRESSORS, (True, False), ("flower", "nvflare", "ray")))


@pytest.mark.parametrize(
    ("method", "kind", "feedback", "engine"),
    [pytest.param(*case, marks=[] if case in CASES else pytest.mark.slow) for case in EVERY],
)
def test_nodes_compress_as_the_local_stage_does(method: str, kind: str, feedback: bool, engine: str) -> None:
    config = config_for(method, kind, feedback=feedback, **({"chunk": 2} if engine == "ray" else {}))
    local = run_rounds(assemble(config), None)
    remote = run_rounds(assemble(config.with_run(engine=engine), NETWORKS[engine](None)), None)
    assert remote.summary["outcome"] == "finished", remote.summary["message"]
    assert remote.events == local.events == []
    assert remote.ledger.by_cause == local.ledger.by_cause
    assert (local.view.model - remote.view.model).abs().max() <= 1e-12
    whole = run_rounds(assemble(config.with_federation(compress="none")), None)
    assert (local.view.model - whole.view.model).abs().max() > 1e-6  # something was lost on the way
    assert remote.ledger.wire.bytes_up < 0.6 * 3 * 5 * 8 * len(whole.view.model) + 3 * 5 * 1200


def test_what_is_not_sent_stays_at_the_nodes(tmp_path: Path) -> None:
    """The server's state and checkpoints hold versions; the numbers are in the folder of each node."""
    made: list[InProcess] = []
    config = on_nodes(config_for("fedavg", "top-k"))
    result = run_rounds(assemble(config, network(made, folder=tmp_path)), None)
    (memory,) = remote_memories(result.state)
    assert isinstance(memory.payload, Handle)
    assert memory.payload.start.numel() == 0
    local = run_rounds(assemble(config_for("fedavg", "top-k")), None)
    (name,) = local.state.stages["compression"].errors
    residuals = local.state.stages["compression"].errors[name].payload
    (run,) = {path.name for k in range(5) for path in (tmp_path / str(k)).iterdir() if path.is_dir()}
    for k in range(5):
        version = int(memory.payload.versions[k])
        (kept,) = decode((tmp_path / str(k) / run / f"{k}-{version}.memory").read_bytes(), Names())
        assert (kept[0] - residuals[k]).abs().max() <= 1e-12
        assert residuals[k].abs().max() > 1e-4


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
@pytest.mark.parametrize("kind", ["top-k", "sketch"])
def test_a_resumed_run_is_the_uninterrupted_one(kind: str, method: str, tmp_path: Path) -> None:
    """The server and all nodes are new processes after two rounds; ditto keeps memory of its own beside."""
    whole, broken, memory = (tmp_path / name for name in ("whole", "broken", "memory"))
    for folder in (whole, broken):
        folder.mkdir()
    config = on_nodes(config_for(method, kind, rounds=4, active=0.7))
    run_rounds(assemble(config, network()), whole)
    run_rounds(assemble(config.with_run(rounds=2), network(folder=memory)), broken)
    run_rounds(assemble(config, network(folder=memory)), broken, resume=True)
    assert recorded(whole) == recorded(broken)
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()


def restarting(memory: Path | None, after: int) -> Callable[[Config, Any], InProcess]:
    """A network in which node 1 is a new process after so many of its orders; the last reply before it is lost."""

    def make(config: Config, problem: Any) -> InProcess:
        count = 0

        def change(node: Any, order: bytes, reply: bytes) -> Any:
            nonlocal count
            count += node == "node1" and b'"run"' in order
            if node == "node1" and count == after:
                count += 1
                transport.here[node] = nodes(config, problem, folder=memory)[node]
                return transport.here[node].handle(order)  # which is asked again
            return reply

        transport = Broken(nodes(config, problem, folder=memory), change)
        return transport

    return make


def test_a_node_that_is_killed_adds_the_same_residuals_again(tmp_path: Path) -> None:
    config = on_nodes(config_for("fedavg", "top-k", rounds=4))
    calm, killed = (run_rounds(assemble(config, net_), None) for net_ in (network(), restarting(tmp_path, 3)))
    assert killed.events == []
    assert torch.equal(calm.view.model, killed.view.model)


def test_an_actor_of_ray_that_is_lost_gets_its_residuals_back() -> None:
    made: list[InGroups] = []
    config = config_for("fedavg", "top-k", chunk=2).with_run(engine="ray")
    whole = run_rounds(assemble(config, in_groups()), None)
    parts = assemble(config, in_groups(made))
    made[0].losses = [1, 0]
    broken = run_rounds(parts, None)
    assert made[0].losses == []
    assert broken.events == []
    assert torch.equal(whole.view.model, broken.view.model)


def test_a_node_that_lost_its_folder_begins_anew_and_is_named() -> None:
    config = on_nodes(config_for("fedavg", "top-k", rounds=4))
    calm, killed = (run_rounds(assemble(config, net_), None) for net_ in (network(), restarting(None, 3)))
    assert {(event["event"], event["client"]) for event in killed.events} == {("memory lost", 1)}
    assert killed.summary["outcome"] == "finished"
    assert not torch.equal(calm.view.model, killed.view.model)


def test_one_s_own_rows_are_compressed_too(tmp_path: Path) -> None:
    problem = at_server(net(), "cross_entropy", 3, rows(9), rows(8))
    method = methods.fedavg(local_steps=2)
    plain, thin = (
        run_here(problem, method, own_nodes(), tmp_path / kind, {"rounds": 2}, {"compress": kind, "ratio": 0.4})
        for kind in ("none", "top-k")
    )
    assert not torch.equal(plain.view.model, thin.view.model)
    assert thin.ledger.total.bytes_up < plain.ledger.total.bytes_up


def call_of(work: Any, shared: Any) -> Call:
    return Call(work, shared, None, Static(step=0.1, steps=1, batch=4), Draw.of(0))


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("work", [gradient, local_sgd])
def test_messages_have_the_expected_form_and_stand_for_what_was_understood(work: Any, kind: Any) -> None:
    start = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    call, compression, ids = call_of(work, start), Compression(kind, 0.25), torch.tensor([0, 3])
    values = start + torch.randn(2, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    done = compression.compressed(call, ids, values, {})
    form = Form.of(values[0])
    assert message_form(call, form, compression).stacked(2).fault(done.messages) is None
    assert torch.allclose(expanded(call, ids, done.messages, form, compression), done.values, rtol=0, atol=1e-14)
    moved = start if work is local_sgd else 0.0
    assert torch.allclose(done.errors[0] + done.values - moved, values - moved, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "lie",
    [
        lambda sparse: Sparse(sparse.values[:, :-1], sparse.places[:, :-1]),
        lambda sparse: Sparse(sparse.values.float(), sparse.places),
        lambda sparse: Sparse(sparse.values, sparse.places.long()),
        lambda sparse: sparse.values,
    ],
)
def test_a_message_of_another_form_is_rejected(lie: Any) -> None:
    def change(node: Any, order: bytes, reply: bytes) -> Any:
        if node != "node2" or b'"run"' not in order:
            return reply
        found = decode(reply, Names())
        return encode(Reply(found.number, found.content._replace(values=(lie(found.content.values[0]),))))

    config = on_nodes(config_for("fedavg", "top-k", rounds=1))
    problem = make_problem(config)
    result = run_rounds(assemble(config, lambda *_: Broken(nodes(config, problem), change), problem), None)
    assert [(event["event"], event["client"]) for event in result.events] == [("rejected", 2)]


@pytest.mark.parametrize(
    "order",
    [
        CompressOrder("zip", 0.5, False, None),
        CompressOrder("top-k", 0.0, False, None),
        CompressOrder("top-k", 2.0, False, None),
        CompressOrder("top-k", 1, False, None),  # type: ignore[arg-type]
        CompressOrder("top-k", 0.5, True, None),
        CompressOrder("top-k", 0.5, False, MemoryVersions((0,), (1,), None)),
        CompressOrder("top-k", 0.5, True, MemoryVersions((0, 0), (1, 2), None)),
        ("top-k", 0.5, False, None),
    ],
)
def test_a_crooked_order_is_refused(order: Any) -> None:
    from coterie.federation.remote.messages import PROTOCOL, Order, Step

    config = config_for("fedavg", "top-k")
    problem = make_problem(config)
    here = nodes(config, problem)["node0"]
    step = Step("shared/gradient", {"batch": 4}, 1, problem.start, None, False)
    asked = Order(PROTOCOL, 1, "run", "r", (0,), step, ((),), None, None, order)
    reply = decode(here.handle(encode(asked)), Names()).content
    assert reply.kind == "refused"


def test_state_of_the_stage_is_small() -> None:
    """A checkpoint of a run on a network has no residuals in it."""
    config = on_nodes(config_for("fedavg", "sketch", rounds=1))
    result = run_rounds(assemble(config, network()), None)
    leaves = tree_flatten(result.state.stages["compression"])[0]
    payloads = [leaf.payload for leaf in leaves if not isinstance(leaf, int)]
    assert [payload.versions.shape for payload in payloads] == [(5,)]
