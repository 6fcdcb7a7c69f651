"""Screening: what the replies of a phase must pass before a method sees them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.federation.api import Call, Failure, Replies, flat_rows, lengths, scaled
from coterie.federation.tree import Tree, mapped, put, tensors
from coterie.numerics.tracing import assumed

NOTHING = 1e-9  # an update so much shorter than the median of its phase is 0
SAME = 1e-6  # updates that differ by so much of their length are equal
NOT_FINITE = ("not finite", "its squared length is not finite")  # entries of a rejected reply, or products of them


@dataclass(frozen=True)
class Screening:
    """What a client's update must pass; one whose squared length is not finite in its own type never does.

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

    def reasons(self, values: Tree, updates: Tree = None) -> tuple[Tensor, list[str]]:
        """Which rows are fine, [a] bool; and for each row, why not.

        Args:
            values: the replies, stacked.
            updates: what the limit of norms applies to; the replies themselves without it.
        """
        if not tensors(values):  # a work that only changed memory
            return torch.ones((), dtype=torch.bool), []
        first, real = tensors(values)[0], flat_rows(values)
        bounded = torch.ones(len(first), dtype=torch.bool, device=first.device)
        if real:
            squares = torch.stack([torch.linalg.vector_norm(leaf, dim=1).square() for leaf in real])
            bounded = torch.isfinite(squares.sum(0))
        fine, norm = bounded, torch.zeros(len(first))
        if self.norm is not None:
            norm = lengths(values if updates is None else updates)
            fine = bounded & (norm <= self.norm)
        if assumed(fine.all()):
            return fine, []
        entries = torch.stack([bounded, *(torch.isfinite(leaf).all(1) for leaf in real)])[1:].all(0)
        texts = [
            "" if ok else f"norm {n:.3g} above the limit {self.norm:g}" if short else NOT_FINITE[finite]
            for ok, n, short, finite in zip(*map(Tensor.tolist, (fine, norm, bounded, entries)), strict=True)
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
        real = flat_rows(updates)
        if sum(t.shape[1] for t in real) < 2:
            return []
        if assumed(self._distinct(lengths(updates).double())):
            return []
        norms, ids = lengths(updates).double(), replies.ids.tolist()
        usual = float(norms.median())
        if usual == 0.0:
            return []
        zero = (norms <= NOTHING * usual).tolist()
        found = [Failure(ids[i], "zero update", "it does not help") for i, is_zero in enumerate(zero) if is_zero]
        original: dict[int, int] = {}
        rising, ascending = norms.sort(stable=True)
        order = ascending.tolist()
        apart = rising.diff() > SAME * rising[1:]  # nearly all of them: a loop over many clients would take long
        for at in (~apart).nonzero().flatten().tolist():
            i = order[at]
            for j in order[at + 1 :]:
                if zero[i] or zero[j] or float(norms[j] - norms[i]) > SAME * float(norms[j]):
                    break
                if all(float((t[i] - t[j]).norm()) <= SAME * float(norms[j]) for t in real):
                    first, later = min(i, j), max(i, j)
                    original[later] = min(first, original.get(later, first))
        copies = [Failure(ids[i], "duplicate update", f"of client {ids[j]}") for i, j in sorted(original.items())]
        return found + copies

    def _distinct(self, norms: Tensor) -> Tensor:
        """Whether no update can be 0 or a copy, by the lengths alone; the usual case."""
        ordered = norms.sort().values
        apart = ordered[1:] - ordered[:-1] > SAME * ordered[1:]
        return apart.all() & (ordered[0] > NOTHING * norms.median())

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
