"""Who answers, who does not, and what the server makes of it."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from networks import Broken, Change
from test_codec import corrupted

from coterie.errors import NoClients, RunError
from coterie.federation import Federation, LocalEngine, Memory, Shard, pack, work
from coterie.federation.remote import PERMISSIVE, InProcess, Limits, Names, Node, Policy, RemoteEngine, Trouble
from coterie.federation.remote.codec import decode, encode
from coterie.federation.remote.messages import PROTOCOL, Declaration, Done, Order, Reply, Step
from coterie.federation.work import Each, Static
from coterie.numerics import Draw

DRAW = Draw.of(0)
NAMES = Names().with_modules(__name__)


@work
def total(shard: Shard, shared: Any, private: Any, static: Static, draw: Draw) -> torch.Tensor:
    """The sum of a client's numbers, and what it was sent."""
    return shard.train.all().inputs.sum(0) + (0.0 if shared is None else shared)


@work
def total_of_target(shard: Shard, shared: Any, private: Any, static: Static, draw: Draw) -> torch.Tensor:
    """The sum of the target's numbers."""
    return shard.valid.all().inputs.sum(0)


@work
def count_up(shard: Shard, shared: Any, private: Any, static: Static, draw: Draw) -> Any:
    """Says how often it was asked; client 1 says NaN where static.sick."""
    sick = static.get("sick", False) and float(shard.train.all().inputs[0]) == 1.0
    return private + (torch.nan if sick else 0.0), private + 1.0


@work
def remembers_nan(shard: Shard, shared: Any, private: Any, static: Static, draw: Draw) -> Any:
    """Client 1 remembers NaN."""
    return private, private + (torch.nan if float(shard.train.all().inputs[0]) == 1.0 else 1.0)


@work
def fails(shard: Shard, shared: Any, private: Any, static: Static, draw: Draw) -> torch.Tensor:
    """Client 2 cannot."""
    if float(shard.train.all().inputs[0]) == 2.0:
        raise ValueError("out of luck\nand more")
    return torch.ones(1)


def node(k: int) -> Node:
    """Client k holds two rows of the number k."""
    train = pack([torch.full((2, 1), float(k))])
    options: dict[str, Any] = {"names": NAMES, "shares_memory": True, "policy": PERMISSIVE}
    return Node(LocalEngine(None, train, None, TARGET, mode="sequential"), (k,), **options)


TARGET = Shard(None, None, pack([torch.full((2, 1), 100.0)]).client(0))


def engine_of(transport: Any, n: int, **options: Any) -> RemoteEngine:
    """The engine of a server that knows the form of the rows above."""
    own = pack([torch.zeros(1, 1)] * n)
    return RemoteEngine(transport, None, own, names=NAMES, target=TARGET, **options)


def as_is(node: Any, order: bytes, reply: bytes) -> bytes:
    return reply


def federation(n: int = 4, change: Change = as_is, **policy: Any) -> tuple[Federation, Broken, RemoteEngine]:
    quick = Policy(**{"timeout": 0.05, "patience": 0.2, **policy})
    transport = Broken({f"node{k}": node(k) for k in range(n)}, change)
    engine = engine_of(transport, n, policy=quick)
    engine.connect()
    return Federation.on(engine, book=engine.book), transport, engine


def kinds(fed: Federation) -> list[tuple[int, str]]:
    return [(event["client"], event["event"]) for event in fed.book.drain()]


def only(who: str, what: Any) -> Callable[..., Any]:
    """Changes the replies of one node to orders of work."""

    def change(node: Any, order: bytes, reply: bytes) -> Any:
        if node != who or decode(order, NAMES).kind != "run":
            return reply
        return what(reply) if callable(what) else what

    return change


def test_sizes_are_what_nodes_declare() -> None:
    fed, _, engine = federation()
    assert fed.sizes.tolist() == [2, 2, 2, 2]
    assert engine.present == [0, 1, 2, 3]


def test_rows_come_in_the_order_of_ids_and_each_gets_its_own() -> None:
    fed, _, _ = federation()
    got = replace(fed, ids=torch.tensor([1, 3])).gather(total, Each(torch.arange(4.0)[:, None] * 10), draw=DRAW)
    assert got.ids.tolist() == [1, 3]
    assert got.rows.flatten().tolist() == [12.0, 36.0]
    assert float(fed.mean(total, weights=torch.tensor([0.0, 1.0, 0.0, 3.0]), draw=DRAW)) == pytest.approx((2 + 18) / 4)


def test_draws_are_those_of_the_client() -> None:
    engine = node(3)
    step = Step("shared/gradient", {}, int(DRAW.key), None, None, False)
    assert engine.clients == (3,)
    from coterie.federation.remote.node import Numbered

    numbered = Numbered(DRAW.key, torch.tensor([5, 3]))
    assert torch.equal(numbered.client(torch.tensor([1, 0])).key, DRAW.client(torch.tensor([3, 5])).key)
    assert step.draw == int(DRAW.key)


def test_an_error_at_a_client_is_named_and_the_others_go_on() -> None:
    fed, _, _ = federation()
    assert fed.gather(fails, draw=DRAW).ids.tolist() == [0, 1, 3]
    (event,) = fed.book.drain()
    assert (event["client"], event["event"], event["reason"]) == (2, "client error", "ValueError: out of luck")
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0, 1, 2, 3]  # it may try again


def test_who_is_silent_is_left_out_until_it_says_who_it_is() -> None:
    fed, transport, engine = federation(change=only("node1", None))
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0, 2, 3]
    assert kinds(fed) == [(1, "timeout")]
    assert engine.present == [0, 2, 3]
    transport.change = as_is
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0, 2, 3]  # asked on the side, not waited for
    assert kinds(fed) == [(1, "lost"), (1, "rejoined")]
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0, 1, 2, 3]
    assert kinds(fed) == []


def test_a_lost_client_is_asked_again_at_once_if_its_node_is_there() -> None:
    times = []

    def first_lost(node: Any, order: bytes, reply: bytes) -> Any:
        if node == "node1" and decode(order, NAMES).kind == "run":
            times.append(1)
            return Trouble("lost", "the process was killed") if len(times) == 1 else reply
        return reply

    fed, _, _ = federation(change=first_lost, timeout=5.0)
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0, 1, 2, 3]
    assert len(times) == 2
    assert kinds(fed) == []


def test_a_node_goes_and_comes_back_under_another_address() -> None:
    fed, transport, _ = federation()
    old = transport.here.pop("node2")
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0, 1, 3]
    assert kinds(fed) == [(2, "lost")]
    transport.here["elsewhere"] = old
    fed.gather(total, draw=DRAW)
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0, 1, 2, 3]
    assert (2, "rejoined") in kinds(fed)


def test_all_gone_ends_the_run_and_fewer_than_the_quorum_skips_the_round() -> None:
    fed, transport, _ = federation(quorum=3)
    for k in (0, 1):
        del transport.here[f"node{k}"]
    with pytest.raises(NoClients, match="quorum"):
        fed.gather(total, draw=DRAW)
    assert kinds(fed) == [(0, "lost"), (1, "lost")]
    transport.here.clear()
    for _ in range(2):
        with pytest.raises(RunError, match="all 4 clients are gone") as caught:
            fed.gather(total, draw=DRAW)
        assert not isinstance(caught.value, NoClients)


def test_too_few_at_the_start_is_an_error_with_the_remedy() -> None:
    engine = engine_of(InProcess({"a": node(0)}), 3, policy=Policy(patience=0.1, quorum=2))
    with pytest.raises(RunError, match=r"1 of 3 clients.*federation\.patience"):
        engine.connect()


def test_a_node_of_another_version_is_reported_with_its_reason() -> None:
    def old(node: Any, order: bytes, reply: bytes) -> bytes:
        return encode(Reply(0, Trouble("refused", "the server speaks protocol 2, this node 1")))

    with pytest.raises(RunError, match=r"0 of 2 clients.*a node was not let in: it says: the server speaks protocol 2"):
        federation(2, change=old)


def test_a_second_claim_to_a_client_and_other_lies_are_refused_and_named() -> None:
    fed, transport, engine = federation(3)
    transport.here["impostor"] = node(1)
    transport.here["stranger"] = node(9)
    wide = Node(LocalEngine(None, pack([torch.ones(2, 7)]), None, None), (2,), names=NAMES)
    transport.here["wide"] = wide
    fed.gather(total, draw=DRAW)
    fed.gather(total, draw=DRAW)
    events = {event["client"]: event["reason"] for event in fed.book.drain()}
    assert "is there already" in events[1]
    assert "there are 0 … 2" in events[9]
    assert "columns" in events[2]
    assert engine.roster.of[1].node == "node1"


def test_a_key_that_belongs_to_another_client_counts_more_than_the_claim() -> None:
    class Certain(InProcess):
        def nodes(self) -> dict[Any, int | None]:
            return {"a": 0, "b": 0, "c": 2}

    transport = Certain({"a": node(0), "b": node(1), "c": node(2)})
    engine = engine_of(transport, 3, policy=Policy(patience=0.1))
    engine.connect()
    assert engine.present == [0, 2]
    assert "its key belongs to client 0" in engine.roster.notes[0].reason


def test_memory_a_rejected_client_keeps_what_it_had() -> None:
    fed, _, engine = federation(3)
    memory = Memory.start(torch.zeros(1), 3)
    for sick in (False, True, False):
        gathered, memory = fed.gather(count_up, memory=memory, draw=DRAW, sick=sick)
    assert gathered.rows.flatten().tolist() == [2.0, 1.0, 2.0]
    assert engine.recall(memory.payload).flatten().tolist() == [3.0, 2.0, 3.0]
    assert kinds(fed) == [(1, "rejected")]


def test_memory_that_is_not_finite_is_not_kept() -> None:
    fed, _, engine = federation(3)
    gathered, memory = fed.gather(remembers_nan, memory=Memory.start(torch.zeros(1), 3), draw=DRAW)
    assert gathered.ids.tolist() == [0, 2]
    assert kinds(fed) == [(1, "rejected")]
    assert engine.recall(memory.payload).flatten().tolist() == [1.0, 0.0, 1.0]


def test_old_memory_stays_as_it_was_while_somebody_holds_it() -> None:
    fed, transport, engine = federation(2)
    first = fed.gather(count_up, memory=Memory.start(torch.zeros(1), 2), draw=DRAW)[1]
    later = first
    for _ in range(3):
        later = fed.gather(count_up, memory=later, draw=DRAW)[1]
    again = fed.gather(count_up, memory=first, draw=DRAW)[0]
    assert again.rows.flatten().tolist() == [1.0, 1.0]
    kept = {len(n.store._kept["run"]) for n in transport.here.values()}
    assert max(kept) <= 4
    assert engine.recall(later.payload).flatten().tolist() == [4.0, 4.0]


def test_asking_the_target_costs_it_no_memory() -> None:
    fed, _, engine = federation(3)
    engine.target_at = 1
    memory = fed.gather(count_up, memory=Memory.start(torch.zeros(1), 3), draw=DRAW)[1]
    assert replace(fed, target=1).ask_target(total_of_target, draw=DRAW).item() == 200.0
    assert fed.gather(count_up, memory=memory, draw=DRAW)[0].rows.flatten().tolist() == [1.0, 1.0, 1.0]
    assert kinds(fed) == []


def test_memory_that_is_shown_in_another_form_is_not_taken() -> None:
    fed, transport, engine = federation(2)
    memory = fed.gather(count_up, memory=Memory.start(torch.zeros(1), 2), draw=DRAW)[1]
    for lie in (torch.ones(1, 7), "nothing", torch.ones(3, 1), [torch.ones(1, 1)], torch.tensor(1.0)):
        transport.change = lambda node, order, reply, lie=lie: (
            encode(decode(reply, NAMES)._replace(content=lie)) if node == "node1" else reply
        )
        assert engine.recall(memory.payload).flatten().tolist() == [1.0, 0.0]
    transport.change = as_is
    assert engine.recall(memory.payload).flatten().tolist() == [1.0, 1.0]


def test_a_repeated_order_is_done_once() -> None:
    one = node(0)
    step = Step(f"{__name__}:total", {}, 0, None, None, False)
    data = encode(Order(PROTOCOL, 5, "run", "r", (0,), step, ((),)))
    reply = one.handle(data)
    one.engine = None  # type: ignore[assignment]
    assert one.handle(data) == reply
    assert decode(reply, NAMES).number == 5


def test_orders_that_a_node_does_not_carry_out() -> None:
    one = node(0)

    def told(**changes: Any) -> Trouble:
        step = Step(f"{__name__}:total", {}, 0, None, None, False)._replace(**changes.pop("step", {}))
        order = Order(PROTOCOL, 5, "run", "r", (0,), step, ((),))._replace(**changes)
        reply = decode(one.handle(encode(order)), NAMES)
        assert isinstance(reply.content, Trouble), reply
        return reply.content

    assert "no work" in told(step={"work": f"{__name__}:node"}).reason
    assert "not among" in told(step={"work": "os:system"}).reason
    assert "client 1" in told(clients=(1,)).reason
    assert "the same version of coterie" in told(protocol=1).reason
    assert "letters" in told(run="../../etc").reason
    assert "nothing" in told(kind="erase").reason
    assert "1 clients" in told(step={"shared": Each(torch.ones(2, 1))}).reason
    assert told(step={"static": {"a": torch.ones(1)}}).kind == "client error"
    assert "every client" in told(alive=()).reason
    assert decode(one.handle(b"nonsense"), NAMES).content.kind == "refused"
    one.limits = Limits(bytes=100)
    assert "limit" in told(step={"shared": torch.ones(1000)}).reason


LIES: dict[str, Callable[[Reply], Any]] = {
    "another number": lambda r: r._replace(number=r.number + 1),
    "another form": lambda r: r._replace(content=Done(torch.ones(1, 9), ())),
    "another type": lambda r: r._replace(content=Done(torch.ones(1, 1, dtype=torch.float64), ())),
    "too many rows": lambda r: r._replace(content=Done(torch.ones(2, 1), ())),
    "a tuple": lambda r: r._replace(content=Done((torch.ones(1, 1),), ())),
    "a word": lambda r: r._replace(content=Done("yes", ())),
    "a flag of memory": lambda r: r._replace(content=Done(torch.ones(1, 1), (True,))),
    "nothing": lambda r: r._replace(content=()),
    "more": lambda r: r._replace(content=(r.content, r.content)),
    "a declaration": lambda r: r._replace(content=Declaration((0,), (5,), (), False, False)),
    "an order": lambda r: Order(PROTOCOL, 1, "run", "r", (), None, ()),
    "nan": lambda r: r._replace(content=Done(torch.full((1, 1), torch.nan), ())),
    "crooked trouble": lambda r: r._replace(content=Trouble("lost", 5, ("x",))),  # type: ignore[arg-type]
    "forgotten": lambda r: r._replace(content=Trouble("forgotten", "all", (0, 1, 2, 3))),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_client_that_lies_is_named_and_the_others_go_on(lie: str) -> None:
    fed, _, _ = federation(change=only("node2", lambda reply: encode(LIES[lie](decode(reply, NAMES)))))
    for _ in range(3):
        gathered = fed.gather(total, draw=DRAW)
        assert {0, 1, 3} == set(gathered.ids.tolist()) - {2} == set(gathered.ids.tolist())
    assert {client for client, _ in kinds(fed)} == {2}


def test_an_oversized_reply_is_refused_before_it_is_unpacked() -> None:
    fed, _, engine = federation(change=only("node2", lambda reply: reply + bytes(5000)))
    engine.exchange.largest = 4096
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0, 1, 3]
    assert "limit" in fed.book.drain()[0]["reason"]


def test_a_liar_decides_no_form_whoever_else_answers() -> None:
    lie = only("node1", lambda reply: encode(LIES["another form"](decode(reply, NAMES))))
    fed, transport, _ = federation(2, change=lie)
    assert fed.gather(total, draw=DRAW).ids.tolist() == [0]
    del transport.here["node0"]
    with pytest.raises(NoClients):
        fed.gather(total, draw=DRAW)
    assert sorted(kinds(fed)) == [(0, "lost"), (1, "rejected"), (1, "rejected")]


def test_hundreds_of_corrupted_replies_leave_the_server_up_and_the_honest_alone() -> None:
    dice = random.Random(1)
    fed, _, _ = federation(3, change=only("node1", lambda reply: corrupted(reply, dice)), timeout=1e-6)
    named = 0
    for i in range(300):
        gathered = fed.gather(total, draw=DRAW.round(i))
        assert {0, 2} <= set(gathered.ids.tolist())
        events = kinds(fed)
        assert {client for client, _ in events} <= {1}
        named += bool(events)
    assert named > 100
