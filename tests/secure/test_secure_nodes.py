"""Secure sums among nodes: what the local engine gives, nodes that leave at every step, attacks that must fail."""

from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Broken, network, nodes
from test_secure_methods import HIDDEN, assert_near, config_of, quick

from coterie.errors import UsageError
from coterie.experiment.build import assemble, build_problem_and_method
from coterie.experiment.loop import run_rounds
from coterie.federation import RESULT, Federation, Shard, pack, work
from coterie.federation.api import Book
from coterie.federation.remote import (
    PERMISSIVE,
    InProcess,
    Names,
    Node,
    NodePolicy,
    RemoteEngine,
    Store,
    Trouble,
    node_for,
)
from coterie.federation.remote.codec import decode, encode
from coterie.federation.remote.disclosures import FILE, Disclosures
from coterie.federation.remote.messages import PROTOCOL, Order, SecureOrder, Step
from coterie.federation.secure import Secure
from coterie.federation.secure.party import Party
from coterie.methods.registry import method_entry
from coterie.numerics import Draw

pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
NAMES = Names().with_modules(__name__)
ONLY = {"ditto", "pfedme", "local-train"}  # target rows of another kind on nodes; covered in tests/remote


@work("secure-tests/double", update=RESULT)
def double(shard: Shard, shared: Any, private: Any, static: Any, draw: Any) -> Any:
    return 2.0 * shard.train.all().columns[0][0] + shared


@pytest.mark.parametrize("method", quick([name for name in HIDDEN if name not in ONLY], slow=("fednest",)))
def test_nodes_give_the_local_result(method: str) -> None:
    if method_entry(method).make().needs & {"friends", "groups"}:
        pytest.skip("it knows more than a network can")
    config = config_of(method, secure=True)
    local = run_rounds(assemble(config), None)
    parts = assemble(config.with_run(engine="flower"), network())
    remote = run_rounds(parts, None)
    assert remote.summary["outcome"] == "finished", remote.summary["message"]
    assert remote.events == local.events
    ledger = remote.ledger.as_dict()
    wire = ledger.pop("wire")
    assert ledger == local.ledger.as_dict()  # the messages of the protocol, too
    assert wire["bytes_up"] > local.ledger.total.bytes_up
    assert_near(local.state, remote.state)


class Rows:
    """A problem of rows alone: client k holds one row of the numbers k."""

    task = None
    valid = None

    def __init__(self, clients: int = 6, width: int = 5) -> None:
        self.train = pack([torch.full((1, width), float(k), dtype=torch.float64) for k in range(clients)])


def hosts(problem: Rows, *, only: int | None = None, **options: Any) -> dict[Any, Node]:
    options = {"policy": PERMISSIVE, "names": NAMES, **options}
    who = range(len(problem.train)) if only is None else [only]
    return {k: node_for(problem, (k,), **options) for k in who}


def federated(transport: Any, problem: Rows, **secure: Any) -> Federation:
    book = Book()
    engine = RemoteEngine(transport, None, problem.train, own_sizes=True, names=NAMES, book=book)
    engine.connect()
    return Federation.on(engine, book=book, secure=Secure(**secure))


def asked(fed: Federation, **options: Any) -> Any:
    return fed.mean(double, torch.zeros(5, dtype=torch.float64), draw=Draw.of(0), **options)


def test_several_clients_at_one_node() -> None:
    problem = Rows()
    options: dict[str, Any] = {"policy": PERMISSIVE, "names": NAMES}
    here = {"a": node_for(problem, (0, 1, 2), **options), "b": node_for(problem, (3, 4, 5), **options)}
    assert asked(federated(InProcess(here), problem)).tolist() == [5.0] * 5


@pytest.mark.parametrize("kind", ["secure-keys", "secure-shares", "secure-masked", "secure-reveal"])
def test_nodes_leave_at_every_step(kind: str) -> None:
    problem = Rows()

    def lose(node: Any, order: bytes, reply: bytes) -> Any:
        return Trouble("lost", "the node is gone") if node in (1, 4) and f'"{kind}"'.encode() in order else reply

    fed = federated(Broken(hosts(problem), lose), problem)
    stayed = [0, 2, 3, 5] if kind != "secure-reveal" else list(range(6))
    assert asked(fed).tolist() == pytest.approx([2.0 * sum(stayed) / len(stayed)] * 5)
    assert {event["client"] for event in fed.book.events} == {1, 4}
    (row,) = [row for row in fed.ledger.seen.rows("server") if row.what == "sums"]
    assert row.seen == (5, len(stayed))


def content(node: Node, order: Order) -> Any:
    return decode(node.handle(encode(order)), NAMES).content


def step(static: dict[str, Any] | None = None, draw: int = 3) -> Step:
    return Step("secure-tests/double", static or {}, draw, torch.zeros(5, dtype=torch.float64), None, False)


class Server:
    """A server that does what it likes."""

    def __init__(self, nodes: dict[Any, Node]) -> None:
        self.nodes, self.number = nodes, 0
        self.boxes: dict[int, Any] = {}

    def tell(self, k: int, kind: str, secure: SecureOrder | None, what: Step | None = None) -> Any:
        self.number += 1
        return content(self.nodes[k], Order(PROTOCOL, self.number, kind, "r", (k,), what, ((),), secure))

    def masked(
        self,
        phase: int,
        clients: tuple[int, ...],
        scales: list[float] | None = None,
        *,
        size: float = 1e6,
        draw: int = 3,
    ) -> dict[int, Any]:
        """Up to the uploads of one sum, by client."""
        coefficients = torch.tensor(scales or [1.0] * len(clients), dtype=torch.float64)
        base = SecureOrder(phase, clients, None, size, 0)
        keys = torch.cat([self.tell(k, "secure-keys", base) for k in clients])
        needed = len(clients) // 2 + 1
        boxes = [
            self.tell(k, "secure-shares", base._replace(others=clients, keys=keys, needed=needed)) for k in clients
        ]
        if any(isinstance(box, Trouble) for box in boxes):
            return dict(zip(clients, boxes, strict=True))
        self.boxes = dict(zip(clients, boxes, strict=True))
        answers = {}
        for i, k in enumerate(clients):
            mine = torch.stack([box[0, i] for box in boxes])[None]
            about = base._replace(others=clients, boxes=mine, scales=coefficients)
            answers[k] = self.tell(k, "secure-masked", about, step(draw=draw))
        return answers

    def reveal(self, phase: int, clients: tuple[int, ...], survivors: tuple[int, ...]) -> dict[int, Any]:
        about = SecureOrder(phase, clients, None, 1e6, 0, survivors)
        return {k: self.tell(k, "secure-reveal", about) for k in survivors}


def refused(found: dict[int, Any], said: str) -> bool:
    return all(isinstance(one, Trouble) and one.kind == "refused" and said in one.reason for one in found.values())


def test_the_same_question_with_other_partners_is_refused() -> None:
    server = Server(hosts(Rows(4)))
    assert not refused(server.masked(1, (0, 1, 2)), "")
    assert not refused(server.reveal(1, (0, 1, 2), (0, 1, 2)), "")
    assert refused(server.masked(2, (0, 1)), "2 sums of the same updates would show 100% of the update of client 2")
    assert not refused(server.masked(3, (0, 1, 2)), "")  # the same sum again tells nothing new
    found = server.reveal(3, (0, 1, 2), (0, 1))  # but not over fewer
    assert refused(found, "of the update of client 2")


def test_a_restarted_node_remembers_which_sums_were_shown(tmp_path: Path) -> None:
    def server() -> Server:
        return Server(
            {k: next(iter(hosts(Rows(4), store=Store(tmp_path / str(k)), only=k).values())) for k in range(4)}
        )

    first = server()
    first.masked(1, (0, 1, 2))
    assert not refused(first.reveal(1, (0, 1, 2), (0, 1, 2)), "")
    again = server()  # new processes
    assert refused(again.masked(2, (0, 1)), "2 sums of the same updates would show 100% of the update of client 2")
    again.masked(3, (0, 1, 2))
    assert not refused(again.reveal(3, (0, 1, 2), (0, 1, 2)), "")  # what was shown before tells nothing new
    (tmp_path / "0" / FILE).write_text("nonsense\n")
    with pytest.raises(UsageError, match=r"is damaged .*; it says what this site has given away"):
        server()


def test_the_policy_that_an_operator_gives_later_holds_for_sums() -> None:
    """`load_node` replaces the policy of a node that is made already."""
    nodes = hosts(Rows(4))
    for node in nodes.values():
        node.policy = NodePolicy(partners=3, least_batch=1, seconds=0.0)
    assert refused(Server(nodes).masked(1, (0, 1)), "a sum of 2 would show single updates; partners = 3")


def test_a_sum_of_a_method_that_a_site_does_not_admit_is_refused_and_named() -> None:
    config = config_of("fedavg", secure=True).with_run(engine="flower")
    strict = NodePolicy(methods=("meritfed",), least_batch=1, seconds=0.0)
    result = run_rounds(assemble(config, network(policy=strict)), None)
    assert result.summary["outcome"] == "failed"
    assert "the method fedavg matches no pattern of methods" in result.summary["message"]
    few = NodePolicy(rounds=1, least_batch=1, seconds=0.0)
    result = run_rounds(assemble(config, network(policy=few)), None)
    assert {event["round"] for event in result.events} == {2}
    assert all("rounds = 1 rounds of this run" in event["reason"] for event in result.events if "client" in event)


def test_a_sum_of_one_client_is_refused_by_list_and_by_weight() -> None:
    server = Server(hosts(Rows(4)))
    assert refused(server.masked(1, (0,)), "a sum of 1 would show single updates")
    assert refused(server.masked(2, (0, 1, 2), [1.0, 1e-6, 1e-6]), "would show 100% of the update of client 0")
    for phase, large in enumerate((1.5, -1.5, -5.0), 3):  # noise covers coefficients up to 1
        assert refused(server.masked(phase, (0, 1, 2), [large] * 3), "a coefficient exceeds 1")
    assert not refused(server.masked(9, (0, 1, 2), [-1.0] * 3), "")


def test_a_phase_cannot_be_asked_again() -> None:
    server = Server(hosts(Rows(4)))
    server.masked(1, (0, 1, 2))
    again = server.tell(0, "secure-keys", SecureOrder(1, (0, 1, 3), None, 1e6, 0))
    assert refused({0: again}, "takes part in this sum already")
    server.reveal(1, (0, 1, 2), (0, 1, 2))
    assert refused(server.reveal(1, (0, 1, 2), (0, 1)), "asked out of turn") or refused(
        server.reveal(1, (0, 1, 2), (0, 1)), "of the update of client 2"
    )


def test_a_replayed_share_is_refused() -> None:
    server = Server(hosts(Rows(4)))
    server.masked(1, (0, 1, 2))
    old = server.boxes[1][0, 0]
    base = SecureOrder(2, (0, 1, 2), None, 1e6, 0)
    keys = torch.cat([server.tell(k, "secure-keys", base) for k in range(3)])
    sent = base._replace(others=(0, 1, 2), keys=keys, needed=2)
    boxes = [server.tell(k, "secure-shares", sent) for k in range(3)]
    mine = torch.stack([boxes[0][0, 0], old, boxes[2][0, 0]])[None]
    scales = torch.ones(3, dtype=torch.float64)
    found = server.tell(0, "secure-masked", base._replace(others=(0, 1, 2), boxes=mine, scales=scales), step())
    assert refused({0: found}, "the share of client 1 was altered, or is of another sum")


def test_a_secure_node_shows_no_vector() -> None:
    policy = NodePolicy(secure=True, least_batch=1, seconds=0.0)
    server = Server(hosts(Rows(4), policy=policy))
    found = server.tell(0, "run", None, step())
    assert refused({0: found}, "would show 10 numbers of one client in one round")  # 5 of 64 bits
    assert not refused(server.masked(1, (0, 1, 2)), "")


def test_whether_numbers_can_be_summed_is_a_single_number() -> None:
    """A server that chooses the range learns by each refusal whether a client's largest number exceeds it."""
    policy = NodePolicy(secure=True, least_batch=1, seconds=0.0, reveal=2, reveal_total=100)
    server = Server(hosts(Rows(4), policy=policy))
    for phase in (1, 2, 3):
        found = server.masked(phase, (1, 2, 3), size=1.0)
        assert refused(found, "a number exceeds federation.range = 1 in magnitude")
    assert refused(server.masked(4, (1, 2, 3)), "would show 3 numbers of one client in one round")


def test_a_sum_is_on_the_disk_before_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server({k: next(iter(hosts(Rows(4), store=Store(tmp_path / str(k)), only=k).values())) for k in range(3)})
    server.masked(1, (0, 1, 2))
    revealed = Party.reveal

    def reveal(party: Party, survivors: Any) -> Any:
        with Disclosures(tmp_path / str(party.client))._change() as db:  # another process
            assert db.execute("SELECT count(*) FROM sums").fetchone() == (1,)
        return revealed(party, survivors)

    monkeypatch.setattr(Party, "reveal", reveal)
    assert not refused(server.reveal(1, (0, 1, 2), (0, 1, 2)), "")


def test_sums_of_all_rows_at_one_model_are_compared_whatever_their_draws() -> None:
    """After a skipped round an honest server asks again, with another draw, and another client is missing."""
    server = Server(hosts(Rows(4)))
    server.masked(1, (0, 1, 2, 3), draw=1)
    server.reveal(1, (0, 1, 2, 3), (0, 1, 2, 3))
    assert refused(server.masked(2, (0, 1, 2), draw=2), "2 sums of the same updates would show 100% of the update of")


def test_partners_of_the_policy_hold_whatever_the_server_wants() -> None:
    policy = NodePolicy(partners=3, least_batch=1, seconds=0.0)
    server = Server(hosts(Rows(4), policy=policy))
    assert refused(server.masked(1, (0, 1)), "a sum of 2 would show single updates; partners = 3")


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "1"},
        {"everyone": (0, 0)},
        {"others": (9,)},
        {"range": float("nan")},
        {"range": 1},
        {"keys": torch.zeros(3, 64)},
        {"keys": torch.zeros(2, 64, dtype=torch.uint8)},
    ],
)
def test_a_crooked_question_is_refused(change: dict[str, Any]) -> None:
    server = Server(hosts(Rows(4)))
    keys = torch.zeros(3, 64, dtype=torch.uint8)
    sound = SecureOrder(1, (0, 1, 2), None, 1e6, 2, (0, 1, 2), keys)
    assert refused({0: server.tell(0, "secure-shares", sound._replace(**change))}, "secure sum")


def test_the_whole_thing_is_refused_before_a_network_starts() -> None:
    config = config_of("krum", secure=True, reveal=0).with_run(engine="flower")
    with pytest.raises(UsageError, match="cannot be run so"):
        build_problem_and_method(config)


def test_nodes_of_a_problem_keep_their_policies() -> None:
    config = config_of("fedavg", secure=True).with_run(engine="flower")
    strict = NodePolicy(secure=True, least_batch=1, seconds=0.0)
    result = run_rounds(assemble(config, network(policy=strict)), None)
    assert result.summary["outcome"] == "finished"
    plain = config_of("fedavg", clip="none").with_run(engine="flower")
    problem, _ = build_problem_and_method(plain)
    transport = InProcess(nodes(plain, problem, policy=NodePolicy(secure=True, reveal=3, least_batch=1, seconds=0.0)))
    result = run_rounds(assemble(plain, lambda *_: transport), None)
    assert result.summary["outcome"] == "failed"
    assert "this node is secure" in result.summary["message"]
