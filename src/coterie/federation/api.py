"""What passes between a federation and its engine: calls, replies, failures, and the book of what was moved."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from coterie.federation.ledger import Ledger
from coterie.federation.secure.exposure import Exposure
from coterie.federation.tree import Size, Tree, joined, rows, tensors, tree_flatten, tree_unflatten
from coterie.federation.work import Each, Memory, MovedFrom, Static, Update, Work, info_of
from coterie.numerics import Draw
from coterie.numerics.roots import square_root
from coterie.numerics.tracing import assumed

TargetAt = Literal["server"] | int
"""Where the target's rows are: at the server, or at the client of this number."""


class Call(NamedTuple):
    """One work to be run at many clients. Rows of `Each` values and of memory are numbered by client id.

    Args:
        work: the work.
        shared: what every client is sent.
        memory: what the clients remember, where the work uses it.
        static: the work's settings.
        draw: the randomness of the call.
        round: the number of the round, from 1 on; 0 where nobody counts.
        channel: how nodes compress their replies; None for not at all, and where replies come by here.
    """

    work: Work
    shared: Tree
    memory: Memory | None
    static: Static
    draw: Draw
    round: int = 0
    channel: "Channel | None" = None

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


class Channel(NamedTuple):
    """How the nodes of a network compress what they reply.

    Args:
        compression: the stage (`stages/compression.py`), which knows what a message stands for.
        errors: what the clients have not sent yet of earlier uploads of the work; None without feedback.
    """

    compression: Any
    errors: Memory | None


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
    errors: Tensor | None = None  # the versions of what a channel lost, where nodes keep that

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


def lengths(values: Tree) -> Tensor:
    """One norm per row, over all real tensors."""
    squares = [t.square().sum(1) for t in flat_rows(values)]
    return square_root(torch.stack(squares).sum(0)) if squares else torch.zeros(len(tensors(values)[0]))


def flat_rows(values: Tree) -> list[Tensor]:
    """The real tensors of stacked values, each as a matrix with one row per client."""
    return [t.reshape(len(t), -1) for t in tensors(values) if t.is_floating_point()]


def scaled(rows: Tensor, factor: Tensor) -> Tensor:
    """Each row times its factor; whole numbers stay as they are."""
    return rows * factor.to(rows).reshape(-1, *(1,) * (rows.dim() - 1)) if rows.is_floating_point() else rows


@dataclass
class Book:
    """What all views of one federation share: the ledger and the events since the loop last looked."""

    ledger: Ledger = field(default_factory=Ledger)
    events: list[dict[str, Any]] = field(default_factory=list)
    phase: str = ""  # the work that was asked for last
    idle: set[int] = field(default_factory=set)  # clients whose updates were 0 or copies
    exposure: Exposure = field(default_factory=Exposure)  # secure sums so far

    def drain(self) -> list[dict[str, Any]]:
        """The events so far; afterwards there are none."""
        events, self.events = self.events, []
        return events


def orderly(replies: Replies) -> Replies:
    """Replies ascending by client, each once, whatever the order in which they came; the first of several counts."""
    ids = replies.ids
    if len(ids) < 2 or assumed((ids[1:] > ids[:-1]).all()):
        return replies
    order = ids.argsort(stable=True)
    first = torch.ones_like(order, dtype=torch.bool)
    first[1:] = ids[order][1:] != ids[order][:-1]
    twice = [Failure(k, "duplicate", "its reply came again; the first counts") for k in ids[order][~first].tolist()]
    return replies.only(order[first])._replace(failures=(*replies.failures, *twice), sent=replies.sent)
