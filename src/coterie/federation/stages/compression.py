"""Compressed uploads: an engine whose clients send less than they computed.

An update is what a client contributes, as its work declares it: its result, or the difference from where it started.
Of every real tensor of m numbers in it, a client sends about `ratio` of the bytes:

    top-k      the largest entries, each with its index (int32)
    random-k   entries that are drawn anew every time, the same for all clients, so that no index is sent
    sketch     Sv for a randomised Hadamard sketch S, drawn anew every time; understood as SᵀSv

The server works with what it understood; the ledger bills what was sent. Tensors too small to be cut are sent whole,
and so are reports that are no update, and everything that goes down or to the target. With `ratio` 1 nothing is cut,
and no bit changes.

With feedback a client keeps what was not understood, one error by cause and tensor, and adds it to its next update of
that kind. Without, random-k and sketch are scaled by m/k, which makes them right on average; top-k stays biased.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from coterie.federation.api import Call, Engine, Replies, orderly
from coterie.federation.stages.base import Wrapped
from coterie.federation.tree import Size, Tree, mapped, rows, size
from coterie.federation.work import Memory, info_of
from coterie.numerics import Draw
from coterie.numerics.sketches import Hadamard
from coterie.numerics.sparse import top_k

Compressor = Literal["top-k", "random-k", "sketch"]
Errors = dict[str, Memory]


@dataclass(frozen=True)
class Compression:
    """How updates are cut: to `ratio` of their bytes, with or without error feedback."""

    name: Compressor
    ratio: float
    feedback: bool = True

    def count(self, row: Tensor) -> int:
        """k or p for one client's tensor; 0 where it is sent whole."""
        if not row.is_floating_point() or self.ratio >= 1.0:
            return 0
        width = row.element_size()
        bytes_each = width + 4 if self.name == "top-k" else width
        return int(self.ratio * row.numel() * width / bytes_each)

    def sent(self, updates: Tensor, count: int, draw: Draw) -> tuple[Tree, Tensor]:
        """What travels of rows [a, m], and what is understood of it."""
        m = updates.shape[1]
        gain = 1.0 if self.feedback else m / count
        if self.name == "top-k":
            sparse = top_k(updates, count)
            return sparse, sparse.dense(m)
        if self.name == "random-k":
            places = draw.subset(m, count)
            kept = updates[:, places]
            return kept, torch.zeros_like(updates).index_copy(1, places, gain * kept)
        S = Hadamard(count, m, int(draw.key))
        sketched = S.apply(updates)
        return sketched, gain * S.adjoint(sketched)


@dataclass
class Compressed(Wrapped):
    """Another engine's clients behind a thin line.

    `errors` is what they remember of it, and changes as they send. An upload that has no error there gets one if the
    line is new, and else goes without feedback.
    """

    engine: Engine
    compression: Compression
    errors: Errors
    is_new: bool = False

    def execute(self, call: Call, ids: Tensor) -> Iterator[Replies]:
        """Run a work, then pass the replies through the line."""
        for replies in map(orderly, self.engine.execute(call, ids)):
            yield self._through(call, replies) if len(replies.ids) else replies

    def _through(self, call: Call, replies: Replies) -> Replies:
        info, draw = info_of(call.work), call.draw.phase("channel")
        kinds, travelled = info.kinds(replies.values), Size()

        def stage(updates: list[Tensor]) -> list[Tensor]:
            nonlocal travelled
            understood = []
            for i, (leaf, kind) in enumerate(zip(updates, kinds, strict=True)):
                cut = kind is not None and isinstance(leaf, Tensor)
                count = self.compression.count(leaf[0]) if cut else 0
                message, got = leaf, leaf
                if count:
                    flat = leaf.reshape(len(leaf), -1)
                    message, got = self._one(f"{info.name}/{i}", flat, count, replies.ids, draw.step(i))
                    got = got.reshape(leaf.shape)
                understood.append(got)
                travelled += size(message)
            return understood

        values = call.changed(replies.ids, replies.values, stage)
        return replies._replace(values=values, sent=travelled)

    def _one(self, name: str, updates: Tensor, count: int, ids: Tensor, draw: Draw) -> tuple[Tree, Tensor]:
        """One tensor of all clients, with their errors added and kept."""
        if name not in self.errors and self.is_new and self.compression.feedback:
            self.errors[name] = Memory.start(updates.new_zeros(updates.shape[1]), len(self.sizes))
        if name not in self.errors:
            return replace(self.compression, feedback=False).sent(updates, count, draw)
        before = rows(self.errors[name].payload, ids)
        wanted = updates + before
        message, got = self.compression.sent(wanted, count, draw)
        lost = wanted - got
        fine = torch.isfinite(lost).all(1, keepdim=True)  # a client that sends nonsense once is not lost for ever
        after = torch.where(fine, lost, before)
        self.errors[name] = self.engine.remember(self.errors[name], [(ids, after)])
        return message, got


def forgotten(errors: Errors) -> Errors:
    """Errors of the same form, all 0."""
    return {name: Memory(mapped(torch.zeros_like, memory.payload)) for name, memory in errors.items()}
