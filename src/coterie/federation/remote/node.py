"""A node: the side of the clients, without any transport. `Node.handle` takes the bytes of an order and returns those
of the reply, whatever comes; a transport only carries them.

A node holds the rows of one client or more. It runs works of admitted modules only and within its policy, keeps client
memory in versions that never change, and repeats its last reply when an order is repeated.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from coterie.errors import WorkError
from coterie.federation.api import Call
from coterie.federation.local import LocalEngine
from coterie.federation.mapped import part
from coterie.federation.points import batches_checked, counted
from coterie.federation.remote.codec import WORDS, CodecError, Limits, Names, decode, encode
from coterie.federation.remote.disclosures import Disclosures
from coterie.federation.remote.messages import (
    CLIENT_ERROR,
    FORGOTTEN,
    REASON,
    REFUSED,
    SECURE,
    CompressOrder,
    Declaration,
    Done,
    MemoryVersions,
    Order,
    Reply,
    Step,
    Trouble,
    order_fault,
)
from coterie.federation.remote.noise import hidden
from coterie.federation.remote.policy import NodePolicy, PolicyError, named_works, stopped_after
from coterie.federation.remote.sums import Sums
from coterie.federation.secure import Refusal
from coterie.federation.secure.encoding import Unfit
from coterie.federation.shards import Shard, Stack
from coterie.federation.stages.compression import Compression
from coterie.federation.tree import Size, Tree, joined, row, size, stack, tensors, tree_flatten, tree_map
from coterie.federation.work import Each, Memory, Static, Work, name_of
from coterie.numerics import Draw

RUNS = 8  # a node keeps the memory of so many runs
RECALL = "recall"
FLOAT = 4  # bytes of a number where the model is not known


class Refused(Exception):
    """An order that this node does not carry out, with the trouble that is reported."""

    def __init__(self, kind: str, reason: str, clients: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.trouble = Trouble(kind, reason[:REASON], clients)


class Record(NamedTuple):
    """An order as a node's journal has it: what was asked, what left the node for it, and how it ended.

    Args:
        run: the run that asked.
        cause: the name of the work, or the kind of the order.
        received: bytes of the order.
        sent: bytes of the reply.
        outcome: "done", or why nothing was done.
    """

    run: str
    cause: str
    received: int
    sent: int
    outcome: str


class Store:
    """Client memory by run, client and version; with a folder, kept there too, so that it outlives the process."""

    def __init__(self, folder: Path | None = None, names: Names = Names()) -> None:  # noqa: B008
        self.folder, self.names = folder, names
        self._kept: dict[str, dict[tuple[int, int], Tree]] = {}

    def get(self, run: str, client: int, version: int) -> Tree | None:
        """The memory of that version, or None where it is lost."""
        found = self._kept.get(run, {}).get((client, version))
        if found is None and self.folder is not None:
            with suppress(OSError, CodecError):  # lost, which is reported to the server
                (found,) = decode(self._path(run, client, version).read_bytes(), self.names)
        return found

    def put(self, run: str, client: int, version: int, memory: Tree) -> None:
        """Keep a version."""
        self._kept.setdefault(run, {})[client, version] = memory
        if self.folder is not None:
            path = self._path(run, client, version)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(encode((memory,)))
            os.replace(name, path)

    def keep(self, run: str, versions: Mapping[int, set[int]]) -> None:
        """Forget all versions of these clients but those named, and runs that are long over."""
        here = self._kept.pop(run, {})  # the run at work comes last
        self._kept[run] = {key: value for key, value in here.items() if key[1] in versions.get(key[0], {key[1]})}
        while len(self._kept) > RUNS:
            self._kept.pop(next(iter(self._kept)))
        if self.folder is None or not (self.folder / run).is_dir():
            return
        for path in (self.folder / run).glob("*.memory"):
            client, _, version = path.stem.partition("-")
            if int(version) not in versions.get(int(client), {int(version)}):
                path.unlink(missing_ok=True)
        _without_old_runs(self.folder)

    def _path(self, run: str, client: int, version: int) -> Path:
        assert self.folder is not None
        return self.folder / run / f"{client}-{version}.memory"


def _without_old_runs(folder: Path) -> None:
    runs = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for old in runs[:-RUNS]:
        for path in old.iterdir():
            path.unlink(missing_ok=True)
        old.rmdir()


@dataclass(frozen=True)
class Numbered(Draw):
    """Draws for clients that stand in a row here but are known by their ids."""

    ids: Tensor

    def client(self, ids: int | Tensor) -> Draw:
        """The draws of the client at that place, or at each of some places."""
        return Draw(self.key).client(self.ids[ids])


@dataclass
class Node:
    """The rows and the memory of some clients, behind `handle`.

    Args:
        engine: the rows, one part of its stacks per client.
        clients: the numbers of these clients, in the order of the parts.
        names: the works and named tuples that an order may name.
        limits: how large an order may be.
        store: where client memory is kept.
        shares_memory: whether the server may ask for client memory, for its records.
        policy: what a server may ask for.
        journal: receives every order and its reply.
        model: how large the model is; nothing where that is not known.
    """

    engine: LocalEngine
    clients: tuple[int, ...]
    names: Names = field(default_factory=Names)
    limits: Limits = field(default_factory=Limits)
    store: Store = field(default_factory=Store)
    shares_memory: bool = False
    policy: NodePolicy = field(default_factory=NodePolicy)
    journal: Callable[[Record], None] | None = None
    model: Size = field(default_factory=Size)
    _last: tuple[bytes, bytes] | None = None

    def __post_init__(self) -> None:
        self._disclosures = Disclosures(self.store.folder)
        self._sums = Sums(self._disclosures)

    def handle(self, data: bytes) -> bytes:
        """The reply to an order. Never raises: what goes wrong is a reply too."""
        if self._last is not None and data == self._last[0]:
            self._note(None, data, self._last[1], "repeated")
            return self._last[1]
        order: Order | None = None
        try:
            order = self._order(data)
            reply = encode(Reply(order.number, self._content(order)))
            self._last = (data, reply)
            self._note(order, data, reply, "done")
            return reply
        except Refused as refused:
            trouble = refused.trouble
        except (CodecError, PolicyError) as error:
            trouble = Trouble(REFUSED, str(error)[:REASON])
        except Exception as error:  # a work of the user's may fail in any way; the server shall know, and go on
            own = error.__cause__ if isinstance(error, WorkError) and error.__cause__ is not None else error
            trouble = Trouble(CLIENT_ERROR, self._reason(own)[:REASON])
        reply = encode(Reply(0 if order is None else order.number, trouble))
        self._note(order, data, reply, trouble.reason)
        return reply

    def _reason(self, error: BaseException) -> str:
        """The report of an error in a work to the server, which knows the work and the client."""
        text = "" if self.policy.secure or self.policy.epsilon else (str(error).splitlines() or [""])[0]
        return f"{type(error).__name__}: {text}"  # a text may hold values

    def _note(self, order: Order | None, data: bytes, reply: bytes, outcome: str) -> None:
        if self.journal is None:
            return
        asked = ("", "(not read)") if order is None else (order.run, order.step.work if order.step else order.kind)
        self.journal(Record(*asked, len(data), len(reply), outcome))

    def _order(self, data: bytes) -> Order:
        if len(data) > self.policy.message:
            raise PolicyError(
                f"an order of {len(data)} bytes exceeds message = {self.policy.message}; raise message in the policy"
            )
        limits = self.limits._replace(bytes=min(self.limits.bytes, self.policy.message))
        order: Order = decode(data, self.names, limits)
        if (fault := order_fault(order)) is not None:
            raise Refused(REFUSED, fault)
        if order.kind != "whoami" and (unknown := set(order.clients) - set(self.clients)):
            raise Refused(REFUSED, f"this node does not hold client {min(unknown)}")
        return order

    def _content(self, order: Order) -> Any:
        if order.kind == "whoami":
            return self.declaration()
        if len(order.alive) != len(order.clients) or not order.clients:
            raise Refused(REFUSED, "versions must be named for every client")
        if order.kind == RECALL:
            return self._recalled(order)
        if order.kind in SECURE:
            return self._summed(order)
        if order.kind != "run" or order.step is None:
            raise Refused(REFUSED, f"{order.kind[:40]!r} is nothing that a node can do")
        done = self._run(order, order.step)
        if self.policy.secure and not order.step.at_target:
            self._disclosures.show_numbers(
                order, self._numbers(done.values, len(order.clients)), self.policy, self.model
            )
        return done

    def _numbers(self, values: Tree, clients: int) -> int:
        """How many numbers of the model's kind each client shows in stacked results, by their bits: two in one count
        twice."""
        width = self.model.bytes // self.model.floats if self.model.floats else FLOAT
        return -(-size(values).bytes // (width * clients))

    def _run(self, order: Order, step: Step) -> Done:
        """The result of a step, where the policy admits it; what clients remember is kept."""
        work = self._admitted(order, step)
        if not step.at_target:
            self._disclosures.spend(order.noise, self.policy)
        enough = partial(self.policy.admit_batch, name_of(work))
        with stopped_after(self.policy.seconds), batches_checked(enough), counted() as points:
            done = self._done(order, step, work)._replace(points=points.rows)
        errors = None if order.compress is None else order.compress.errors
        made = [past.after for past in (step.memory, errors) if past is not None]
        alive = zip(order.clients, order.alive, strict=True)
        self.store.keep(order.run, {k: {*versions, *(new[i] for new in made)} for i, (k, versions) in enumerate(alive)})
        return done

    def _summed(self, order: Order) -> Any:
        """The answer to a question of a secure sum: bytes, or a result whose numbers are masked."""
        done: list[Done] = []

        def run() -> Tree:
            assert order.step is not None
            done.append(self._run(order, order.step))
            if not all(done[0].kept):
                raise Unfit("not finite")
            return done[0].values

        if order.kind != "secure-masked":
            self.policy.admit_method(order.method, None)
            self._disclosures.count_order(order.run, order.round, self.policy)
        elif self.policy.secure:
            self._disclosures.check_faults(order, self.policy, self.model)
        try:
            answer = self._sums.answer(order, run, self.policy.partners)
        except Refusal as refusal:
            if isinstance(refusal, Unfit):
                self._disclosures.note_fault(order)
            raise Refused(REFUSED, str(refusal)) from None
        return done[0]._replace(values=answer) if done else answer

    def _admitted(self, order: Order, step: Step) -> Work:
        """The work of a step, where the policy admits it and the works that it names; counted."""
        work = self.names.work(step.work)
        self.policy.admit_method(order.method, name_of(work))
        self.policy.admit(name_of(work), step.static, self._fewest_rows(order, step))
        for name in named_works(step.static):
            if type(name) is not str:
                raise Refused(REFUSED, "a setting that names a work is no text")
            self.policy.admit(name_of(self.names.work(name)), {})
        self.policy.admit_parameters(name_of(work), (step.shared, step.memory and step.memory.start))
        if step.at_target:
            self.policy.admit_exact(f"the target's reply to {name_of(work)}")
        self._disclosures.count_order(order.run, order.round, self.policy)
        return work

    def _fewest_rows(self, order: Order, step: Step) -> int | None:
        """The fewest rows of any client, or of the target, that the step uses."""
        if step.at_target:
            target = self.engine.target
            parts = [] if target is None else [part for part in (target.train, target.valid) if part is not None]
            return min((int(part.count) for part in parts), default=None)
        stacks = [part for part in (self.engine.train, self.engine.valid) if part is not None]
        return min(int(part.counts[self._places(order)].min()) for part in stacks)

    def _places(self, order: Order) -> Tensor:
        """Where the clients of an order stand among those of this node."""
        position = {k: i for i, k in enumerate(self.clients)}
        return self.engine.sizes.new_tensor([position[k] for k in order.clients])

    def declaration(self) -> Declaration:
        """What this node declares to the server."""
        columns = tuple((WORDS[c.dtype], tuple(c.shape[1:])) for c in self.engine.train.columns)
        rows = tuple(self.engine.train.counts.tolist())
        return Declaration(self.clients, rows, columns, self.engine.target is not None, self.shares_memory)

    def _recalled(self, order: Order) -> Tree:
        if not self.shares_memory:
            raise Refused(REFUSED, "this node does not share client memory; start it with shares_memory=True")
        self.policy.admit_method(order.method, None)
        self.policy.admit(RECALL, {})
        self.policy.admit_exact("what a client remembers")
        self._disclosures.count_order(order.run, order.round, self.policy)
        if not all(order.alive):
            raise Refused(REFUSED, "a version must be named for every client")
        return stack([self._memory(order.run, k, v[0]) for k, v in zip(order.clients, order.alive, strict=True)])

    def _done(self, order: Order, step: Step, work: Work) -> Done:
        static = Static(**step.static).resolved_by(self.names.work)
        key = self.engine.sizes.new_tensor(step.draw)
        shared = self._here(step.shared)
        if step.at_target:
            return Done(self.engine.execute_at_target(Call(work, shared, None, static, Draw(key))), ())
        places = self._places(order)
        _check_rows(shared, len(places))
        past = step.memory
        memory = None if past is None else Memory(self._here(self._past(order, past)))
        draw = Numbered(key, self.engine.sizes.new_tensor(order.clients))
        everyone = torch.arange(len(places), device=places.device)
        call = Call(work, shared, memory, static, draw)
        chunks = list(self._at(places).execute(call, everyone))
        values = joined([chunk.values for chunk in chunks])
        if order.noise is not None:
            values = hidden(call, everyone, values, order.noise, summed=order.secure is not None)
        if order.compress is not None:
            values = self._compressed(order, order.compress, call, values)
        if past is None:
            return Done(values, ())
        news = [row(c.memory, i) for c in chunks for i in range(len(c.ids))]
        fine = tuple(all(bool(torch.isfinite(t).all()) for t in tensors(new)) for new in news)
        for client, version, new, ok in zip(order.clients, past.after, news, fine, strict=True):
            if ok:
                self.store.put(order.run, client, version, tree_map(lambda t: t.cpu().clone(), new))
        return Done(values, fine)

    def _compressed(self, order: Order, asked: CompressOrder, call: Call, values: Tree) -> Tree:
        """What travels of results; what is not understood of it is kept for the next ones."""
        compression = Compression(asked.name, asked.ratio, asked.feedback)  # type: ignore[arg-type]  # checked
        cut = [i for i, count in enumerate(compression.cuts(call, values)) if count]
        everyone = torch.arange(len(order.clients), device=self.engine.sizes.device)
        leaves = tree_flatten(values)[0]
        start = tuple(leaves[i].new_zeros(len(leaves[i]), leaves[i][0].numel()) for i in cut)
        past = asked.errors
        before: Tree = () if past is None else self._here(self._past(order, past._replace(start=start)))
        if past is not None and [rows.shape for rows in before] != [rows.shape for rows in start]:
            raise Refused(REFUSED, "what was lost of earlier uploads does not fit this one")
        done = compression.compressed(call, everyone, values, dict(zip(cut, before, strict=False)))
        for i, (client, version) in enumerate(zip(order.clients, () if past is None else past.after, strict=False)):
            self.store.put(order.run, client, version, tuple(done.errors[j][i].cpu().clone() for j in cut))
        return done.messages

    def _past(self, order: Order, past: MemoryVersions) -> Tree:
        """Client memory of the versions that the order names, stacked."""
        found, lost = [], []
        for i, (client, version) in enumerate(zip(order.clients, past.before, strict=True)):
            if version == 0:
                found.append(row(past.start, i))
            elif (kept := self.store.get(order.run, client, version)) is not None:
                found.append(kept)
            else:
                lost.append(client)
        if lost:
            raise Refused(FORGOTTEN, "the memory of the last exchange is gone", tuple(lost))
        return stack(found)

    def _memory(self, run: str, client: int, version: int) -> Tree:
        kept = self.store.get(run, client, version)
        if kept is None:
            raise Refused(FORGOTTEN, "the memory of the last exchange is gone", (client,))
        return kept

    def _at(self, places: Tensor) -> LocalEngine:
        """The engine for some of the clients, numbered from 0."""
        if len(places) == len(self.clients) and places.tolist() == list(range(len(places))):
            return self.engine
        valid = None if self.engine.valid is None else self.engine.valid.shared_by(places)
        return replace(self.engine, train=self.engine.train.shared_by(places), valid=valid)

    def _here(self, tree: Tree) -> Tree:
        device = self.engine.sizes.device

        def moved(leaf: Any) -> Any:
            if isinstance(leaf, Each):
                return Each(leaf.rows.to(device))
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf

        return tree_map(moved, tree)


def _check_rows(shared: Tree, clients: int) -> None:
    def check(leaf: Any) -> None:
        if isinstance(leaf, Each) and len(leaf.rows) != clients:
            raise Refused(REFUSED, f"there are {len(leaf.rows)} rows for {clients} clients")

    tree_map(check, shared)


def part_of(whole: Stack | None, clients: Iterable[int]) -> Stack | None:
    """The rows of some clients, without those of the others; views where they lie one after the other."""
    if whole is None:
        return None
    which = torch.tensor(tuple(clients), device=whole.counts.device)
    offsets, counts = whole.offsets[which], whole.counts[which]
    padding = whole.capacity, whole.ragged
    if bool((offsets[1:] == (offsets + counts)[:-1]).all()):
        first, last = int(offsets[0]), int(offsets[-1] + counts[-1])
        return Stack(tuple(part(c, first, last - first) for c in whole.columns), offsets - offsets[0], counts, padding)
    parts = [whole.client(k).columns for k in which.tolist()]
    columns = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    return Stack(columns, counts.cumsum(0) - counts, counts, padding)


class HasRows(Protocol):
    """What a node needs of a problem: its oracles, and the clients' training and validation rows."""

    @property
    def task(self) -> Any:
        """The oracles."""

    @property
    def train(self) -> Stack:
        """The clients' training rows."""

    @property
    def valid(self) -> Stack | None:
        """The clients' validation rows, where they have some."""


def node_for(problem: HasRows, clients: tuple[int, ...], *, target: Shard | None = None, **options: Any) -> Node:
    """The node of these clients of a problem: their rows, and nobody else's.

    Args:
        problem: whose rows and oracles they are.
        clients: the numbers of the clients, ascending.
        target: the target's shard, where one of them is the target.
        options: `mode` and `chunk` of the local engine, and what `Node` takes.
    """
    train, valid = part_of(problem.train, clients), part_of(problem.valid, clients)
    assert train is not None
    mode, chunk = options.pop("mode", "sequential"), options.pop("chunk", None)
    options.setdefault("model", size(getattr(problem, "start", None)))
    return Node(LocalEngine(problem.task, train, valid, target, mode, chunk), clients, **options)
