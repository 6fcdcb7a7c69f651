"""The federation: the one object with effects. It moves values between server and clients, and counts them.

Server code reaches client values by three up-verbs only: `mean`, `gather` and `ask_target`. Each call is one upload
barrier, one round in the ledger. `sample` narrows the federation to an active set. The verbs are the same for every
engine; an engine only runs a work at some clients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from coterie.errors import NoClients, UsageError, clean
from coterie.federation.events import known
from coterie.federation.ledger import Ledger
from coterie.federation.reduce import BlockedSum
from coterie.federation.tree import Size, Tree, joined, mapped, put, rows, size, tensors, tree_flatten, tree_unflatten
from coterie.federation.work import Each, Memory, MovedFrom, Static, Update, Work, info_of, name_of
from coterie.numerics import Draw

TargetAt = Literal["server"] | int
"""Where the target's rows are: at the server, or at the client of this number."""
NOTHING = 1e-9  # an update so much shorter than the median of its phase is 0
SAME = 1e-6  # updates that differ by so much of their length are equal
Key = TypeVar("Key")


class Call(NamedTuple):
    """One work to be run at many clients. Rows of `Each` values and of memory are numbered by client id.

    Args:
        work: the work.
        shared: what every client is sent.
        memory: what the clients remember, where the work uses it.
        static: the work's settings.
        draw: the randomness of the call.
        round: the number of the round, from 1 on; 0 where nobody counts.
    """

    work: Work
    shared: Tree
    memory: Memory | None
    static: Static
    draw: Draw
    round: int = 0

    def updates(self, ids: Tensor, values: Tree, *, reports: bool = False) -> Tree:
        """What these clients contribute, as their work declares it: results, or differences from where they started.

        Args:
            ids: the clients, [a].
            values: their results, stacked.
            reports: whether leaves that are no update are there as they are; else they are 0 (NaN where not finite).
        """

        def update(kind: Update, leaf: Any) -> Any:
            if kind is None and not reports and isinstance(leaf, Tensor):
                return leaf * 0 if leaf.is_floating_point() else torch.zeros_like(leaf)
            return leaf - self._start(kind, ids) if isinstance(kind, MovedFrom) else leaf

        return self._leafwise(update, values)

    def results(self, ids: Tensor, updates: Tree, *, reports: bool = False) -> Tree:
        """What clients with these updates reply: the inverse of `updates`. Without `reports`, None stands for them."""

        def result(kind: Update, leaf: Any) -> Any:
            if kind is None and not reports:
                return None
            return leaf + self._start(kind, ids) if isinstance(kind, MovedFrom) else leaf

        return self._leafwise(result, updates)

    def changed(
        self, ids: Tensor, values: Tree, stage: Callable[[list[Tensor]], list[Tensor]], *, reports: bool = False
    ) -> Tree:
        """The results after a stage changed the updates; an entry that it left as it was keeps every bit.

        Args:
            ids: the clients, [a].
            values: their results, stacked.
            stage: from the leaves of the updates to those that it makes of them.
            reports: whether the stage acts on leaves that are no update, too.
        """
        before, structure = tree_flatten(self.updates(ids, values, reports=reports))
        after = stage(before)
        new = tree_flatten(self.results(ids, tree_unflatten(after, structure), reports=reports))[0]
        old = tree_flatten(values)[0]
        return tree_unflatten(
            [
                value if result is None or update is now else torch.where(update == now, value, result)
                for value, result, update, now in zip(old, new, before, after, strict=True)
            ],
            structure,
        )

    def _start(self, kind: MovedFrom, ids: Tensor) -> Tensor:
        start = kind.start(self.shared)
        return start.of(ids) if isinstance(start, Each) else start

    def _leafwise(self, f: Callable[[Update, Any], Any], values: Tree) -> Tree:
        leaves, structure = tree_flatten(values)
        kinds = info_of(self.work).kinds(values)
        return tree_unflatten([f(kind, leaf) for kind, leaf in zip(kinds, leaves, strict=True)], structure)


class Failure(NamedTuple):
    """A client that is missing from a phase, and why."""

    client: int
    kind: str
    reason: str


class Replies(NamedTuple):
    """Results of some clients, ascending by id: stacked values, stacked new memory, and who failed."""

    ids: Tensor
    values: Tree
    memory: Tree
    failures: tuple[Failure, ...] = ()
    sent: Size | None = None  # what travelled, where that is not the values as they are

    def only(self, kept: Tensor) -> "Replies":
        """The replies that a mask or an index chooses; failures and traffic are not theirs alone."""
        return Replies(self.ids[kept], rows(self.values, kept), rows(self.memory, kept))


class Engine(Protocol):
    """Where clients live."""

    @property
    def task(self) -> Any:
        """The problem's oracles."""

    @property
    def sizes(self) -> Tensor:
        """Rows of training data by client, [n]."""

    def execute(self, call: Call, ids: Tensor) -> Iterator[Replies]:
        """Run a work at these clients; replies come in chunks, ascending by id."""

    def execute_at_target(self, call: Call) -> Tree:
        """Run a work on the target's shard."""

    def remember(self, memory: Memory, parts: list[tuple[Tensor, Tree]]) -> Memory:
        """The memory after some clients changed theirs."""


def together(chunks: Iterable[Replies]) -> Iterator[Replies]:
    """All replies of a phase as one, in one layout whatever the chunks were; nothing where nobody answered."""
    replies = list(chunks)
    failures = tuple(failure for chunk in replies for failure in chunk.failures)
    answered = [chunk for chunk in replies if len(chunk.ids)]
    if answered:
        sent = None if answered[0].sent is None else sum((chunk.sent for chunk in answered if chunk.sent), Size())
        ids, values, memory = (joined([chunk[i] for chunk in answered]) for i in range(3))
        yield Replies(ids, values, memory, failures, sent)
    elif failures:
        yield replies[0]._replace(failures=failures)


@dataclass(frozen=True)
class Screening:
    """What a client's update must pass; one that is not finite never does.

    Args:
        norm: the largest norm of an update that is accepted; None accepts all.
        clip: an update longer than this multiple of the median of its phase is shortened to that; None for never.
        trust: a client's declared size counts for at most this multiple of the median size; None believes all.
        copies: whether updates that are 0, or equal to another client's, are left out where replies are gathered.

    Example:
        >>> Screening(trust=2.0).sizes(torch.tensor([10, 10, 9000])).tolist()
        [10, 10, 20]
    """

    norm: float | None = None
    clip: float | None = None
    trust: float | None = None
    copies: bool = False

    def sizes(self, declared: Tensor) -> Tensor:
        """The sizes that are believed, [n]."""
        if self.trust is None:
            return declared
        return declared.clamp(max=max(1, int(self.trust * float(declared.double().median()))))

    def reasons(self, values: Tree) -> tuple[Tensor, list[str]]:
        """Which rows are fine, [a] bool; and for each row, why not."""
        if not tensors(values):  # a work that only changed memory
            return torch.ones((), dtype=torch.bool), []
        first = tensors(values)[0]
        finite = torch.ones(len(first), dtype=torch.bool, device=first.device)
        for leaf in _flat_rows(values):
            # a sum is finite unless a term is not, or the update is absurdly large: cheaper than testing each entry
            sums = torch.isfinite(leaf.sum(1))
            finite &= sums if bool(sums.all()) else sums | torch.isfinite(leaf).all(1)
        fine, norm = finite, torch.zeros(len(first))
        if self.norm is not None:
            norm = lengths(values)
            fine = finite & (norm <= self.norm)
        if bool(fine.all()):
            return fine, []
        texts = [
            "" if ok else (f"norm {float(norm[i]):.3g} above the limit {self.norm:g}" if is_finite else "not finite")
            for i, (ok, is_finite) in enumerate(zip(fine.tolist(), finite.tolist(), strict=True))
        ]
        return fine, texts

    def idle(self, call: Call, replies: Replies) -> list[Failure]:
        """Clients of a whole phase that do not help: their updates are 0, or those of clients before them.

        Where half of the updates are 0 nothing is there to compare with, and a single number may be equal by chance:
        then nobody is named. Rows are compared only where their lengths agree, so the cost is that of the lengths.
        """
        if not self.copies or not tensors(replies.values):
            return []
        updates = call.updates(replies.ids, replies.values)
        real = _flat_rows(updates)
        if sum(t.shape[1] for t in real) < 2:
            return []
        norms, ids = lengths(updates).double(), replies.ids.tolist()
        usual = float(norms.median())
        if usual == 0.0:
            return []
        zero = (norms <= NOTHING * usual).tolist()
        found = [Failure(ids[i], "zero update", "it does not help") for i, is_zero in enumerate(zero) if is_zero]
        original: dict[int, int] = {}
        order = norms.argsort(stable=True).tolist()
        for at, i in enumerate(order):
            for j in order[at + 1 :]:
                if zero[i] or zero[j] or float(norms[j] - norms[i]) > SAME * float(norms[j]):
                    break
                if all(float((t[i] - t[j]).norm()) <= SAME * float(norms[j]) for t in real):
                    first, later = min(i, j), max(i, j)
                    original[later] = min(first, original.get(later, first))
        copies = [Failure(ids[i], "duplicate update", f"of client {ids[j]}") for i, j in sorted(original.items())]
        return found + copies

    def shortened(self, call: Call, replies: Replies) -> tuple[Replies, list[Failure]]:
        """The replies of a whole phase with long updates cut, and whose they were.

        Directions are kept. Where half of the updates are 0 there is no length to compare with, and none is cut.
        """
        if self.clip is None or not tensors(replies.values):
            return replies, []
        updates = call.updates(replies.ids, replies.values)
        norms = lengths(updates)
        usual = norms.median()
        limit = self.clip * usual
        long = (norms > limit) & (limit > 0.0)
        if not bool(long.any()):
            return replies, []
        ids, factor = replies.ids[long], limit / norms[long]
        short = mapped(lambda t: scaled(t[long], factor), updates)
        values = put(replies.values, long, call.results(ids, short))
        cut = [
            Failure(client, "clipped", f"norm {norm:.3g} above {self.clip:g} times the median {usual:.3g}")
            for client, norm in zip(ids.tolist(), norms[long].tolist(), strict=True)
        ]
        return replies._replace(values=values), cut


def lengths(values: Tree) -> Tensor:
    """One norm per row, over all real tensors."""
    squares = [t.square().sum(1) for t in _flat_rows(values)]
    return torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(len(tensors(values)[0]))


def _flat_rows(values: Tree) -> list[Tensor]:
    """The real tensors of stacked values, each as a matrix with one row per client."""
    return [t.reshape(len(t), -1) for t in tensors(values) if t.is_floating_point()]


def scaled(rows: Tensor, factor: Tensor) -> Tensor:
    """Each row times its factor; whole numbers stay as they are."""
    return rows * factor.to(rows).reshape(-1, *(1,) * (rows.dim() - 1)) if rows.is_floating_point() else rows


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round.

    Args:
        probability: of each client, independently of the others; 1 for everybody.
        count: a fixed number of clients instead, drawn anew each round.

    Example:
        >>> Participation().draw(3, Draw.of(0)).tolist()
        [0, 1, 2]
    """

    probability: float = 1.0
    count: int | None = None

    def draw(self, n: int, draw: Draw) -> Tensor:
        """The active ids, ascending."""
        if self.count is not None:
            return draw.subset(n, min(self.count, n))
        everyone = torch.arange(n, device=draw.key.device)
        if self.probability >= 1.0:
            return everyone
        return everyone[draw.bernoulli(self.probability, n)]


class Gathered(NamedTuple):
    """Rows of those who answered, ascending by id."""

    rows: Tree
    ids: Tensor


@dataclass
class Book:
    """What all views of one federation share: the ledger and the events since the loop last looked."""

    ledger: Ledger = field(default_factory=Ledger)
    events: list[dict[str, Any]] = field(default_factory=list)
    idle: set[int] = field(default_factory=set)  # clients whose updates were 0 or copies

    def drain(self) -> list[dict[str, Any]]:
        """The events so far; afterwards there are none."""
        events, self.events = self.events, []
        return events


@dataclass(frozen=True)
class Federation:
    """A view on an engine's clients, narrowed to the active ones.

    Args:
        engine: where the clients are.
        ids: the active clients, ascending.
        book: the ledger and the events, which all views share.
        screening: what replies must pass.
        participation: who takes part in a round.
        target: where the target's rows are.
        round: the number of the round; 0 before the first.
        barriers: how many rounds a call counts for; none where it is a part of another one.

    Example:
        >>> from coterie.federation import Federation, LocalEngine
        >>> from coterie.methods.shared.works import gradient
        >>> from coterie.numerics import Draw
        >>> from coterie.problems import Context
        >>> from coterie.problems.catalogue.quadratic import quadratic
        >>> problem = quadratic(Context(0), clients=4, friends=2, dimension=3)
        >>> fed = Federation.on(LocalEngine(problem.task, problem.train, None, problem.target))
        >>> fed.mean(gradient, problem.start, draw=Draw.of(0), batch="all").shape
        torch.Size([3])
        >>> fed.gather(gradient, problem.start, draw=Draw.of(0), batch="all").rows.shape
        torch.Size([4, 3])
        >>> fed.sample(count=2, draw=Draw.of(0)).gather(gradient, problem.start, draw=Draw.of(1), batch=1).rows.shape
        torch.Size([2, 3])
        >>> fed.ledger.total.rounds
        3
    """

    engine: Engine
    ids: Tensor
    book: Book = field(default_factory=Book)
    screening: Screening = field(default_factory=Screening)
    participation: Participation = field(default_factory=Participation)
    target: TargetAt = "server"
    round: int = 0
    barriers: int = 1

    @staticmethod
    def on(engine: Engine, **options: Any) -> "Federation":
        """The federation of all clients of an engine.

        Args:
            engine: where the clients are.
            options: further fields of `Federation`, such as `participation`.
        """
        n = len(engine.sizes)
        target = options.get("target", "server")
        if target != "server" and not 0 <= target < n:
            raise UsageError(f"federation.target is client {target}, but there are clients 0 … {n - 1} only.")
        return Federation(engine, torch.arange(n, device=engine.sizes.device), **options)

    @property
    def n(self) -> int:
        """How many clients there are, active or not."""
        return len(self.engine.sizes)

    @property
    def sizes(self) -> Tensor:
        """Rows of training data by client, [n], as far as they are believed."""
        return self.screening.sizes(self.engine.sizes)

    @property
    def task(self) -> Any:
        """The problem's oracles; the server knows the model too, and without rows they tell nothing of any client."""
        return self.engine.task

    @property
    def ledger(self) -> Ledger:
        """What was moved so far."""
        return self.book.ledger

    def begin(self, round: int, draw: Draw) -> "Federation":
        """The view for one round: its number, and its active set."""
        return replace(self, round=round).sample(draw=draw)

    def sample(self, *, probability: float | None = None, count: int | None = None, draw: Draw) -> "Federation":
        """The view on a new active set; nothing is moved.

        Args:
            probability: of each client to take part, independently of the others.
            count: how many clients take part, instead of a probability. Without both, as the federation is set up.
            draw: the randomness; the active set depends on nothing else.

        Example:
            `fed.sample(count=10, draw=draw.phase("second")).mean(gradient, x, draw=draw, batch=32)`
        """
        if probability is None and count is None:
            chosen = self.participation
        else:
            chosen = Participation(1.0 if probability is None else probability, count)
        return replace(self, ids=chosen.draw(self.n, draw.phase("participation")))

    def parts(self, groups: Mapping[Key, Tensor]) -> Iterator[tuple[Key, "Federation"]]:
        """One view per group of clients, on those of them that are active; groups without any are left out.

        Args:
            groups: the client ids of each group. One call to each of the views counts as one round.
        """
        barriers = self.barriers
        for key, members in groups.items():
            active = self.ids[torch.isin(self.ids, members)]
            if len(active):
                yield key, replace(self, ids=active, barriers=barriers)
                barriers = 0

    def mean(
        self,
        work: Work,
        shared: Tree = None,
        *,
        weights: Tensor | None = None,
        memory: Memory | None = None,
        draw: Draw,
        **static: Any,
    ) -> Any:
        """Σ w_k r_k / Σ w_k over the clients that reply. One round.

        Args:
            work: what each active client runs; it returns r_k.
            shared: what every client is sent; values marked `Each` hold one row per client.
            weights: w_k, [n], numbered by client id; equal by default.
            memory: what the clients remember. The work then returns (result, new memory), and so does this.
            draw: the randomness; client k gets its own part of it.
            static: the settings of the work.

        Example:
            `fed.mean(local_sgd, x, weights=fed.sizes, draw=draw, step=0.1, steps=5, batch=32)` is FedAvg's round.
        """
        if weights is not None and len(weights) != self.n:
            raise ValueError(f"{len(weights)} weights for {self.n} clients; weights are numbered by client id")
        total: list[BlockedSum] = []
        structure = None
        mass = BlockedSum()
        parts: list[tuple[Tensor, Tree]] = []
        for replies in self._ask(work, shared, memory, draw, static):
            leaves, structure = tree_flatten(replies.values)
            total = total or [BlockedSum() for _ in leaves]
            w = None if weights is None else weights[replies.ids]
            mass.add(torch.ones(len(replies.ids), dtype=torch.float64) if w is None else w.cpu().double(), None)
            for partial, leaf in zip(total, leaves, strict=True):
                partial.add(leaf, w)
            parts.append((replies.ids, replies.memory))
        if not total or structure is None:
            raise NoClients(f"no client answered {name_of(work)}", name_of(work))
        whole = float(mass.total())
        if whole <= 0.0:
            raise NoClients(f"the clients that answered {name_of(work)} have no weight")
        result = tree_unflatten([partial.total() / whole for partial in total], structure)
        return result if memory is None else (result, self.engine.remember(memory, parts))

    def gather(
        self, work: Work, shared: Tree = None, *, memory: Memory | None = None, draw: Draw, **static: Any
    ) -> Any:
        """The results of all clients that reply, as rows ascending by client id, with the ids. One round.

        Args:
            work: what each active client runs.
            shared: what every client is sent; values marked `Each` hold one row per client.
            memory: what the clients remember. The work then returns (result, new memory), and this (rows, new memory).
            draw: the randomness; client k gets its own part of it.
            static: the settings of the work.

        Example:
            `gradients, ids = fed.gather(gradient, x, draw=draw, batch=32)`
        """
        chunks = list(self._ask(work, shared, memory, draw, static, whole=True))
        if not chunks:
            raise NoClients(f"no client answered {name_of(work)}", name_of(work))
        gathered = Gathered(joined([c.values for c in chunks]), torch.cat([c.ids for c in chunks]))
        if memory is None:
            return gathered
        return gathered, self.engine.remember(memory, [(c.ids, c.memory) for c in chunks])

    def ask_target(self, work: Work, shared: Tree = None, *, draw: Draw, **static: Any) -> Any:
        """The result of a work on the target's shard. One round with traffic where the target is a client, else none.

        Args:
            work: what is run on the target's rows.
            shared: what it is given.
            draw: the randomness.
            static: the settings of the work.

        Example:
            `fed.ask_target(goal_gradient, x, draw=draw, batch="all")` is the gradient of the validation loss at x.
        """
        cause = name_of(work)
        result = self.engine.execute_at_target(Call(work, shared, None, Static(**static), draw))
        if self.target != "server":
            self.ledger.record(cause, rounds=1, up=size(result), down=size(shared))
        return result

    def _ask(
        self,
        work: Work,
        shared: Tree,
        memory: Memory | None,
        draw: Draw,
        static: dict[str, Any],
        *,
        whole: bool = False,
    ) -> Iterator[Replies]:
        """Run a work at the active clients, bill it, and let through what passes the screening.

        Args:
            whole: whether the caller needs all replies at once anyway.
        """
        cause = name_of(work)
        if not len(self.ids):
            raise NoClients(f"no client is active for {cause}")
        self.ledger.record(cause, rounds=self.barriers, down=_downlink(shared, len(self.ids)))
        call = Call(work, shared, memory, Static(**static), draw, self.round)
        passed, copies = self._passed(call, cause), whole and self.screening.copies
        # replies that are compared are needed at once; else they may come chunk after chunk
        return self._compared(call, cause, passed, copies) if copies or self.screening.clip is not None else passed

    def _passed(self, call: Call, cause: str) -> Iterator[Replies]:
        """The replies without those that are not finite or too long."""
        for arrived in self.engine.execute(call, self.ids):
            replies = orderly(arrived)
            self._note(cause, replies.failures)
            if not len(replies.ids):
                continue
            self.ledger.record(cause, up=size(replies.values) if replies.sent is None else replies.sent)
            limited = self.screening.norm is not None
            fine, reasons = self.screening.reasons(
                call.updates(replies.ids, replies.values) if limited else replies.values
            )
            if not reasons:
                yield replies
                continue
            pairs = zip(replies.ids.tolist(), reasons, strict=True)
            self._note(cause, [Failure(client, "rejected", reason) for client, reason in pairs if reason])
            if bool(fine.any()):
                yield replies.only(fine)

    def _compared(self, call: Call, cause: str, passed: Iterator[Replies], copies: bool) -> Iterator[Replies]:
        """All replies of a phase at once: none is 0 or a copy, where that is asked for, or much longer than others."""
        for replies in together(passed):
            idle = self.screening.idle(call, replies) if copies else []
            idle_ids = torch.tensor([failure.client for failure in idle], device=replies.ids.device)
            self.book.idle.update(idle_ids.tolist())
            helpful = replies.only(~torch.isin(replies.ids, idle_ids)) if idle else replies
            short, cut = self.screening.shortened(call, helpful)
            self._note(cause, [*idle, *cut])
            yield short

    def _note(self, cause: str, failures: Iterable[Failure]) -> None:
        """Record a failure; kind and reason may be a client's own words."""
        at = {"round": self.round, "phase": cause}
        self.book.events += [
            {**at, "client": f.client, "event": known(f.kind), "reason": clean(f.reason)} for f in failures
        ]


def orderly(replies: Replies) -> Replies:
    """Replies ascending by client, each once, whatever the order in which they came; the first of several counts."""
    ids = replies.ids
    if len(ids) < 2 or bool((ids[1:] > ids[:-1]).all()):
        return replies
    order = ids.argsort(stable=True)
    first = torch.ones_like(order, dtype=torch.bool)
    first[1:] = ids[order][1:] != ids[order][:-1]
    twice = [Failure(k, "duplicate", "its reply came again; the first counts") for k in ids[order][~first].tolist()]
    return replies.only(order[first])._replace(failures=(*replies.failures, *twice), sent=replies.sent)


def _downlink(shared: Tree, clients: int) -> Size:
    """The size of a broadcast to so many clients: shared values whole, one row per client of `Each` values."""
    sent = [leaf.rows[0] if isinstance(leaf, Each) else leaf for leaf in tree_flatten(shared)[0]]
    return size(sent).times(clients)
