"""The federation: the one object with effects. It moves values between server and clients, and counts them.

Server code reaches client values by three up-verbs only: `mean`, `gather` and `ask_target`. Each call is one upload
barrier, one round in the ledger. `sample` narrows the federation to an active set. The verbs are the same for every
engine; an engine only runs a work at some clients.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from coterie.errors import NoClients, RunError, UsageError, clean
from coterie.federation.account import kind
from coterie.federation.api import Book, Call, Engine, Failure, Replies, TargetAt, orderly, together
from coterie.federation.events import known
from coterie.federation.ledger import Ledger
from coterie.federation.points import counted, with_points
from coterie.federation.reduce import BlockedSum
from coterie.federation.screening import Screening
from coterie.federation.secure import Secure
from coterie.federation.secure.summing import TooFew, mean_of, question_of, secure_sum
from coterie.federation.tree import Size, Tree, joined, size, tree_flatten, tree_unflatten
from coterie.federation.work import Each, Memory, Static, Work, info_of, name_of
from coterie.numerics import Draw
from coterie.numerics.tracing import assumed, recording

Key = TypeVar("Key")


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
        everyone = torch.arange(n, device=draw.key.device)
        if self.count is None and self.probability >= 1.0:
            return everyone
        draw = draw.phase("participation")
        if self.count is not None:
            return draw.subset(n, min(self.count, n))
        return everyone[draw.bernoulli(self.probability, n)]


class Revealing(RunError):
    """A `gather` that a secure run does not admit, because it asks for more than single numbers.

    Args:
        cause: the work that was asked for.
        numbers: how many numbers of each client it would show.
        allowed: how many the run admits.
    """

    def __init__(self, cause: str, numbers: int, allowed: int) -> None:
        super().__init__(
            f"{cause} shows {numbers} numbers of each client by itself, and federation.reveal = {allowed} allows "
            f"{allowed} in a secure run. Choose a method or setting that needs sums and single numbers only "
            "(`coterie list methods` says which can be secure), or leave out federation.secure."
        )


class Gathered(NamedTuple):
    """Rows of the replies, ascending by client id."""

    rows: Tree
    ids: Tensor


@dataclass(frozen=True)
class Federation:
    """A view on an engine's clients, narrowed to the active ones.

    Args:
        engine: where the clients are.
        ids: the active clients, ascending.
        book: the ledger and the events, which all views share.
        screening: what replies must pass.
        participation: the rule that draws the participants of a round.
        target: where the target's rows are.
        secure: the settings of secure sums; None where the server sees every reply.
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
    secure: Secure | None = None
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
        return replace(self, round=round, ids=self.participation.draw(self.n, draw))

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
        return replace(self, ids=chosen.draw(self.n, draw))

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
        if self.secure is not None:
            return self._secure_mean(work, shared, weights, memory, draw, static)
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
        whole = mass.total()
        if not assumed(whole > 0.0):
            raise NoClients(f"the clients that answered {name_of(work)} have no weight")
        by = whole if recording() else float(whole)
        result = tree_unflatten([partial.mean(by) for partial in total], structure)
        return result if memory is None else (result, self.engine.remember(memory, parts))

    def _secure_mean(
        self,
        work: Work,
        shared: Tree,
        weights: Tensor | None,
        memory: Memory | None,
        draw: Draw,
        static: dict[str, Any],
    ) -> Any:
        """The same of a secure sum: the server learns Σ w_k r_k over the clients that stay, and no r_k. Four rounds."""
        assert self.secure is not None
        call = self._called(work, shared, memory, draw, static)
        cause = name_of(work)
        w = torch.ones(len(self.ids), dtype=torch.float64) if weights is None else weights[self.ids].cpu().double()
        largest = float(w.abs().max())
        if largest == 0.0:
            raise NoClients(f"the clients that answered {cause} have no weight")
        scales, asked = w / largest, self.ids.tolist()
        by_client = dict(zip(asked, scales.tolist(), strict=True))
        about = question_of(call)
        self.book.exposure.check(about, by_client, self.secure.partners)
        try:
            with counted() as points:
                summed = secure_sum(self.engine, call, self.ids, scales, self.secure)
        except TooFew as error:
            self._note(cause, error.failures)
            error.phase = cause
            raise
        self._note(cause, summed.failures)
        stayed = summed.survivors.tolist()
        self.book.exposure.note(about, {k: by_client[k] for k in stayed})
        numbers = sum(value.numel() for value in summed.values)
        self.ledger.record(cause, up=Size(numbers * len(stayed), summed.traffic["masked"][0]), points=points.rows)
        for question, (up, down) in summed.traffic.items():
            also = question != "masked"
            moved = Size(0, up if also else 0)
            self.ledger.record(f"secure/{question}", rounds=self.barriers * also, up=moved, down=Size(0, down))
        self.ledger.seen.add("server", cause, numbers, what="sums", clients=len(stayed))
        mass = sum(by_client[k] for k in stayed)
        if mass <= 0.0:
            raise NoClients(f"the clients that answered {cause} have no weight")
        result = mean_of(summed, mass)
        return result if memory is None else (result, self.engine.remember(memory, [(summed.survivors, summed.memory)]))

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
        cause = self.book.phase = name_of(work)
        with counted() as points:
            result = self.engine.execute_at_target(Call(work, shared, None, Static(**static), draw, self.round))
        if self.target != "server":
            self.ledger.record(cause, rounds=1, up=size(result), down=size(shared), points=points.rows)
            self.ledger.seen.add("server", cause, size(result).floats, what="of the target")
            self.ledger.seen.add("target", cause, size(shared).floats, what="broadcasts")
        elif points.rows:
            self.ledger.record(cause, points=points.rows)
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
        cause, call = name_of(work), self._called(work, shared, memory, draw, static)
        passed, copies = self._passed(call, cause), whole and self.screening.copies
        # replies that are compared are needed at once; else they may come chunk after chunk
        return self._compared(call, cause, passed, copies) if copies or self.screening.clip is not None else passed

    def _called(self, work: Work, shared: Tree, memory: Memory | None, draw: Draw, static: dict[str, Any]) -> Call:
        """A call to the active clients, billed on its way down."""
        cause = self.book.phase = name_of(work)
        if not len(self.ids):
            raise NoClients(f"no client is active for {cause}")
        self.ledger.record(cause, rounds=self.barriers, down=_downlink(shared, len(self.ids)))
        self.ledger.seen.add("clients", cause, size(_common(shared)).floats, what="broadcasts")
        return Call(work, shared, memory, Static(**static), draw, self.round)

    def _passed(self, call: Call, cause: str) -> Iterator[Replies]:
        """The replies without those that are too long, or whose squared length is not finite."""
        for arrived, points in with_points(self.engine.execute(call, self.ids)):
            self.ledger.record(cause, points=points)
            replies = orderly(arrived)
            self._note(cause, replies.failures)
            if not len(replies.ids):
                continue
            sent = size(replies.values) if replies.sent is None else replies.sent
            numbers = sent.floats // len(replies.ids)
            if self.secure is not None and numbers > self.secure.reveal:
                raise Revealing(cause, numbers, self.secure.reveal)
            self.ledger.record(cause, up=sent)
            report = info_of(call.work).update is None
            self.ledger.seen.add("server", cause, numbers, what=kind(cause, replies.values, report=report))
            limited = self.screening.norm is not None
            updates = call.updates(replies.ids, replies.values) if limited else None
            fine, reasons = self.screening.reasons(replies.values, updates)
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
            short, cut = self.screening.shortened(call, helpful) if len(helpful.ids) else (helpful, [])
            self._note(cause, [*idle, *cut])
            if len(short.ids):
                yield short

    def _note(self, cause: str, failures: Iterable[Failure]) -> None:
        """Record a failure; kind and reason may be a client's own words."""
        at = {"round": self.round, "phase": cause}
        self.book.events += [
            {**at, "client": f.client, "event": known(f.kind), "reason": clean(f.reason)} for f in failures
        ]


def _downlink(shared: Tree, clients: int) -> Size:
    """The size of a broadcast to so many clients: shared values whole, one row per client of `Each` values."""
    sent = [leaf.rows[0] if isinstance(leaf, Each) else leaf for leaf in tree_flatten(shared)[0]]
    return size(sent).times(clients)


def _common(shared: Tree) -> list[Any]:
    """What all clients are sent alike."""
    return [leaf for leaf in tree_flatten(shared)[0] if not isinstance(leaf, Each)]
