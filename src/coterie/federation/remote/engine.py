"""The network engine: clients live at nodes, which a transport reaches.

What is common to all networks is here: who is where, what is sent, what of the replies can be used, who failed and why,
whose memory has which version. A transport only carries bytes (`Transport`), a node only answers them (`node.Node`).

Every order may be repeated: works are pure, and memory comes in versions that never change, named after the order that
made them. So a retry, or a server that was resumed from its checkpoint, cannot make a client go on twice. A reply is
compared with the others' of its phase: most clients must be honest anyway, and so the server needs neither rows nor
time to find out what form a result must have.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from coterie.errors import NoClients, RunError, UsageError
from coterie.federation.api import Book, Call, Failure, Place, Replies
from coterie.federation.local import LocalEngine
from coterie.federation.remote.codec import CodecError, Limits, Message, Names, decode, digest, message
from coterie.federation.remote.messages import PROTOCOL, Card, Done, Order, Past, Reply, Step, Trouble
from coterie.federation.shards import Shard, Stack
from coterie.federation.tree import Tree, joined, mapped, row, rows, stack, tree_flatten, tree_map
from coterie.federation.work import Each, Handle, Memory, held, in_use, name_of

Address = Hashable
POLL = 0.2  # seconds between two looks at who is there


class Transport(Protocol):
    """Carries bytes to nodes and back.

    `exchange` sends all orders and returns when everybody in `needed` has answered its order or failed, or after
    `timeout` seconds, with what came in. A reply that came too late for one call may be among those of the next; they
    are told apart by what is in them. Whoever of `needed` is missing is taken to be late. A transport that knows more
    says so by a `Trouble`: "lost" (nobody is there) or "client error" (the client's side cannot even reply).
    """

    def nodes(self) -> Mapping[Address, int | None]:
        """Who is connected now; with the client's id where the transport knows it for certain (authentication)."""

    def exchange(
        self, orders: Mapping[Address, Message], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        """Send `bytes(order)` of each, wait, collect."""


class Policy(NamedTuple):
    """How long a phase may take, how often an order to a lost client is repeated, how many must answer for a phase to
    count, how long to wait for clients at the start and when all are gone."""

    timeout: float = 60.0
    retries: int = 1
    quorum: int = 1
    patience: float = 120.0


@dataclass
class Home:
    """Where a client lives, and what its node declared."""

    node: Address
    card: Card


class Part(NamedTuple):
    """What one node contributes to a phase: its clients, the results of the steps, the versions that these made."""

    clients: tuple[int, ...]
    done: tuple[Done, ...]
    versions: tuple[tuple[int, ...], ...]


@dataclass
class RemoteEngine:
    """n clients behind a transport. The target's shard is here where the server is the target.

    `book` must be that of the federation: what the wire carries is noted in it.
    """

    transport: Transport
    clients: int
    task: Any
    run: str = "run"
    target: Shard | None = None
    target_at: Place = "server"
    policy: Policy = field(default_factory=Policy)
    names: Names = field(default_factory=Names)
    limits: Limits = field(default_factory=Limits)
    device: torch.device | str = "cpu"
    book: Book = field(default_factory=Book)

    def __post_init__(self) -> None:
        self._sizes = torch.zeros(self.clients, dtype=torch.int64, device=self.device)
        self._homes: dict[int, Home] = {}
        self._silent: dict[Address, float] = {}  # nodes that must say who they are before they get work; when asked
        self._notes: list[Failure] = []
        self._number = 0
        self._forms: dict[Any, Any] = {}
        self._looked: dict[int, tuple[int, Tree]] = {}

    @property
    def sizes(self) -> Tensor:
        """Rows of training data by client, as declared by the nodes, [n]; 0 of those never seen."""
        return self._sizes

    @property
    def present(self) -> list[int]:
        """The clients that can be asked now."""
        return sorted(k for k, home in self._homes.items() if home.node not in self._silent)

    def connect(self) -> None:
        """Wait until all clients have declared themselves; go on without the late ones if enough are there."""
        self._wait(lambda: len(self.present) == self.clients)
        here = len(self.present)
        if here < min(self.policy.quorum, self.clients):
            raise RunError(
                f"{here} of {self.clients} clients declared themselves within {self.policy.patience:g} s; "
                "start the others, or raise federation.patience."
            )

    def execute(self, call: Call, ids: Tensor) -> Iterator[Replies]:
        """Run a work at these clients; everything that came back in time and in form, as one chunk."""
        for (replies,) in self.composite([call], ids):
            yield replies

    def composite(self, calls: Sequence[Call], ids: Tensor) -> Iterator[tuple[Replies, ...]]:
        """Run several works at these clients in one exchange; a client that fails in one is left out of all."""
        if not self.present:
            self._all_gone()
        asked = ids.tolist()
        parts, failures = self._phase(calls, asked)
        failures = [*failures, *self._drained()]
        clients = [k for part in parts for k in part.clients]
        if not clients or len(clients) < min(self.policy.quorum, len(asked)):
            nobody = Replies(ids[:0], None, None, tuple(failures))
            yield (nobody, *(nobody._replace(failures=()) for _ in calls[1:]))
            if clients:
                what = name_of(calls[0].work)
                raise NoClients(f"only {len(clients)} clients answered {what}; federation.quorum asks for more")
            if not self.present:  # a round that all missed is not one that was skipped: the run ends before it
                self._all_gone()
            return
        by_id = torch.tensor(clients).argsort()
        who = torch.tensor(clients)[by_id].to(self.device)
        out = []
        for i, call in enumerate(calls):
            values = rows(joined([part.done[i].values for part in parts]), by_id)
            versions = torch.tensor([v for part in parts for v in part.versions[i]], dtype=torch.int64)
            memory = None if call.memory is None else versions[by_id].to(self.device)
            told = tuple(failures) if i == 0 else ()
            out.append(Replies(who, mapped(lambda t: t.to(self.device), values), memory, told))
        yield tuple(out)

    def execute_at_target(self, call: Call) -> Tree:
        """Run a work on the target's shard: here, or at the client that is the target."""
        if self.target_at == "server":
            nobody = _NOBODY.to(dtype=torch.float32, device=self.device)
            return LocalEngine(self.task, nobody, None, self.target).execute_at_target(call)
        what, home = name_of(call.work), self._homes.get(self.target_at)
        reason = "it is away"
        if home is not None:
            shared = mapped(lambda t: t.detach().cpu(), call.shared)
            step = Step(what, dict(call.static), int(call.draw.key), shared, None, True)
            order = self._order("run", (self.target_at,), (step,), self._alive((self.target_at,)))
            content = self._exchange({home.node: order})[home.node]
            if _are_done(content, 1):
                return mapped(lambda t: t.to(self.device), content[0].values)
            reason = content.reason if isinstance(content, Trouble) else "its reply has a wrong form"
        raise NoClients(f"the target, client {self.target_at}, did not answer {what}: {reason}")

    def remember(self, memory: Memory, parts: list[tuple[Tensor, Tree]]) -> Memory:
        """The memory with the versions of those who answered replaced."""
        handle = self._handle(memory)
        ids, versions = (torch.cat([part[i] for part in parts]) for i in range(2))
        return Memory(Handle(handle.start, handle.versions.index_copy(0, ids, versions)))

    def recall(self, handle: Handle) -> Tree:
        """The rows that clients remember, for records: of those who are away, what was last seen of them."""
        here = self.present
        unwilling = [k for k in here if not self._homes[k].card.shares_memory]
        if unwilling:
            raise UsageError(
                f"the record of this method needs what clients remember, and client {unwilling[0]} does not show it; "
                "start its node with shares_memory=True, or choose a method or setting that keeps no models there."
            )
        versions = handle.versions.tolist()
        wanted = [k for k in here if versions[k] and self._looked.get(k, (0,))[0] != versions[k]]
        orders = {
            node: self._order("recall", ks, alive=tuple((versions[k],) for k in ks))
            for node, ks in self._by_node(wanted).items()
        }
        try:
            contents = self._exchange(orders)
        except RunError:  # the network is gone; the record of what was before can still be finished
            contents = {}
        for node, content in contents.items():
            ks = orders[node].clients
            if _has_rows(content, len(ks)) and _form(content) == _form(handle.start):
                self._looked |= {k: (versions[k], row(content, i)) for i, k in enumerate(ks)}
        at = [
            self._looked[k][1] if version and k in self._looked else mapped(lambda t: t.cpu(), row(handle.start, k))
            for k, version in enumerate(versions)
        ]
        return mapped(lambda t: t.to(self.device), stack(at))

    # one phase

    def _phase(self, calls: Sequence[Call], asked: list[int]) -> tuple[list[Part], list[Failure]]:
        """What these clients answer, by node, and who of them is missing."""
        self._look_around()
        here = set(self.present)
        failures = [Failure(k, "lost", "no node is there for it") for k in asked if k not in here]
        orders = {n: self._work(calls, ks, set()) for n, ks in self._by_node([k for k in asked if k in here]).items()}
        contents = self._exchange(orders)
        again = {}
        for node, content in contents.items():
            if isinstance(content, Trouble) and content.kind == "forgotten":
                lost = set(content.clients) & set(orders[node].clients)
                failures += [Failure(k, "memory lost", "it starts again from the beginning") for k in sorted(lost)]
                again[node] = self._work(calls, orders[node].clients, lost)
        orders |= again
        contents |= self._exchange(again) if again else {}
        parts = []
        for node, content in contents.items():
            ks = orders[node].clients
            trouble = content if isinstance(content, Trouble) else _misfit(content, calls, len(ks))
            if trouble is None:
                part = Part(ks, content, tuple(() if s.memory is None else s.memory.after for s in orders[node].steps))
                parts.append(part)
            else:
                failures += [Failure(k, trouble.kind, trouble.reason) for k in ks]
        return self._remembering(*self._agreeing(calls, parts, failures))

    def _agreeing(
        self, calls: Sequence[Call], parts: list[Part], failures: list[Failure]
    ) -> tuple[list[Part], list[Failure]]:
        """The parts whose results have the form of most; with as many of another, the form that was seen before."""
        forms = [tuple(_form(done.values) for done in part.done) for part in parts]
        votes: Counter[Any] = Counter()
        for form, part in zip(forms, parts, strict=True):
            votes[form] += len(part.clients)
        works = tuple(name_of(call.work) for call in calls)
        first, second = (*votes.most_common(2), (None, 0), (None, 0))[:2]
        usual = first[0] if first[1] > second[1] else self._forms.get(works)
        if len(votes) == 1:
            self._forms[works] = usual
        odd = [part for form, part in zip(forms, parts, strict=True) if form != usual]
        reason = "its result has another form than that of the others"
        failures = failures + [Failure(k, "rejected", reason) for part in odd for k in part.clients]
        return [part for form, part in zip(forms, parts, strict=True) if form == usual], failures

    def _remembering(self, parts: list[Part], failures: list[Failure]) -> tuple[list[Part], list[Failure]]:
        """Without clients whose new memory is not finite; they keep what they had."""
        kept = []
        for part in parts:
            fine = [all(not done.kept or done.kept[i] for done in part.done) for i in range(len(part.clients))]
            bad = [k for k, ok in zip(part.clients, fine, strict=True) if not ok]
            failures += [Failure(k, "rejected", "not finite") for k in bad]
            if all(fine):
                kept.append(part)
            elif any(fine):
                which = torch.tensor(fine)
                kept.append(
                    Part(
                        tuple(k for k, ok in zip(part.clients, fine, strict=True) if ok),
                        tuple(done._replace(values=rows(done.values, which)) for done in part.done),
                        tuple(tuple(v for v, ok in zip(made, fine, strict=False) if ok) for made in part.versions),
                    )
                )
        return kept, failures

    def _work(self, calls: Sequence[Call], ks: tuple[int, ...], lost: set[int]) -> Order:
        """The order of a phase to the node of these clients; those who lost their memory begin anew."""
        steps = tuple(self._step(call, ks, lost) for call in calls)
        return self._order("run", ks, steps, self._alive(ks))

    def _alive(self, ks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """By client, the versions of its memory that are still of use."""
        used = [versions for versions in in_use() if len(versions) == self.clients]
        alive = torch.stack(used, 1)[list(ks)].tolist() if used else [[]] * len(ks)
        return tuple(tuple(sorted({*some} - {0})) for some in alive)

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
        named = digest(step._replace(memory=Past(before, (), start)))
        return step._replace(memory=Past(before, tuple(digest((named, k)) for k in ks), start))

    def _handle(self, memory: Memory) -> Handle:
        inside = held(memory)
        if isinstance(inside, Handle):
            return inside
        return Handle(inside, torch.zeros(self.clients, dtype=torch.int64, device=self.device))

    # orders and replies

    def _order(
        self,
        kind: str,
        clients: tuple[int, ...] = (),
        steps: tuple[Step, ...] = (),
        alive: tuple[tuple[int, ...], ...] | None = None,
    ) -> Order:
        self._number += 1
        return Order(PROTOCOL, self._number, kind, self.run, clients, steps, alive or ((),) * len(clients))

    def _exchange(self, orders: Mapping[Address, Order]) -> dict[Address, Any]:
        """What each of these nodes answered, or the trouble with it. Lost ones are asked again while there is time."""
        contents: dict[Address, Any] = {}
        waiting, deadline = dict(orders), monotonic() + self.policy.timeout
        for _ in range(1 + self.policy.retries):
            if not waiting:
                break
            contents |= self._once(waiting, max(0.1, deadline - monotonic()))
            listed = self.transport.nodes()
            lost = [n for n in waiting if isinstance(contents[n], Trouble) and contents[n].kind == "lost"]
            waiting = {n: orders[n] for n in lost if n in listed} if monotonic() < deadline else {}
        for node, content in contents.items():
            if isinstance(content, Trouble) and content.kind in ("lost", "timeout"):
                self._silent[node] = -math.inf
        return contents

    def _once(self, orders: Mapping[Address, Order], timeout: float) -> dict[Address, Any]:
        """One exchange; on the side, whoever is new or was silent is asked who it is, without waiting for it."""
        sent = {node: message(order) for node, order in orders.items()}
        asides = {node: message(self._order("whoami")) for node in self._unknown() if node not in sent}
        answers = self.transport.exchange(sent | asides, tuple(sent), timeout)
        down = sum(map(len, sent.values())) + sum(map(len, asides.values()))
        up = sum(len(data) for _, data in answers if isinstance(data, bytes))
        self.book.ledger.carried(exchanges=1 if sent else 0, up=up, down=down)
        contents: dict[Address, Any] = {}
        for node, data in answers:
            reply = self._read(data)
            if isinstance(reply, Trouble):
                if node in orders:
                    contents.setdefault(node, reply)
            elif isinstance(reply.content, Card):
                self._declared(node, reply.content)
            elif node in orders and reply.number == orders[node].number:
                contents[node] = reply.content
            elif reply.number == 0 and node in orders:
                contents[node] = reply.content  # it could not read the order
        late = Trouble("timeout", f"no reply within {self.policy.timeout:g} s")
        return {node: contents.get(node, late) for node in orders}

    def _read(self, data: bytes | Trouble) -> Reply | Trouble:
        if isinstance(data, Trouble):
            return data
        try:
            reply = decode(data, self.names, self.limits)
        except CodecError as error:
            return Trouble("rejected", f"its reply is no message: {error}")
        if not isinstance(reply, Reply) or not isinstance(reply.number, int):
            return Trouble("rejected", "its reply is something else")
        if isinstance(reply.content, Trouble) and not _sound(reply.content):
            return Trouble("rejected", "its reply is something else")
        return reply

    # who is where

    def _look_around(self) -> None:
        """Notice nodes that have gone."""
        listed = self.transport.nodes()
        for k, home in list(self._homes.items()):
            if home.node not in listed:
                del self._homes[k]
                self._silent.pop(home.node, None)

    def _unknown(self) -> list[Address]:
        """Nodes that have not said who they are, or fell silent, and were not asked lately."""
        now = monotonic()
        known = {home.node for home in self._homes.values()}
        asking = [
            node
            for node in self.transport.nodes()
            if (node not in known or node in self._silent)
            and now - self._silent.get(node, -math.inf) > self.policy.timeout
        ]
        for node in asking:
            self._silent[node] = now
        return asking

    def _declared(self, node: Address, card: Card) -> None:
        """Let a node in as the home of its clients, or say why not."""
        known = self.transport.nodes().get(node)
        reason = _wrong(card, self.clients)
        if reason is None and known is not None and card.clients != (known,):
            reason = f"its key belongs to client {known}, and it declares {list(card.clients)}"
        others = [home.card for home in self._homes.values() if home.node != node]
        if reason is None and others and others[0].columns != card.columns:
            reason = f"its rows have columns {card.columns}, those of others {others[0].columns}"
        for k in card.clients if reason is None else ():
            home = self._homes.get(k)
            if home is not None and home.node != node and home.node not in self._silent:
                reason = f"client {k} is there already"
        if reason is not None:
            claimed = [k for k in card.clients if isinstance(k, int)] if isinstance(card.clients, tuple) else []
            named = [k for k, home in self._homes.items() if home.node == node] or claimed or [-1]
            self._notes.append(Failure(named[0], "refused", f"a node was not let in: {reason}"))
            return
        for k, count in zip(card.clients, card.rows, strict=True):
            if int(self._sizes[k]) and (k not in self._homes or node in self._silent):
                self._notes.append(Failure(k, "rejoined", "it is there again"))
            self._homes[k] = Home(node, card)
            self._sizes[k] = count
        self._silent.pop(node, None)

    def _by_node(self, clients: list[int]) -> dict[Address, tuple[int, ...]]:
        found: dict[Address, list[int]] = {}
        for k in clients:
            found.setdefault(self._homes[k].node, []).append(k)
        return {node: tuple(ks) for node, ks in found.items()}

    def _wait(self, enough: Callable[[], bool]) -> None:
        """Until enough clients are there, or patience ends."""
        deadline = monotonic() + self.policy.patience
        while True:
            self._look_around()
            self._once({}, 0.0)
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

    def _drained(self) -> list[Failure]:
        notes, self._notes = self._notes, []
        return notes


_NOBODY = Stack((torch.zeros(1),), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))


def _are_done(content: Any, steps: int) -> bool:
    return isinstance(content, tuple) and len(content) == steps and all(isinstance(d, Done) for d in content)


def _misfit(content: Any, calls: Sequence[Call], clients: int) -> Trouble | None:
    """What is wrong with the results of a node: each step's must be tensors with a row a client, or nothing."""
    if not _are_done(content, len(calls)):
        return Trouble("rejected", "its reply is something else")
    for call, done in zip(calls, content, strict=True):
        if done.kept != () and not (isinstance(done.kept, tuple) and all(type(k) is bool for k in done.kept)):
            return Trouble("rejected", "its reply is something else")
        if len(done.kept) != (0 if call.memory is None else clients):
            return Trouble("rejected", "its reply says nothing of its memory")
        if not _has_rows(done.values, clients):
            return Trouble("rejected", "its result is no tensor with a row a client")
    return None


def _has_rows(values: Tree, clients: int) -> bool:
    leaves = [leaf for leaf in tree_flatten(values)[0] if leaf is not None]
    return all(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == clients for leaf in leaves)


def _form(values: Tree) -> Any:
    """Structure, types and shapes of a result, without the number of clients."""
    leaves, structure = tree_flatten(values)
    return str(structure), tuple(None if leaf is None else (leaf.dtype, tuple(leaf.shape[1:])) for leaf in leaves)


def _sound(trouble: Trouble) -> bool:
    words = isinstance(trouble.kind, str) and isinstance(trouble.reason, str)
    return words and isinstance(trouble.clients, tuple) and all(isinstance(k, int) for k in trouble.clients)


def _wrong(card: Card, clients: int) -> str | None:
    """Why a declaration cannot be."""
    numbers = isinstance(card.clients, tuple) and isinstance(card.rows, tuple)
    if not numbers or not all(type(v) is int for v in (*card.clients, *card.rows)):
        return "its declaration has a wrong form"
    if not card.clients or len(card.clients) != len(card.rows) or len(set(card.clients)) != len(card.clients):
        return "its declaration has a wrong form"
    if not all(0 <= k < clients for k in card.clients):
        return f"it declares client {max(card.clients)}, and there are 0 … {clients - 1}"
    if not all(0 < count < 2**40 for count in card.rows):
        return "it declares a number of rows that cannot be"
    return None
