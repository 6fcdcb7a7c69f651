"""A rehearsal: the rounds of a method without any client, to tell in advance what each will be asked for.

The form of every reply is known from the server's own problem (`remote.expectations`): the work is run here on a few
rows of zeros. The rehearsal answers with small random numbers of that form, with the vector itself where the product of
a Hessian with a vector is asked for, and with y, v and x where the directions of a nested problem are: methods that
estimate curvatures find those of the identity. So the verbs are called as in a real run, and the ledger and its account
are filled as they would be, while no row of any client is touched.
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
from coterie.federation.tree import Tree, tree_flatten, tree_leaves, tree_unflatten
from coterie.federation.work import Each, Handle, Memory, name_of

PRODUCT = "hessian-product"  # how the names of works end that multiply the last vector that they are sent
DIRECTIONS = "nested/directions"  # the work that is sent (x, y, v) and replies (D_y, D_v, D_x)
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
        values = self._made(self.expected.of(call).stacked(len(ids)))
        if name_of(call.work).endswith(PRODUCT) and isinstance(values, Tensor):
            values = _multiplied(call, ids, values)
        if name_of(call.work) == DIRECTIONS:
            x, y, v = call.shared
            values = tuple(sent.expand(len(ids), *sent.shape) for sent in (y, v, x))
        yield Replies(ids, values, memory)

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


def _multiplied(call: Call, ids: Tensor, values: Tensor) -> Tensor:
    """The last vectors that the clients are sent, where they have the form of the replies; else the replies."""
    sent = [leaf for leaf in tree_leaves(call.shared) if isinstance(leaf, Tensor | Each)]
    last = sent[-1] if sent else values
    vectors = last.of(ids) if isinstance(last, Each) else last
    return vectors.to(values).expand_as(values) if vectors.shape in (values.shape, values.shape[1:]) else values
