"""A rehearsal: the rounds of a method without any client, to tell in advance what each will be asked for.

The form of every reply is known from the server's own problem (`remote.expectations`): the work is run here on a few
rows of zeros. The rehearsal answers with small random numbers of that form. So the verbs are called as in a real run,
and the ledger and its account are filled as they would be, while no row of any client is touched.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie.federation.api import Call, Replies
from coterie.federation.remote.expectations import Expectations, Form
from coterie.federation.secure import Secure
from coterie.federation.secure.party import STAGES
from coterie.federation.secure.summing import Summed
from coterie.federation.shards import Stack
from coterie.federation.tree import Tree, tree_flatten, tree_unflatten
from coterie.federation.work import Handle, Memory

SMALLEST = 40  # halvings of the replies: series over them converge


@dataclass
class Rehearsal:
    """An engine without clients.

    Args:
        expected: the forms of replies.
        train: the server's stand-in for the clients' rows, of which the numbers count only.
    """

    expected: Expectations
    train: Stack
    _asked: int = 0
    _random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def task(self) -> Any:
        """The problem's oracles."""
        return self.expected.task

    @property
    def sizes(self) -> Tensor:
        """Rows of training data by client, [n]."""
        return self.train.counts

    def execute(self, call: Call, ids: Tensor) -> Iterator[Replies]:
        """Replies of the right form, from everybody."""
        memory = None
        if call.memory is not None:
            inside = call.memory.payload
            memory = inside.start if isinstance(inside, Handle) else inside
        yield Replies(ids, self._made(self.expected.of(call).stacked(len(ids))), memory)

    def secure_sum(self, call: Call, ids: Tensor, scales: Tensor, secure: Secure) -> Summed:
        """A sum of the right form, without any protocol."""
        replies = next(self.execute(call, ids))
        leaves, structure = tree_flatten(replies.values)
        values = [torch.tensordot(scales.to(ids.device), leaf.double(), 1) for leaf in leaves]
        like = [leaf.dtype if leaf.is_floating_point() else torch.get_default_dtype() for leaf in leaves]
        nothing = dict.fromkeys(STAGES, (0, 0))
        return Summed(values, like, structure, ids, replies.memory, (), nothing)

    def execute_at_target(self, call: Call) -> Tree:
        """A reply of the right form."""
        return self._made(self.expected.of(call, at_target=True))

    def remember(self, memory: Memory, parts: list[tuple[Tensor, Tree]]) -> Memory:
        """Nothing changes."""
        return memory

    def _made(self, form: Form) -> Tree:
        """Random numbers, each reply half as large as the last; whole numbers and truth values are 0."""
        self._asked = min(self._asked + 1, SMALLEST)
        device = self.sizes.device

        def leaf(what: Any) -> Any:
            if not isinstance(what, tuple):
                return None
            dtype, shape = what
            if not dtype.is_floating_point:
                return torch.zeros(shape, dtype=dtype, device=device)
            made = torch.rand(shape, dtype=torch.float64, generator=self._random)
            return (made * 0.5**self._asked).to(device=device, dtype=dtype)

        return tree_unflatten([leaf(what) for what in form.leaves], form.structure)
