"""The network engine: clients live at nodes, which a transport reaches.

What all networks share is here and in the modules beside it: which node hosts which client (`roster`), the form of a
reply (`expectations`), the exchange of orders and replies (`exchange`). A transport only carries bytes (`Transport`); a
node only answers them (`node.Node`).

Every order may be repeated: works are pure, and memory comes in versions that never change, named after the order that
made them. So a retry, or a server that was resumed from its checkpoint, cannot make a client take a step twice. Every
declaration and reply is compared with the server's own problem: neither one client nor a majority decides its form.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.errors import NoClients, RunError, UsageError
from coterie.federation.api import Book, Call, Failure, Replies, TargetAt
from coterie.federation.local import LocalEngine
from coterie.federation.points import touched
from coterie.federation.remote.channel import compress_order, expanded, message_form
from coterie.federation.remote.codec import Names, digest
from coterie.federation.remote.exchange import Exchange, Policy, Question, Transport
from coterie.federation.remote.expectations import Expectations, Form
from coterie.federation.remote.messages import (
    FORGOTTEN,
    Done,
    MemoryVersions,
    NoiseOrder,
    Order,
    SecureOrder,
    Step,
    Trouble,
    done_fault,
)
from coterie.federation.remote.roster import Roster
from coterie.federation.secure import Secure
from coterie.federation.secure.primitives import BOX, KEYS, SHARE
from coterie.federation.secure.summing import (
    Summation,
    Summed,
    Task,
    TooFew,
    new_phase,
    question_of,
    unflattened,
)
from coterie.federation.shards import Shard, Stack
from coterie.federation.tree import Size, Tree, joined, mapped, row, rows, size, stack, tree_map
from coterie.federation.work import Each, Handle, Memory, live_versions, name_of

POLL = 0.2  # seconds between two looks at who is there


class NodeResult(NamedTuple):
    """The result of one node in a phase: its clients, their values, and the versions that were made of memory and of
    what compression lost; of compressed values also the size of what travelled."""

    clients: tuple[int, ...]
    values: Tree
    versions: tuple[int, ...]
    errors: tuple[int, ...] = ()
    sent: Size | None = None


@dataclass
class RemoteEngine:
    """The clients of the server's own problem, behind a transport.

    Args:
        task: the problem's oracles
        train: the server's own stand-in for the clients' training rows: one part per client, of the same columns
        valid: the same for validation rows of clients, where they have some
        own_sizes: whether the parts of `train` have the sizes of the clients' own rows, which nodes must then declare
        target: the target's rows; where the target is a client, their form
        largest: bytes that no reply may exceed, whatever is expected of it
        book: must be that of the federation: what the wire carries is noted in it
        noise: how nodes hide updates; None for not at all
        method: the name of the method, which nodes are told
    """

    transport: Transport
    task: Any
    train: Stack
    valid: Stack | None = None
    own_sizes: bool = False
    run: str = "run"
    target: Shard | None = None
    target_at: TargetAt = "server"
    policy: Policy = field(default_factory=Policy)
    names: Names = field(default_factory=Names)
    largest: int | None = None
    device: torch.device | str = "cpu"
    book: Book = field(default_factory=Book)
    noise: NoiseOrder | None = None
    method: str = ""

    def __post_init__(self) -> None:
        self.clients = len(self.train)
        self.expected = Expectations(self.task, self.train, self.valid, self.target)
        known = self.train.counts.tolist() if self.own_sizes else None
        self.roster = Roster(self.clients, self.expected.columns, known, self.device)
        known_to_all = self.transport, self.run, self.roster, self.policy, self.names, self.book
        self.exchange = Exchange(*known_to_all, self.largest, self.noise, self.method)
        self._recalled: dict[int, tuple[int, Tree]] = {}  # by client, the version of its memory that was last shown

    @property
    def sizes(self) -> Tensor:
        """Rows of training data by client, as declared by the nodes, [n]; 0 of those never seen."""
        return self.roster.sizes

    @property
    def present(self) -> list[int]:
        """The clients that can be asked now."""
        return self.roster.present

    def connect(self) -> None:
        """Wait until all clients have declared themselves; continue without the late ones if enough are there.

        A transport whose nodes are settled (`fixed`) admits no others later: nobody waits for them.
        """
        fixed = getattr(self.transport, "fixed", False)
        self._wait(lambda: len(self.present) == (len(self.transport.nodes()) if fixed else self.clients))
        here = len(self.present)
        if here < min(self.policy.quorum, self.clients):
            refused = "".join(f" {note.reason}." for note in self.roster.notes[:3] if note.kind == "refused")
            raise RunError(
                f"{here} of {self.clients} clients declared themselves within {self.policy.patience:g} s; "
                f"start the others, or raise federation.patience.{refused}"
            )

    def execute(self, call: Call, ids: Tensor) -> Iterator[Replies]:
        """Run a work at these clients; everything that came back in time and in form, as one chunk."""
        form = self.expected.of(call)
        if not self.present:
            self._all_gone()
        asked = ids.tolist()
        results, missing = self._phase(call, form, asked)
        failures = (*missing, *self.roster.drained())
        clients = [k for result in results for k in result.clients]
        if not clients or len(clients) < min(self.policy.quorum, len(asked)):
            yield Replies(ids[:0], None, None, failures)
            if clients:
                what = name_of(call.work)
                raise NoClients(f"only {len(clients)} clients answered {what}; federation.quorum asks for more")
            if not self.present:  # a round that all missed is not one that was skipped: the run ends before it
                self._all_gone()
            return
        by_id = torch.tensor(clients).argsort()
        values = rows(joined([result.values for result in results]), by_id)
        versions = torch.tensor([v for result in results for v in result.versions], dtype=torch.int64)
        memory = None if call.memory is None else versions[by_id].to(self.device)
        who = torch.tensor(clients)[by_id].to(self.device)
        sent, errors = None, None
        if call.channel is not None:
            sent = sum((result.sent for result in results if result.sent is not None), Size())
        if call.channel is not None and call.channel.errors is not None:
            made = torch.tensor([v for result in results for v in result.errors], dtype=torch.int64)
            errors = made[by_id].to(self.device)
        yield Replies(who, mapped(lambda t: t.to(self.device), values), memory, failures, sent, errors)

    def execute_at_target(self, call: Call) -> Tree:
        """Run a work on the target's shard: here, or at the client that is the target."""
        if self.target_at == "server":
            nobody = _NOBODY.to(dtype=torch.float32, device=self.device)
            return LocalEngine(self.task, nobody, None, self.target).execute_at_target(call)
        who, host = (self.target_at,), self.roster.of.get(self.target_at)
        reason = "it is away"
        if host is not None:
            form = self.expected.of(call, at_target=True)
            shared = mapped(lambda t: t.detach().cpu(), call.shared)
            step = Step(name_of(call.work), dict(call.static), int(call.draw.key), shared, None, True)
            order = self.exchange.order("run", who, step, self._alive(who), round=call.round)
            content = self.exchange.ask({host.node: Question(order, form.limits(1), _fault(form, 0))})[host.node]
            if isinstance(content, Done):
                touched(content.points)
                return mapped(lambda t: t.to(self.device), content.values)
            reason = content.reason
        raise NoClients(f"the target, client {self.target_at}, did not answer {name_of(call.work)}: {reason}")

    def remember(self, memory: Memory, parts: list[tuple[Tensor, Tree]]) -> Memory:
        """The memory with the versions of the clients that replied replaced."""
        handle = self._handle(memory)
        ids, versions = (torch.cat([part[i] for part in parts]) for i in range(2))
        return Memory(Handle(handle.start, handle.versions.index_copy(0, ids, versions)))

    def recall(self, handle: Handle) -> Tree:
        """The rows that clients remember, for records; of absent clients, their last known rows."""
        here = self.present
        unwilling = [k for k in here if not self.roster.of[k].declaration.shares_memory]
        if unwilling:
            raise UsageError(
                f"the record of this method needs what clients remember, and client {unwilling[0]} does not show it; "
                "start its node with shares_memory=True, or choose a method or setting that keeps no models there."
            )
        versions, form = handle.versions.tolist(), Form.of(row(handle.start, 0))
        wanted = [k for k in here if versions[k] and self._recalled.get(k, (0,))[0] != versions[k]]
        questions = {}
        for node, ks in self.roster.by_node(wanted).items():
            order = self.exchange.order("recall", ks, alive=tuple((versions[k],) for k in ks))
            stacked = form.stacked(len(ks))
            questions[node] = Question(order, stacked.limits(len(ks)), stacked.fault)
        try:
            contents = self.exchange.ask(questions)
        except RunError:  # the network is gone; the record of what was before can still be finished
            contents = {}
        for node, content in contents.items():
            if not isinstance(content, Trouble):
                ks = questions[node].order.clients
                self._recalled |= {k: (versions[k], row(content, i)) for i, k in enumerate(ks)}
        at = [
            self._recalled[k][1] if version and k in self._recalled else mapped(lambda t: t.cpu(), row(handle.start, k))
            for k, version in enumerate(versions)
        ]
        return mapped(lambda t: t.to(self.device), stack(at))

    # a secure sum

    def secure_sum(self, call: Call, ids: Tensor, scales: Tensor, secure: Secure) -> Summed:
        """Σ a_k u_k over these clients, whose nodes mask what they send; see `federation/secure`."""
        form = self.expected.of(call)
        if not self.present:
            self._all_gone()
        self.roster.forget(self.transport.nodes())
        here, asked = set(self.present), ids.tolist()
        failures = [Failure(k, "lost", "no node is there for it") for k in asked if k not in here]
        task = Task(self.run, new_phase(), question_of(call), dict(zip(asked, scales.tolist(), strict=True)))
        made: dict[int, int] = {}  # versions of memory
        senders: list[int] = []

        def ask(stage: str, messages: dict[int, Any]) -> dict[int, Any]:
            if stage == "masked":
                senders.extend(messages)
            by_node = self.roster.by_node([k for k in messages if k in here])
            lost: set[int] = set()
            answers: dict[int, Any] = {}
            for _ in range(2):  # whoever lost its memory begins anew
                questions = {
                    node: self._secure_question(
                        stage, call, form, ks, {k: messages[k] for k in ks}, task, secure, lost, len(senders)
                    )
                    for node, ks in by_node.items()
                }
                contents = self.exchange.ask(questions)
                again = {}
                for node, content in contents.items():
                    ks = by_node[node]
                    if not isinstance(content, Trouble):
                        step = questions[node].order.step
                        if step is not None and step.memory is not None:
                            made.update(zip(ks, step.memory.after, strict=True))
                        rows = content
                        if isinstance(content, Done):
                            touched(content.points)
                            rows = content.values
                        answers |= {k: _heard(stage, rows[i], k, messages[k], senders) for i, k in enumerate(ks)}
                    elif content.kind == FORGOTTEN and not lost:
                        again[node] = ks
                        failures.extend(Failure(k, "memory lost", "it starts again") for k in content.clients)
                    else:
                        failures.extend(Failure(k, content.kind, content.reason) for k in ks)
                if not again:
                    break
                by_node, lost = again, {k for ks in again.values() for k in ks}
            return answers

        summation = Summation(ask, secure, task)
        try:
            total = summation.run()
        except TooFew as error:
            error.failures = (*failures, *self.roster.drained())
            if not self.present:
                self._all_gone()
            raise
        shapes = [(tuple(shape), dtype) for dtype, shape in form.leaves]
        values, like = unflattened(total.numbers, shapes, torch.device(self.device))
        survivors = torch.tensor(total.survivors, device=self.device)
        memory = None if call.memory is None else survivors.new_tensor([made[k] for k in total.survivors])
        missing = (*failures, *self.roster.drained())
        return Summed(values, like, form.structure, survivors, memory, missing, summation.traffic)

    def _secure_question(
        self,
        stage: str,
        call: Call,
        form: Form,
        ks: tuple[int, ...],
        messages: dict[int, Any],
        task: Task,
        secure: Secure,
        lost: set[int],
        senders: int,
    ) -> Question:
        """One question of a secure sum to the node of these clients."""
        everyone, count = tuple(task.scales), len(ks)
        about = SecureOrder(task.phase, everyone, None, float(secure.range), 0)
        if stage == "keys":
            return self._plain_question(ks, about, stage, (count, KEYS), call.round)
        if stage == "shares":
            keys, needed = messages[ks[0]]
            table = torch.from_numpy(np.stack([np.frombuffer(key, dtype=np.uint8) for key in keys.values()]).copy())
            about = about._replace(others=tuple(keys), needed=needed, keys=table)
            return self._plain_question(ks, about, stage, (count, len(keys), BOX), call.round)
        if stage == "reveal":
            about = about._replace(others=messages[ks[0]])
            return self._plain_question(ks, about, stage, (count, senders, SHARE), call.round)
        others = tuple(sorted({*messages[ks[0]], ks[0]}))
        boxes = b"".join(messages[k].get(other, bytes(BOX)) for k in ks for other in others)
        table = torch.from_numpy(np.frombuffer(boxes, dtype=np.uint8).reshape(count, len(others), BOX).copy())
        coefficients = torch.tensor(list(task.scales.values()), dtype=torch.float64)
        about = about._replace(others=others, boxes=table, scales=coefficients)
        step = self._step(call, ks, lost)
        order = self.exchange.order("secure-masked", ks, step, self._alive(ks), about, round=call.round)
        numbers = sum(torch.Size(shape).numel() for _, shape in form.leaves)
        masked = Form.of(torch.empty((count, numbers), dtype=torch.int64, device="meta"))
        return Question(order, masked.limits(count), _fault(masked, 0 if call.memory is None else count))

    def _plain_question(
        self, ks: tuple[int, ...], about: SecureOrder, stage: str, shape: tuple[int, ...], round: int
    ) -> Question:
        form = Form.of(torch.empty(shape, dtype=torch.uint8, device="meta"))
        order = self.exchange.order(f"secure-{stage}", ks, secure=about, round=round)
        return Question(order, form.limits(len(ks)), form.fault)

    # one phase

    def _phase(self, call: Call, form: Form, asked: list[int]) -> tuple[list[NodeResult], list[Failure]]:
        """What these clients answer, by node, and who of them is missing."""
        self.roster.forget(self.transport.nodes())
        here = set(self.present)
        failures = [Failure(k, "lost", "no node is there for it") for k in asked if k not in here]
        by_node = self.roster.by_node([k for k in asked if k in here])
        questions = {node: self._question(call, form, ks, set()) for node, ks in by_node.items()}
        contents = self.exchange.ask(questions)
        again = {}
        for node, content in contents.items():
            if isinstance(content, Trouble) and content.kind == FORGOTTEN:
                lost = set(content.clients) & set(by_node[node])
                failures += [Failure(k, "memory lost", "it starts again from the beginning") for k in sorted(lost)]
                again[node] = self._question(call, form, by_node[node], lost)
        questions |= again
        contents |= self.exchange.ask(again) if again else {}
        results = []
        for node, content in contents.items():
            if isinstance(content, Trouble):
                failures += [Failure(k, content.kind, content.reason) for k in by_node[node]]
                continue
            touched(content.points)
            found = self._result(call, form, questions[node].order, content.values)
            result, unsound = _without_unsound_memory(found, content.kept)
            failures += [Failure(k, "rejected", "not finite") for k in unsound]
            results += [result] if result.clients else []
        return results, failures

    def _question(self, call: Call, form: Form, ks: tuple[int, ...], lost: set[int]) -> Question:
        """The order of a phase to the node of these clients; clients that lost their memory begin anew."""
        step, compress = self._step(call, ks, lost), None
        if call.channel is not None:
            compress = compress_order(call.channel, step, ks, lost)
            form = message_form(call, form, call.channel.compression)
        stacked = form.stacked(len(ks))
        order = self.exchange.order("run", ks, step, self._alive(ks), compress=compress, round=call.round)
        return Question(order, stacked.limits(len(ks)), _fault(stacked, 0 if call.memory is None else len(ks)))

    def _result(self, call: Call, form: Form, order: Order, values: Tree) -> NodeResult:
        """What a node replied, with the versions that were made; messages are expanded."""
        assert order.step is not None
        made = () if order.step.memory is None else order.step.memory.after
        if call.channel is None or order.compress is None:
            return NodeResult(order.clients, values, made)
        errors = () if order.compress.errors is None else order.compress.errors.after
        who = torch.tensor(order.clients, device=self.device)
        messages = mapped(lambda t: t.to(self.device), values)
        understood = expanded(call, who, messages, form, call.channel.compression)
        return NodeResult(order.clients, understood, made, errors, size(values))

    def _alive(self, ks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """By client, the versions of its memory that are still of use."""
        used = [versions for versions in live_versions() if len(versions) == self.clients]
        alive = torch.stack(used, 1)[list(ks)].tolist() if used else [[]] * len(ks)
        return tuple(tuple(sorted({*versions} - {0})) for versions in alive)

    def _step(self, call: Call, ks: tuple[int, ...], lost: set[int]) -> Step:
        which = torch.tensor(ks, device=self.device)

        def sent(leaf: Any) -> Any:
            if isinstance(leaf, Each):
                return Each(leaf.of(which).detach().cpu())
            return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf

        shared = tree_map(sent, call.shared)
        step = Step(name_of(call.work), dict(call.static), int(call.draw.key), shared, None, False)
        if call.memory is None:
            return step
        handle = self._handle(call.memory)
        versions = handle.versions.tolist()
        before = tuple(0 if k in lost else versions[k] for k in ks)
        start = None if all(before) else mapped(lambda t: t[which].cpu(), handle.start)
        named = digest(step._replace(memory=MemoryVersions(before, (), start)))
        return step._replace(memory=MemoryVersions(before, tuple(digest((named, k)) for k in ks), start))

    def _handle(self, memory: Memory) -> Handle:
        inside = memory.payload
        if isinstance(inside, Handle):
            return inside
        return Handle(inside, torch.zeros(self.clients, dtype=torch.int64, device=self.device))

    # who is there

    def _wait(self, enough: Callable[[], bool]) -> None:
        """Until enough clients are there, or patience ends."""
        deadline = monotonic() + self.policy.patience
        while True:
            self.roster.forget(self.transport.nodes())
            self.exchange.once({}, 0.0)
            if enough() or monotonic() >= deadline:
                return
            sleep(POLL)

    def _all_gone(self) -> None:
        self._wait(lambda: bool(self.present))
        if not self.present:
            raise RunError(
                f"all {self.clients} clients are gone, and none came back within {self.policy.patience:g} s. "
                "What was saved is intact: start the nodes again and resume."
            )


_NOBODY = Stack((torch.zeros(1),), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))


def _heard(stage: str, row: Tensor, client: int, message: Any, senders: list[int]) -> Any:
    """A client's answer in a secure sum, as the protocol has it."""
    if stage == "masked":
        return row.numpy().view(np.uint64)
    if stage == "keys":
        return row.numpy().tobytes()
    whose = list(message[0]) if stage == "shares" else sorted(senders)
    found = {k: part.tobytes() for k, part in zip(whose, row.numpy(), strict=True)}
    return {k: box for k, box in found.items() if k != client} if stage == "shares" else found


def _fault(form: Form, kept: int) -> Callable[[Any], str | None]:
    """What is wrong with the content of a reply that must be a result of this form, with so many flags of memory."""
    return lambda content: done_fault(content, kept) or form.fault(content.values)


def _without_unsound_memory(result: NodeResult, kept: tuple[bool, ...]) -> tuple[NodeResult, list[int]]:
    """A result without the clients whose new memory is not finite, who keep what they had; and these clients."""
    if all(kept):
        return result, []
    unsound = [k for k, sound in zip(result.clients, kept, strict=True) if not sound]
    clients = tuple(k for k in result.clients if k not in unsound)
    sound = torch.tensor(kept)
    versions = tuple(torch.tensor(result.versions)[sound].tolist())
    errors = tuple(torch.tensor(result.errors)[sound].tolist()) if result.errors else ()
    return result._replace(
        clients=clients, values=rows(result.values, sound), versions=versions, errors=errors
    ), unsound
