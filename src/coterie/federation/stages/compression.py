"""Compressed uploads: a stage in which clients send less than they computed.

An update is what a client contributes, as its work declares it: its result, or the difference from where it started.
Of every real tensor of m numbers in it, a client sends about `ratio` of the bytes:

    top-k      the largest entries, each with its index (int32)
    random-k   entries that are drawn anew every time, the same for all clients, so that no index is sent
    sketch     Sv for a randomised Hadamard sketch S, drawn anew every time; understood as SᵀSv

The server works with what it understood; the ledger bills what was sent. Tensors too small to be cut are sent whole,
and so are reports that are no update, and everything that goes down or to the target. With `ratio` 1 nothing is cut,
and no bit changes.

With feedback a client keeps what was not understood, one error per work and tensor, and adds it to its next update of
that kind. An error begins at 0 when its upload is first sent, and errors are part of checkpoints. Without feedback,
random-k and sketch are scaled by m/k, which makes them right on average; top-k stays biased.

On a network the nodes compress (`SiteCompression`): they keep the errors of their clients, in versions like all client
memory, and send what travels; the server keeps the versions and expands what arrives (`remote/channel.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.federation.api import Call, Channel, Replies, orderly
from coterie.federation.stages.base import Stage
from coterie.federation.tree import Tree, rows, size, tree_flatten
from coterie.federation.work import Handle, Memory, info_of
from coterie.numerics import Draw
from coterie.numerics.sketches import Hadamard
from coterie.numerics.sparse import top_k

Compressor = Literal["top-k", "random-k", "sketch"]


class CompressionState(NamedTuple):
    """The number of clients, and what the server has not understood yet, by upload (`work/tensor`), [n, m] each."""

    clients: int
    errors: dict[str, Memory]


class Compressed(NamedTuple):
    """Results on their way.

    Args:
        messages: what travels, by leaf of the result: of its update, or the leaf itself where it is sent whole.
        values: the results as they are understood.
        errors: what was not understood, by number of the leaf, [a, m] each.
    """

    messages: tuple[Tree, ...]
    values: Tree
    errors: dict[int, Tensor]


@dataclass(frozen=True)
class Compression(Stage):
    """A stage that compresses updates.

    Args:
        name: the compressor, as above.
        ratio: the share of the bytes that is sent.
        feedback: whether clients add what was lost to their next update.

    Example:
        >>> Compression("random-k", 0.1).count(torch.zeros(50))
        5
    """

    key: ClassVar[str] = "compression"

    name: Compressor
    ratio: float
    feedback: bool = True

    def start(self, n: int, device: torch.device) -> CompressionState:
        """No errors yet."""
        return CompressionState(n, {})

    def count(self, row: Tensor) -> int:
        """k or p for one client's tensor; 0 where it is sent whole."""
        if not row.is_floating_point() or self.ratio >= 1.0:
            return 0
        width = row.element_size()
        bytes_each = width + 4 if self.name == "top-k" else width
        return int(self.ratio * row.numel() * width / bytes_each)

    def cuts(self, call: Call, values: Tree) -> list[int]:
        """k or p for every leaf of stacked results; 0 where a leaf is sent whole."""
        leaves = tree_flatten(values)[0]
        kinds = info_of(call.work).kinds(values)
        return [
            self.count(leaf[0]) if kind is not None and isinstance(leaf, Tensor) else 0
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]

    def message(self, updates: Tensor, count: int, draw: Draw) -> Tree:
        """What travels of rows [a, m]."""
        if self.name == "top-k":
            return top_k(updates, count)
        m = updates.shape[1]
        if self.name == "random-k":
            return updates[:, draw.subset(m, count)]
        return Hadamard(count, m, int(draw.key)).apply(updates)

    def understood(self, message: Any, m: int, draw: Draw) -> Tensor:
        """What a message stands for, [a, m]."""
        if self.name == "top-k":
            dense: Tensor = message.dense(m)
            return dense
        count = message.shape[1]
        gain = 1.0 if self.feedback else m / count
        if self.name == "random-k":
            zeros = message.new_zeros(len(message), m)
            return zeros.index_copy(1, draw.subset(m, count), gain * message)
        return gain * Hadamard(count, m, int(draw.key)).adjoint(message)

    def compressed(self, call: Call, ids: Tensor, values: Tree, before: Mapping[int, Tensor]) -> Compressed:
        """What clients send of their results, and what is understood of it.

        Args:
            call: what was asked.
            ids: the clients, [a].
            values: their results, stacked.
            before: their errors by number of the leaf, [a, m] each; 0 where there is none.
        """
        draw, counts, results = channel_draw(call), self.cuts(call, values), tree_flatten(values)[0]
        messages: list[Tree] = []
        errors: dict[int, Tensor] = {}

        def compress(updates: list[Tensor]) -> list[Tensor]:
            received = []
            for i, (leaf, count) in enumerate(zip(updates, counts, strict=True)):
                message, got = results[i], leaf
                if count:
                    flat = leaf.reshape(len(leaf), -1)
                    kept = before.get(i) if self.feedback else None
                    wanted = flat if kept is None else flat + kept
                    message = self.message(wanted, count, draw.step(i))
                    rows_got = self.understood(message, flat.shape[1], draw.step(i))
                    if self.feedback:
                        lost = wanted - rows_got
                        # a client that sends nonsense once is not lost for ever
                        fine = torch.isfinite(lost).all(1, keepdim=True)
                        errors[i] = torch.where(fine, lost, torch.zeros_like(lost) if kept is None else kept)
                    got = rows_got.reshape(leaf.shape)
                messages.append(message)
                received.append(got)
            return received

        understood = call.changed(ids, values, compress)
        return Compressed(tuple(messages), understood, errors)

    def apply(self, call: Call, replies: Replies, state: CompressionState) -> tuple[Replies, CompressionState]:
        """What the server understands of the replies, with the size of what was sent; and the new errors."""
        replies = orderly(replies)
        name, errors = info_of(call.work).name, dict(state.errors)
        leaves = range(len(tree_flatten(replies.values)[0]))
        known = {i: errors[f"{name}/{i}"] for i in leaves if f"{name}/{i}" in errors}
        before = {i: rows(memory.payload, replies.ids) for i, memory in known.items()}
        done = self.compressed(call, replies.ids, replies.values, before)
        for i, lost in done.errors.items():
            whole = known[i] if i in known else Memory.start(lost.new_zeros(lost.shape[1]), state.clients)
            errors[f"{name}/{i}"] = whole.with_rows([(replies.ids, lost)])
        return replies._replace(values=done.values, sent=size(done.messages)), state._replace(errors=errors)


def channel_draw(call: Call) -> Draw:
    """The randomness of compression: the same for all clients of a call."""
    return Draw(call.draw.key).phase("channel")


@dataclass(frozen=True)
class SiteCompression(Compression):
    """The same where nodes compress: they keep the errors, and the state here holds their versions by work."""

    def prepared(self, call: Call, state: CompressionState) -> Call:
        """The call with the compression, and which errors the clients shall add."""
        if not self.feedback:
            return call._replace(channel=Channel(self, None))
        name = info_of(call.work).name
        n, device = state.clients, call.draw.key.device
        nothing = Memory(Handle(torch.zeros(n, 0, device=device), torch.zeros(n, dtype=torch.int64, device=device)))
        return call._replace(channel=Channel(self, state.errors.get(name, nothing)))

    def apply(self, call: Call, replies: Replies, state: CompressionState) -> tuple[Replies, CompressionState]:
        """What arrives was expanded already; the versions of the errors are noted."""
        channel = call.channel
        if channel is None or channel.errors is None or replies.errors is None:
            return replies, state
        handle = channel.errors.payload
        versions = handle.versions.index_copy(0, replies.ids, replies.errors)
        kept = Memory(Handle(handle.start, versions))
        return replies, state._replace(errors={**state.errors, info_of(call.work).name: kept})
