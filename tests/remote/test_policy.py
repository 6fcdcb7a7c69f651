"""What a node lets a server do: rows stay hidden, steps, orders and time are bounded, and each refusal is named."""

import ast
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_own import net, rows

import coterie.methods
from coterie.engines.own import ClientData
from coterie.errors import UsageError
from coterie.federation import Shard, work
from coterie.federation.remote import PERMISSIVE, Names, Node, NodePolicy, Store, Trouble, node_policy
from coterie.federation.remote.codec import decode, encode
from coterie.federation.remote.disclosures import DAY, FILE, Disclosures
from coterie.federation.remote.messages import PROTOCOL, Done, Order, Step
from coterie.federation.remote.policy import BATCHES, POSITIONS, RECORDS, SIZES, STEPS, WORKS, PolicyError
from coterie.federation.work import Static
from coterie.methods.baselines.local_svrg import Anchor, SVRGSteps
from coterie.methods.registry import METHODS
from coterie.numerics import Draw

NAMES = Names().with_modules(__name__)
MODEL = torch.zeros(15)
GRADIENT, STEPPING = "shared/gradient", "shared/local-steps"
WALKING = "local-svrg/steps-alone"


@work
def never_ends(shard: Shard, shared: Any, private: Any, static: Static, draw: Draw) -> torch.Tensor:
    """Steps without end."""
    x = shared
    while True:
        x = x + 1.0


def node(policy: NodePolicy | None = None, folder: Path | None = None, n: int = 40) -> Node:
    """A client of 40 rows with its own data."""
    options: dict[str, Any] = {} if policy is None else {"policy": policy}
    data = ClientData(rows(1, n), net(), "cross_entropy")
    return data.node(0, modules=(__name__,), store=Store(folder), shares_memory=False, **options)


def asked(
    here: Node, name: str, *, number: int = 1, run: str = "r", method: str = "", round: int = 0, **static: Any
) -> Any:
    """What a node replies to the order of a work at the model 0."""
    step = Step(name, static, number, MODEL, None, False)
    order = Order(PROTOCOL, number, "run", run, (0,), step, ((),), method=method, round=round)
    return decode(here.handle(encode(order)), NAMES).content


def test_batches_of_one_row_give_no_row_back() -> None:
    """A gradient of one row of cross-entropy is that row, scaled: 300 orders gave back most rows of a client."""
    inputs = rows(1, 40)[0]

    def stolen(policy: NodePolicy | None) -> int:
        here, found = node(policy), set()
        for number in range(1, 60):
            reply = asked(here, GRADIENT, number=number, batch=1)
            if isinstance(reply, Done):
                weight, bias = reply.values[0][:12].reshape(3, 4), reply.values[0][12:]
                guess = (weight / bias[:, None])[0]
                found |= {i for i, row in enumerate(inputs) if torch.allclose(row, guess, atol=1e-4)}
            else:
                assert reply.kind == "refused"
                assert "least_batch = 8" in reply.reason
        return len(found)

    assert stolen(PERMISSIVE) > 20
    assert stolen(None) == 0


REFUSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared/gradient would take 7 rows of a client": (GRADIENT, {"batch": 7}),
    "shared/local-steps would take 1 rows of a client": (STEPPING, {"batch": 1, "steps": 1, "step": 1.0}),
    "shared/gradient would take 1 rows": (GRADIENT, {"batch": True}),
    "steps = 200000 exceeds steps = 10000": (STEPPING, {"batch": 8, "steps": 200_000, "step": 0.1}),
    "steps must be a whole number": (STEPPING, {"batch": 8, "steps": 1e9, "step": 0.1}),
    "svrg must be a named tuple": (WALKING, {"steps": 1, "svrg": (0.1, 1, 0.5, 1, 2), "first": 0}),
    "exceed size": (
        "count-sketch/sketched-steps",
        {"rows": 1 << 20, "columns": 1 << 20, "batch": 8},
    ),
    "not among the modules": ("two-layer/client-round", {"decode": "os:system", "batch": 8}),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_an_order_beyond_the_policy_is_refused_with_key_and_remedy(reason: str) -> None:
    name, static = REFUSALS[reason]
    reply = asked(node(), name, **static)
    assert isinstance(reply, Trouble)
    assert reply.kind == "refused"
    assert reason in reply.reason


def test_all_rows_are_too_few_where_the_client_has_few() -> None:
    assert isinstance(asked(node(), GRADIENT, batch="all"), Done)
    assert "a client here has 5 rows" in asked(node(n=5), GRADIENT, batch="all").reason
    assert "a client here has 5 rows" in asked(node(n=5), GRADIENT, batch=50).reason


def test_works_are_admitted_by_pattern() -> None:
    here = node(NodePolicy(works=("shared/*-steps",)))
    assert isinstance(asked(here, STEPPING, batch=8, steps=1, step=0.1), Done)
    assert "matches no pattern of works" in asked(here, GRADIENT, batch=8).reason


def test_methods_are_admitted_by_pattern_and_statistics_need_none() -> None:
    here = node(NodePolicy(methods=("meritfed", "fed*")))
    for number, method in enumerate(("meritfed", "fedavg"), 1):
        assert isinstance(asked(here, GRADIENT, number=number, method=method, batch=8), Done)
    reply = asked(here, GRADIENT, number=3, method="krum", batch=8)
    assert (reply.kind, reply.reason) == (
        "refused",
        "the method krum matches no pattern of methods; add it to methods in the node's policy",
    )
    assert "declares no method" in asked(here, GRADIENT, number=4, batch=8).reason
    assert "declares no method" not in asked(here, "sites/moments", number=5).reason


def test_rounds_are_counted_by_run_over_restarts(tmp_path: Path) -> None:
    policy = NodePolicy(rounds=2)

    def reply(number: int, round: int, run: str = "a") -> Any:
        return asked(node(policy, tmp_path), GRADIENT, number=number, run=run, round=round, batch=8)

    assert all(isinstance(reply(number, round), Done) for number, round in enumerate((0, 3, 3, 7, 7), 1))
    refused = reply(6, 8)
    assert refused.kind == "refused"
    assert "rounds = 2 rounds of this run, the largest number" in refused.reason
    assert isinstance(reply(7, 1, "b"), Done)


def test_orders_are_counted_by_run_and_runs_by_day_over_restarts(tmp_path: Path) -> None:
    policy = NodePolicy(orders=3, runs=2)

    def reply(run: str, number: int) -> Any:
        return asked(node(policy, tmp_path), GRADIENT, number=number, run=run, batch=8)  # a new process each time

    assert all(isinstance(reply("a", number), Done) for number in (1, 2, 3))
    assert "orders = 3" in reply("a", 4).reason
    assert isinstance(reply("b", 5), Done)
    assert "runs = 2" in reply("c", 6).reason
    later = Disclosures(tmp_path)
    for _ in range(3):
        later.count_order("c", 0, policy, now=time.time() + DAY)  # a day later, or a clock that jumped
    for run in ("a", "c"):  # orders of a run are never forgotten
        with pytest.raises(PolicyError, match="orders = 3"):
            later.count_order(run, 0, policy, now=time.time() + 9 * DAY)
    (tmp_path / FILE).write_text("[1")
    with pytest.raises(UsageError, match="damaged"):
        Disclosures(tmp_path)


def test_a_repeated_order_is_not_counted_again() -> None:
    here = node(NodePolicy(orders=1))
    assert all(isinstance(asked(here, GRADIENT, batch=8), Done) for _ in range(3))
    assert isinstance(asked(here, GRADIENT, number=2, batch=8), Trouble)


def test_an_order_that_takes_too_long_is_stopped_and_the_node_goes_on() -> None:
    here = node(NodePolicy(seconds=0.2))
    reply = asked(here, f"{__name__}:never_ends")
    assert (reply.kind, "seconds = 0.2" in reply.reason) == ("refused", True)
    here.policy = NodePolicy(seconds=600.0)  # on a busy machine a short order may take long, too
    assert isinstance(asked(here, GRADIENT, number=2, batch=8), Done)


def test_time_is_not_promised_where_it_cannot_be_kept() -> None:
    replies: list[Any] = []
    for policy in (NodePolicy(), NodePolicy(seconds=0.0)):
        thread = threading.Thread(target=lambda policy=policy: replies.append(asked(node(policy), GRADIENT, batch=8)))
        thread.start()
        thread.join()
    assert "main thread" in replies[0].reason
    assert isinstance(replies[1], Done)


def test_an_order_larger_than_the_policy_admits_is_refused() -> None:
    assert "exceeds message = 200" in asked(node(NodePolicy(message=200)), GRADIENT, batch=8).reason


def test_a_policy_is_read_from_a_file_and_the_operator_s_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = tmp_path / "node.toml", tmp_path / "app.toml"
    mine.write_text('works = ["coterie.*"]\nleast_batch = 20\nseconds = 5\n')
    theirs.write_text("least_batch = 1\n")
    assert NodePolicy.read(mine) == NodePolicy(works=("coterie.*",), least_batch=20, seconds=5.0)
    assert node_policy() == NodePolicy()
    assert node_policy(theirs).least_batch == 1
    monkeypatch.setenv("COTERIE_NODE_POLICY", str(mine))
    assert node_policy(theirs).least_batch == 20
    for text, reason in (
        ("least_batches = 2", "no key"),
        ("steps = true", "steps must be"),
        ("works = 3", "list"),
        ("methods = 3", "methods must be a list"),
        ("rounds = -1", "rounds must be"),
        ("x = [", "read"),
    ):
        mine.write_text(text)
        with pytest.raises(UsageError, match=reason):
            NodePolicy.read(mine)


@pytest.mark.parametrize("entry", METHODS, ids=lambda entry: entry.name)
def test_the_default_settings_of_every_method_are_admitted(entry: Any) -> None:
    settings = {key: value for key, value in entry.make().settings.items() if value is not None}
    counted = {"steps" if key == "local_steps" else key: value for key, value in settings.items()}
    NodePolicy().admit("any", {key: value for key, value in counted.items() if key in STEPS}, 20)
    for key in BATCHES & settings.keys():
        if settings[key] != "all":
            NodePolicy().admit_batch("any", settings[key], None)


# which settings bound cost or batch is declared by name: no work may read one that is not classified

HARMLESS = {
    *("step", "penalty", "level", "kept", "data", "error_feedback", "scalar", "rule", "scaled", "extra"),
    *("decode_step", "resource", "decay", "sketch", "sketch_seed", "accuracy", "inner_step", "series"),
    *("lipschitz", "labelled", "distil_step", "change"),
    *("budget", "choose", "clip", "l2", "mask", "when"),
    *("personal", "goal", "outer_step", "normalise", "sizes", "points", "inner_factors", "factors", "radius", "t"),
    *("forget", "adaptive", "fairness"),
    *("weight_step", "entries"),
}
"""Settings that neither bound cost nor say how many rows a result is from."""


def test_every_setting_that_a_work_reads_is_classified() -> None:
    kinds = (BATCHES, STEPS, SIZES, RECORDS, WORKS, POSITIONS, HARMLESS)
    known = set().union(*kinds)
    assert len(known) == sum(map(len, kinds))  # each is of one kind
    read = set()
    for path in Path(coterie.methods.__file__).parent.rglob("*.py"):
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "static":
                read.add(part.attr)
            if isinstance(part, ast.Call) and ast.unparse(part.func) == "static.work":
                read.add(ast.literal_eval(part.args[0]))
    read.remove("work")  # the method of `Static` that finds another work
    assert read == known, (read - known, known - read)
    assert {"steps", "batch"} <= set(SVRGSteps._fields)
    assert Anchor._fields  # sent as memory only
