"""What a curious server could read through side doors of a node with a strict policy, and what the node's account says.

Every attack here worked once: rows by a setting called `rows`, gradients by single numbers, memory by `recall`.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Broken, nodes
from test_own import net, rows
from test_secure_methods import config_of, quick

from coterie.engines.own import ClientData
from coterie.experiment.build import assemble, build_problem_and_method
from coterie.experiment.config import resolve
from coterie.experiment.loop import run_rounds
from coterie.federation import Shard, work
from coterie.federation.remote import InProcess, Names, Node, NodePolicy, Store, Trouble
from coterie.federation.remote.codec import decode, encode
from coterie.federation.remote.disclosures import FILE, Disclosures
from coterie.federation.remote.messages import PROTOCOL, Done, MemoryVersions, NoiseOrder, Order, Step
from coterie.federation.remote.policy import PolicyError
from coterie.federation.secure.summing import question
from coterie.federation.shards import Rows
from coterie.federation.work import Static
from coterie.methods.baselines.local_svrg import SVRGSteps
from coterie.methods.registry import METHODS, method_entry
from coterie.numerics import Draw

NAMES = Names().with_modules(__name__)
MODEL = torch.zeros(15)
D = len(MODEL)
GRADIENT, PROJECTION = "shared/gradient", "meritfed/projection"
SECURE: dict[str, Any] = {"secure": True, "seconds": 0.0}


@work
def sampled_gradient(shard: Shard, shared: Any, private: Any, static: Static, draw: Draw) -> torch.Tensor:
    """A gradient on so many rows, by a setting of another name; some of the rows may be one row again and again."""
    assert shard.train is not None
    index = torch.arange(static.rows) % static.get("different", static.rows)
    gradient: torch.Tensor = shard.task.gradient(shared, shard.train.take(index))
    return gradient


@work
def two_in_one(shard: Shard, shared: Any, private: Any, static: Static, draw: Draw) -> torch.Tensor:
    """Two numbers of a gradient as one."""
    assert shard.train is not None
    pair = shard.task.gradient(shared, shard.train.all())[:2].contiguous()
    return pair.view(getattr(torch, static.kind))[0]


@work
def fails_with_a_value(shard: Shard, shared: Any, private: Any, static: Static, draw: Draw) -> torch.Tensor:
    """An error whose text has a number of a row."""
    assert shard.train is not None
    raise ValueError(f"{float(shard.train.all().inputs[0, 0])}")


def node(folder: Path | None = None, n: int = 40, **policy: Any) -> Node:
    """A client with its own rows, a target too, that shares its memory."""
    data = ClientData(rows(1, n), net(), "cross_entropy", valid=rows(1, n))
    return data.node(0, modules=(__name__,), store=Store(folder), shares_memory=True, policy=NodePolicy(**policy))


class Server:
    """A server that asks a node for what it likes."""

    def __init__(self, here: Node) -> None:
        self.node, self.number = here, 0

    def ask(
        self, work: str, shared: Any = MODEL, *, run: str = "r", round: int = 0, draw: int = 0, **options: Any
    ) -> Any:
        self.number += 1
        static = options.pop("static", {"batch": "all"})
        step = Step(work, static, draw, shared, options.pop("memory", None), options.pop("at_target", False))
        return self.tell(Order(PROTOCOL, self.number, "run", run, (0,), step, ((),), round=round, **options))

    def tell(self, order: Order) -> Any:
        return decode(self.node.handle(encode(order)), NAMES).content

    def project(self, i: int, **options: Any) -> Any:
        return self.ask(PROJECTION, (MODEL, torch.eye(D)[i]), static={"batch": "all", "steps": 1}, **options)


def refused(reply: Any, reason: str) -> bool:
    return isinstance(reply, Trouble) and reply.kind == "refused" and reason in reply.reason


# rows


def test_rows_are_counted_whatever_the_setting_is_called() -> None:
    server, name = Server(node(least_batch=16)), f"{__name__}:sampled_gradient"
    assert refused(server.ask(name, static={"rows": 1}), "would take 1 rows of a client, too few for least_batch = 16")
    assert refused(server.ask(name, static={"rows": 15}), "would take 15 rows")
    assert isinstance(server.ask(name, static={"rows": 16}), Done)
    reply = server.ask(name, static={"rows": 16, "different": 7})  # a draw that was chosen so
    assert refused(reply, "would take 7 different rows of a client")
    assert isinstance(server.ask(name, static={"rows": 16, "different": 8}), Done)


def test_a_node_compares_its_smallest_client_with_least_batch() -> None:
    """One node with clients of 40 and 3 rows."""
    from coterie.federation import LocalEngine, pack
    from coterie.problems.models import FlatModel
    from coterie.problems.weighting import weighting

    problem = weighting([rows(1, 40), rows(0, 3)], None, FlatModel(net()), "cross_entropy")
    both = Node(LocalEngine(problem.task, pack([rows(1, 40), rows(0, 3)]), None, None, "sequential"), (0, 1))
    for clients in ((0, 1), (1, 0), (1,)):
        step = Step(GRADIENT, {"batch": "all"}, 0, MODEL, None, False)
        order = Order(PROTOCOL, 1, "run", "r", clients, step, ((),) * len(clients))
        reply = decode(both.handle(encode(order)), NAMES).content
        assert refused(reply, "a client here has 3 rows, fewer than least_batch = 8"), clients


LEAST = 6


@pytest.mark.parametrize("method", quick([entry.name for entry in METHODS]))
def test_no_work_answers_from_fewer_rows_than_the_policy_says(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method with every whole setting at 3. What leaves the columns is looked at, below the node's own count."""
    batches: list[int] = []
    fetched, handled = Rows._columns_at, Node.handle

    def fetch(rows: Rows, numbers: torch.Tensor) -> Any:
        batches.append(numbers.shape[-1])
        return fetched(rows, numbers)

    def handle(here: Node, order: bytes) -> bytes:
        batches.clear()
        reply = handled(here, order)
        if isinstance(decode(reply, Names()).content, Done):
            assert all(count >= LEAST for count in batches), decode(order, Names()).step.work
        return reply

    if method_entry(method).make().needs & {"friends", "groups"}:
        pytest.skip("it knows more than a network can")
    tables = config_of(method).with_run(engine="flower").as_dict()
    tables.pop("version")
    small = {key: 3 for key, value in tables["method"].items() if type(value) is int and value > 3}
    tables["method"] |= small
    config = resolve(tables)
    problem, _ = build_problem_and_method(config)
    here = InProcess(nodes(config, problem, policy=NodePolicy(least_batch=LEAST, seconds=0.0)))
    monkeypatch.setattr(Rows, "_columns_at", fetch)
    monkeypatch.setattr(Node, "handle", handle)
    run_rounds(assemble(config, lambda *_: here), None)


# single numbers


def gradient_at_start(n: int = 40) -> torch.Tensor:
    reply = Server(node(n=n)).ask(GRADIENT)
    found: torch.Tensor = reply.values[0]
    return found


def found_by_projections(ask: Callable[[int], Any]) -> tuple[int, float]:
    """How many numbers a server gets by unit vectors, and its error of the gradient (the rest taken for 0)."""
    truth, guess, shown = gradient_at_start(), torch.zeros(D), 0
    for i in range(D):
        reply = ask(i)
        if isinstance(reply, Done):
            guess[i], shown = reply.values[0], shown + 1
    return shown, float((guess - truth).norm() / truth.norm())


def test_single_numbers_of_one_round_are_limited() -> None:
    server = Server(node(**SECURE, reveal=1))
    assert found_by_projections(lambda i: server.project(i))[0] == 1  # round 0 is one round
    assert refused(server.project(1), "would show 2 numbers of one client in one round, and this node is secure")
    assert isinstance(server.project(0), Done)  # the same question tells nothing new
    assert isinstance(server.project(1, round=1), Done)
    assert isinstance(server.project(2, run="other"), Done)


@pytest.mark.parametrize("name", ["primal-dual/slope", "fednest-weights/slope"])
def test_slopes_are_single_numbers_too(name: str) -> None:
    server = Server(node(**SECURE, reveal=1))
    assert isinstance(server.ask(name, (MODEL, torch.eye(D)[0])), Done)
    assert refused(server.ask(name, (MODEL, torch.eye(D)[1])), "reveal = 1")


def test_fewer_single_numbers_leave_than_the_model_has_parameters_over_rounds_runs_and_restarts(tmp_path: Path) -> None:
    def asked(i: int, **limits: Any) -> Any:
        return Server(node(tmp_path, **SECURE, reveal=1, **limits)).project(i, run=f"r{i % 3}", round=1 + i)

    shown, error = found_by_projections(asked)
    assert shown == D - 1
    assert error > 1e-3
    assert refused(
        asked(D - 1), "would bring the single numbers that this node has shown of one client to 15; it shows 14"
    )
    assert isinstance(asked(D - 1, reveal_total=D), Done)


@pytest.mark.parametrize("kind", ["float64", "int64"])
def test_two_numbers_in_one_count_twice(kind: str) -> None:
    name = f"{__name__}:two_in_one"
    assert refused(Server(node(**SECURE, reveal=1)).ask(name, static={"kind": kind}), "would show 2 numbers")
    assert isinstance(Server(node(**SECURE, reveal=2)).ask(name, static={"kind": kind}), Done)


def test_exactly_as_many_steps_and_numbers_as_the_policy_says_are_admitted() -> None:
    stepping: dict[str, Any] = {"batch": 8, "step": 0.1}
    server = Server(node(steps=3, seconds=0.0))
    assert isinstance(server.ask("shared/local-steps", static={**stepping, "steps": 3}), Done)
    assert refused(server.ask("shared/local-steps", static={**stepping, "steps": 4}), "steps = 4 exceeds steps = 3")
    server = Server(node(**SECURE, reveal=3))
    assert [isinstance(server.project(i), Done) for i in range(4)] == [True, True, True, False]


def test_an_error_of_a_work_tells_no_value_where_the_node_is_secure() -> None:
    value = str(float(rows(1, 40)[0][0, 0]))
    name = f"{__name__}:fails_with_a_value"
    assert value in Server(node()).ask(name).reason
    for policy in (SECURE, {"epsilon": 1.0, "seconds": 0.0}):
        assert value not in Server(node(**policy)).ask(name, noise=NoiseOrder(1.0, 100.0)).reason


# the target, memory, parameters, works within works


HIDING = [{"secure": True}, {"epsilon": 5.0}]


@pytest.mark.parametrize("hiding", HIDING, ids=str)
def test_the_target_and_memory_are_no_way_around_sums_and_noise(hiding: dict[str, Any]) -> None:
    def asked(**policy: Any) -> list[Any]:
        server = Server(node(seconds=0.0, **policy))
        server.node.store.put("r", 0, 7, torch.ones(15))
        recall = Order(PROTOCOL, 9, "recall", "r", (0,), None, ((7,),))
        return [server.tell(recall), server.ask("shared/goal-gradient", at_target=True)]

    assert not any(isinstance(reply, Trouble) for reply in asked())
    memory, target = asked(**hiding)
    assert refused(target, "the target's reply to shared/goal-gradient leaves it as it is")
    assert refused(memory, "what a client remembers leaves it as it is")
    assert not any(isinstance(reply, Trouble) for reply in asked(**hiding, target=True))
    # admitted, they are counted, and the lists of works and methods hold
    assert all(refused(reply, "orders = 0") for reply in asked(orders=0))
    assert all(refused(reply, "works") for reply in asked(works=("meritfed/*",)))
    assert all(refused(reply, "methods") for reply in asked(methods=("meritfed",)))


def test_parameters_beyond_the_magnitude_are_refused() -> None:
    server = Server(node(magnitude=10.0, seconds=0.0))
    assert isinstance(server.ask(GRADIENT, MODEL + 10.0), Done)
    for steep in (MODEL - 10.1, MODEL + float("nan"), MODEL + float("inf")):
        assert refused(server.ask(GRADIENT, steep), "beyond magnitude = 10")
    assert refused(server.ask(PROJECTION, (MODEL, MODEL + 11), static={"batch": "all", "steps": 1}), "beyond magnitude")
    start = MemoryVersions((0,), (5,), MODEL[None] + 11)
    assert refused(server.ask(GRADIENT, memory=start), "beyond magnitude")


@pytest.mark.parametrize("setting", ["decode", "encode", "objective"])
def test_a_work_that_a_setting_names_needs_a_pattern_too(setting: str) -> None:
    static = {"batch": "all", setting: "hessian/weighted-products"}
    reply = Server(node(works=("shared/*",))).ask(GRADIENT, static=static)
    assert refused(reply, "the work hessian/weighted-products matches no pattern of works")


# the account itself


def test_two_nodes_of_one_site_spend_one_budget(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="needs coterie[privacy]")
    from coterie.federation.stages.privacy import epsilon

    limit = epsilon(2.0, 3, 1e-5) + 1e-9  # three uploads
    servers = [Server(node(tmp_path, epsilon=limit, seconds=0.0)) for _ in range(2)]
    replies = [servers[i % 2].ask(GRADIENT, draw=i, noise=NoiseOrder(1.0, 2.0)) for i in range(5)]
    assert [isinstance(reply, Done) for reply in replies] == [True, True, True, False, False]
    assert refused(replies[-1], "above its budget of epsilon")


def _count(folder: Path, times: int, done: Any) -> None:
    account = Disclosures(folder)
    for _ in range(times):
        try:
            account.count_order("r", 0, NodePolicy(orders=30))
            with done.get_lock():
                done.value += 1
        except PolicyError:
            pass


def test_processes_of_one_site_count_together(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    done = spawn.Value("i", 0)
    processes = [spawn.Process(target=_count, args=(tmp_path, 20, done)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert done.value == 30


ANSWERS = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_disclosures import Server, node, SECURE
server = Server(node(Path({folder!r}), **SECURE, reveal=1, reveal_total=10**6))
for i in range(10**6):
    reply = server.project(i % 15, round=1 + i, draw={turn} + i)
    print(type(reply).__name__, flush=True)
"""  # every process asks other questions: the same one again would tell nothing new


def test_what_left_before_a_kill_is_on_the_disk(tmp_path: Path) -> None:
    """`kill -9` in the middle of an order: every answer that left is in the account, and nothing is damaged."""
    left = 0
    for turn in range(2):
        program = ANSWERS.format(path=sys.path, folder=str(tmp_path), turn=turn * 10**7)
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(5):
            left += process.stdout.readline() == "Done\n"
        os.kill(process.pid, signal.SIGKILL)
        left += process.stdout.read().count("Done\n")
        process.wait()
        process.stdout.close()
        with Disclosures(tmp_path)._change() as db:
            (orders,), (numbers,) = (
                db.execute(f"SELECT sum({what}) FROM {table}").fetchone()
                for what, table in (("orders", "runs"), ("numbers", "clear"))
            )
        assert left <= numbers <= orders


def test_a_change_is_flushed_before_it_counts(tmp_path: Path) -> None:
    account = Disclosures(tmp_path)
    with account._change() as db:
        assert db.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA: the file and its folder
    assert (tmp_path / FILE).is_file()


def test_an_account_that_cannot_be_written_lets_nothing_leave(tmp_path: Path) -> None:
    here = node(tmp_path, seconds=0.0)
    (tmp_path / FILE).mkdir()
    assert refused(Server(here).ask(GRADIENT), "what this node gives away cannot be noted")


# a skipped round


def test_a_sum_at_the_same_model_is_the_same_question_whatever_the_draw() -> None:
    whole, sampled = {"batch": "all", "steps": 1}, {"batch": 8, "steps": 1}
    assert question(GRADIENT, whole, 1, MODEL) == question(GRADIENT, whole, 2, MODEL)
    assert question(GRADIENT, sampled, 1, MODEL) != question(GRADIENT, sampled, 2, MODEL)
    assert question(GRADIENT, whole, 1, MODEL) != question(GRADIENT, whole, 1, MODEL + 1)
    svrg = {"svrg": SVRGSteps(0.1, 1, 0.5, 1, 2)}
    assert question(GRADIENT, svrg, 1, MODEL) != question(GRADIENT, svrg, 2, MODEL)


def test_a_lagged_run_does_not_stall_where_its_numbers_are_lost() -> None:
    """In round 1 the sum arrives and the numbers do not. The model takes the step: round 2 is at another one."""
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    config = config_of("meritfed", secure=True).with_run(engine="flower", rounds=4)
    problem, _ = build_problem_and_method(config)

    def lose(who: Any, order: bytes, reply: bytes) -> Any:
        asked = decode(order, Names())
        late = asked.round == 1 and asked.step is not None and asked.step.work == PROJECTION
        gone = asked.round == 2 and who == "node1"  # another set of clients at the next model
        return Trouble("lost", "the node is gone") if late or gone else reply

    policy = NodePolicy(secure=True, reveal=2, reveal_total=100, least_batch=1, seconds=0.0)
    result = run_rounds(assemble(config, lambda *_: Broken(nodes(config, problem, policy=policy), lose)), None)
    assert result.summary["outcome"] == "finished", result.summary["message"]
    assert {event["event"] for event in result.events} == {"lost", "rejoined", "skipped"}
    assert result.state.rounds == 4


@pytest.mark.slow
def test_the_table_of_what_is_reconstructed_is_what_the_attacks_give(capsys: pytest.CaptureFixture[str]) -> None:
    """The rows of docs/SECURITY.md; errors of gradients within 3 points, as kernels differ."""
    pytest.importorskip("cryptography", reason="secure sums need it: pip install 'coterie[secure]'")
    pytest.importorskip("dp_accounting", reason="needs coterie[privacy]")
    from benchmarks import curious

    curious.main()
    page = (Path(__file__).parents[2] / "docs" / "SECURITY.md").read_text(encoding="utf-8")
    for line in capsys.readouterr().out.splitlines()[2:]:
        start, _, last = line.removesuffix(" |").rpartition(" | ")
        (told,) = [row for row in page.splitlines() if row.startswith(f"{start} | ")]
        assert abs(int(told.removesuffix("% |").rpartition(" ")[2]) - int(last.removesuffix("%"))) <= 3, line
