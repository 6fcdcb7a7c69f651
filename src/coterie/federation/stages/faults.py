"""Faults: a stage in which things go wrong between clients and server, by chance, the same way in every repetition.

In each phase each client is struck by one fault at most, each with its own probability:

    crash      before the upload: no reply, and the client remembers what it did before
    restart    after the upload: the reply counts, but what the client learnt in this phase is lost: as before
    delay      the reply takes a while, Exp(seconds) on a virtual clock; after `deadline` it is late and left out
    duplicate  the reply comes twice, and counts once
    reorder    the reply comes out of turn; replies are put in the order of their clients, so no bit changes
    truncate   the reply breaks off at some byte, and is rejected
    misshape   a tensor of the reply has one entry too many, and is rejected
    nan, inf   one number of the reply is not finite; screening rejects it
    flip       one bit of the reply is another; screening sees it only if the number is then absurd
    huge       the update is 10⁶ times as long; `federation.norm` rejects, `federation.clip` shortens it, else it counts

`any` is spread over all of them alike. Beside that, `lie` is the probability that a client declares 1000 times the rows
that it has; whoever weights by size believes it, up to `federation.trust` times the median.

Nothing sleeps. What was struck is a function of the run's seed, round, phase and client, so a resumed run meets the
same faults. Each of them is an event of the record. The target's own answers are never struck. The ledger bills
replies that arrived whole, once. Faults strike before compression does (see `stages.base`). There are no messages here,
so what is said of truncated and misshapen ones only follows the network engine, which really compares forms.
"""

from math import log1p
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from coterie.federation.api import Call, Failure, Replies
from coterie.federation.stages.base import Asked, Stage, StageState
from coterie.federation.tree import Tree, put, rows, size, tree_flatten, tree_leaves, tree_unflatten
from coterie.federation.work import Handle, info_of
from coterie.numerics import Draw
from coterie.settings import Positive

KINDS = (
    *("crash", "restart", "delay", "duplicate", "reorder", "truncate", "misshape"),
    *("nan", "inf", "flip", "huge"),
)
LEFT_OUT = ("late", "truncated", "misshapen")
SPOILS = ("nan", "inf", "flip", "huge")  # the reply arrives in form, with other numbers
HUGE = 1e6
BOAST = 1000


Share = Annotated[float, Field(ge=0.0, le=1.0)]


class FaultsTable(BaseModel):
    """[faults]: how probable it is that something goes wrong, by client and phase; the kinds are above."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    any: Share = 0.0
    crash: Share = 0.0
    restart: Share = 0.0
    delay: Share = 0.0
    duplicate: Share = 0.0
    reorder: Share = 0.0
    truncate: Share = 0.0
    misshape: Share = 0.0
    nan: Share = 0.0
    inf: Share = 0.0
    flip: Share = 0.0
    huge: Share = 0.0
    lie: Share = 0.0
    seconds: Positive = 10.0
    deadline: Positive = 10.0

    @model_validator(mode="after")
    def _one_at_a_time(self) -> "FaultsTable":
        total = self.any + sum(getattr(self, kind) for kind in KINDS)
        if total > 1.0 + 1e-9:
            raise ValueError(f"the probabilities add up to {total:g}; a client has one fault at a time, so at most 1")
        return self


class Faults(FaultsTable, Stage):
    """A stage in which things go wrong on the way.

    Args:
        any: a probability per client and phase that is spread over all kinds alike; each kind has its own, too.
        lie: the probability that a client declares more rows than it has.
        seconds: the mean delay, on a virtual clock.
        deadline: the delay after which a reply is left out.
        seed: of the lies.

    Example:
        >>> Faults(crash=1.0).strike(Draw.of(0).client(torch.arange(2)))
        ['crash', 'crash']
    """

    key: ClassVar[str] = "faults"

    seed: int = 0

    @property
    def probabilities(self) -> list[float]:
        """By kind."""
        return [getattr(self, kind) + self.any / len(KINDS) for kind in KINDS]

    @property
    def happen(self) -> bool:
        """Whether anything can go wrong at all."""
        return self.lie > 0.0 or sum(self.probabilities) > 0.0

    def strike(self, draw: Draw) -> list[str]:
        """The fault of each client of a draw; "" for none."""
        bounds = torch.tensor(self.probabilities, dtype=torch.float64).cumsum(0)
        numbers = torch.searchsorted(bounds, draw.uniform(dtype=torch.float64).cpu(), right=True)
        return [KINDS[i] if i < len(KINDS) else "" for i in numbers.tolist()]

    def declared(self, sizes: Tensor) -> Tensor:
        """The numbers of rows that clients declare, [n]; some exaggerate."""
        if not self.lie:
            return sizes
        ids = torch.arange(len(sizes), device=sizes.device)
        lies = Draw.of(self.seed, sizes.device).phase("lie").client(ids).bernoulli(self.lie)
        return torch.where(lies, BOAST * sizes, sizes)

    def lies(self, sizes: Tensor) -> list[dict[str, Any]]:
        """Who declares more rows than it has, for the record."""
        pairs = zip(sizes.tolist(), self.declared(sizes).tolist(), strict=True)
        return [
            {"client": k, "event": "lied", "reason": f"it declares {declared} rows and has {true}"}
            for k, (true, declared) in enumerate(pairs)
            if declared != true
        ]

    def before(self, call: Call, ids: Tensor, state: StageState) -> Asked:
        """Clients that crash before their upload are not asked."""
        crashed = torch.tensor([kind == "crash" for kind in self.strike(_chance(call, ids))], device=ids.device)
        missing = tuple(Failure(client, "crashed", "before its upload") for client in ids[crashed].tolist())
        return Asked(ids[~crashed], missing, state)

    def apply(self, call: Call, replies: Replies, state: StageState) -> tuple[Replies, StageState]:
        """What the server gets of the replies: some are altered, some missing, some twice, and in any order."""
        chance = _chance(call, replies.ids)
        struck = self.strike(chance)
        if not any(struck):
            return replies, state
        events, arrivals = list(replies.failures), []
        for i, kind in enumerate(struck):
            draw, when = Draw(chance.key[i]), i / len(struck)  # on time: in their order, within a second
            replies, event = self._struck(call, replies, i, kind, draw) if kind else (replies, None)
            events += [event] if event else []
            if event is None or event.kind not in LEFT_OUT:
                arrivals.append((self._time(kind, draw) if kind in ("delay", "reorder") else when, i))
            if kind == "duplicate":
                arrivals.append((when + 1.0, i))
        order = torch.tensor([i for _, i in sorted(arrivals)], dtype=torch.int64, device=replies.ids.device)
        values, memory = rows(replies.values, order), rows(replies.memory, order)
        return Replies(replies.ids[order], values, memory, tuple(events)), state

    def _time(self, kind: str, draw: Draw) -> float:
        """When a reply that is not on time arrives."""
        u = float(draw.step(1).uniform(dtype=torch.float64))
        return u if kind == "reorder" else -self.seconds * log1p(-u)

    def _struck(self, call: Call, replies: Replies, i: int, kind: str, draw: Draw) -> tuple[Replies, Failure | None]:
        """The replies after a fault struck the i-th, and how it is recorded; None where it found nothing to spoil."""
        client = int(replies.ids[i])
        if kind == "delay":
            taken, limit = self._time(kind, draw), self.deadline
            if taken > limit:
                return replies, Failure(client, "late", f"its reply took {taken:.3g} s, the deadline is {limit:g} s")
            return replies, Failure(client, "delayed", f"its reply took {taken:.3g} s")
        if kind == "duplicate":
            return replies, None  # whoever puts the replies in order notices
        if kind == "reorder":
            return replies, Failure(client, "reordered", "its reply came out of turn")
        if kind == "restart":
            return _forgetful(call, replies, i), Failure(
                client, "restarted", "after its upload; it remembers what was before"
            )
        if kind in ("truncate", "misshape"):
            return replies, _misfit(replies, i, kind, client, draw)
        altered, what = _spoilt(call, rows(replies.values, slice(i, i + 1)), replies.ids[i : i + 1], kind, draw)
        if not what:
            return replies, None
        return replies._replace(values=put(replies.values, replies.ids == client, altered)), Failure(client, kind, what)


def _chance(call: Call, ids: Tensor) -> Draw:
    return call.draw.phase("faults").client(ids)


def _forgetful(call: Call, replies: Replies, i: int) -> Replies:
    """The replies in which one client's memory is what it was before this phase."""
    if call.memory is None:
        return replies
    before = call.memory.payload
    before = before.versions if isinstance(before, Handle) else before
    own = replies.ids[i : i + 1]
    return replies._replace(memory=put(replies.memory, replies.ids == own, rows(before, own)))


def _misfit(replies: Replies, i: int, kind: str, client: int, draw: Draw) -> Failure | None:
    """How a message without the form of the others' is rejected; None where there is no message."""
    message = size(rows(replies.values, slice(i, i + 1)))
    if not message.bytes:
        return None
    if kind == "truncate":
        arrived = int(draw.step(2).integers(message.bytes))
        return Failure(client, "truncated", f"rejected: its reply breaks off after {arrived} of {message.bytes} bytes")
    return Failure(client, "misshapen", f"rejected: it sends {message.floats + 1} numbers, the others {message.floats}")


def _spoilt(call: Call, values: Tree, ids: Tensor, kind: str, draw: Draw) -> tuple[Tree, str]:
    """One client's reply with something wrong in it, and what; "" where there is nothing that can be wrong."""
    if kind == "huge":
        kinds = info_of(call.work).kinds(values)
        any_real = any(_real(leaf) for leaf, kind in zip(tree_leaves(values), kinds, strict=True) if kind is not None)
        longer = call.changed(ids, values, lambda updates: [HUGE * t if _real(t) else t for t in updates])
        return longer, f"its update is {HUGE:g} times as long" if any_real else ""
    leaves, structure = tree_flatten(values)
    counts = [leaf.numel() if _real(leaf) or (kind == "flip" and _whole(leaf)) else 0 for leaf in leaves]
    if not sum(counts):
        return values, ""
    entry, leaf = int(draw.step(2).integers(sum(counts))), 0
    while entry >= counts[leaf]:
        entry, leaf = entry - counts[leaf], leaf + 1
    flat = leaves[leaf].reshape(-1).clone(memory_format=torch.contiguous_format)
    if kind == "flip":
        width = flat.element_size()
        bit = int(draw.step(3).integers(8 * width))
        flat.view(torch.uint8)[entry * width + bit // 8] ^= 1 << bit % 8
        what = f"bit {bit} of number {entry} is another"
    else:
        flat[entry] = float(kind)
        what = f"number {entry} is {kind}"
    leaves[leaf] = flat.reshape(leaves[leaf].shape)
    return tree_unflatten(leaves, structure), what


def _real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _whole(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.dtype != torch.bool
