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
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.federation.api import Call, Replies, orderly
from coterie.federation.stages.base import Stage
from coterie.federation.tree import Size, Tree, rows, size
from coterie.federation.work import Memory, info_of
from coterie.numerics import Draw
from coterie.numerics.sketches import Hadamard
from coterie.numerics.sparse import top_k

Compressor = Literal["top-k", "random-k", "sketch"]


class CompressionState(NamedTuple):
    """The number of clients, and what the server has not understood yet, by upload (`work/tensor`), [n, m] each."""

    clients: int
    errors: dict[str, Memory]


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

    def sent(self, updates: Tensor, count: int, draw: Draw) -> tuple[Tree, Tensor]:
        """What travels of rows [a, m], and what is understood of it."""
        m = updates.shape[1]
        gain = 1.0 if self.feedback else m / count
        if self.name == "top-k":
            sparse = top_k(updates, count)
            return sparse, sparse.dense(m)
        if self.name == "random-k":
            entries = draw.subset(m, count)
            kept = updates[:, entries]
            return kept, torch.zeros_like(updates).index_copy(1, entries, gain * kept)
        S = Hadamard(count, m, int(draw.key))
        sketched = S.apply(updates)
        return sketched, gain * S.adjoint(sketched)

    def apply(self, call: Call, replies: Replies, state: CompressionState) -> tuple[Replies, CompressionState]:
        """What the server understands of the replies, with the size of what was sent; and the new errors."""
        replies = orderly(replies)
        info, draw = info_of(call.work), call.draw.phase("channel")
        kinds, errors, sizes = info.kinds(replies.values), dict(state.errors), [Size()]

        def compress(updates: list[Tensor]) -> list[Tensor]:
            received = []
            for i, (leaf, kind) in enumerate(zip(updates, kinds, strict=True)):
                cut = kind is not None and isinstance(leaf, Tensor)
                count = self.count(leaf[0]) if cut else 0
                message, got = leaf, leaf
                if count:
                    name, flat = f"{info.name}/{i}", leaf.reshape(len(leaf), -1)
                    if self.feedback and name not in errors:
                        errors[name] = Memory.start(flat.new_zeros(flat.shape[1]), state.clients)
                    message, got = self._sent_with(errors, name, flat, count, replies.ids, draw.step(i))
                    got = got.reshape(leaf.shape)
                received.append(got)
                sizes.append(size(message))
            return received

        values = call.changed(replies.ids, replies.values, compress)
        return replies._replace(values=values, sent=sum(sizes, Size())), state._replace(errors=errors)

    def _sent_with(
        self, errors: dict[str, Memory], name: str, updates: Tensor, count: int, ids: Tensor, draw: Draw
    ) -> tuple[Tree, Tensor]:
        """What travels of one tensor of all clients and what is understood of it; their errors are added and kept."""
        if not self.feedback:
            return self.sent(updates, count, draw)
        before = rows(errors[name].payload, ids)
        wanted = updates + before
        message, got = self.sent(wanted, count, draw)
        lost = wanted - got
        fine = torch.isfinite(lost).all(1, keepdim=True)  # a client that sends nonsense once is not lost for ever
        errors[name] = errors[name].with_rows([(ids, torch.where(fine, lost, before))])
        return message, got
