"""What the server expects of replies, from its own problem alone: the columns of clients' rows, and the form
(structure, types, shapes) of every result, and with it the size of every reply.

The form of a result is found by running the work here on a few rows of zeros, once for all calls that can only have
the same form. Works are pure, so that has no effect. Settings that count steps or rows of a batch (`policy.STEPS`,
`policy.BATCHES`) are lowered to 2 and to 3: where both give one form, it does not depend on them; where they do not,
the work is run with the settings as they are.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.errors import RunError
from coterie.federation.api import Call
from coterie.federation.points import counted
from coterie.federation.remote.codec import WORDS, Limits
from coterie.federation.remote.messages import REASON
from coterie.federation.remote.policy import BATCHES, POSITIONS, STEPS
from coterie.federation.shards import Rows, Shard, Stack
from coterie.federation.tree import Tree, row, tree_flatten, tree_map
from coterie.federation.work import Each, Handle, Static, name_of
from coterie.numerics import Draw

ROWS = 4  # of zeros
FORMS = 512  # that are remembered
SLACK = 1 << 13  # bytes for the structure of a message, a reason among them


class Form(NamedTuple):
    """Structure of a tree, and of each leaf type and shape; of a leaf that is no tensor, its class."""

    structure: Any
    leaves: tuple[Any, ...]

    @staticmethod
    def of(tree: Tree) -> "Form":
        """The form of a tree."""
        leaves, structure = tree_flatten(tree)
        return Form(structure, tuple(_leaf(leaf) for leaf in leaves))

    def stacked(self, clients: int) -> "Form":
        """The form of so many trees of this form, stacked."""
        leaves = tuple((x[0], (clients, *x[1])) if isinstance(x, tuple) else x for x in self.leaves)
        return Form(self.structure, leaves)

    @property
    def bytes(self) -> int:
        """What the tensors take."""
        shapes = [leaf for leaf in self.leaves if isinstance(leaf, tuple)]
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in shapes)

    def fault(self, tree: Tree) -> str | None:
        """How a tree differs from this form, or None."""
        found = Form.of(tree)
        if found.structure != self.structure:
            return f"its result has {len(found.leaves)} parts in another structure than the {len(self.leaves)} expected"
        for i, (got, expected) in enumerate(zip(found.leaves, self.leaves, strict=True)):
            if got != expected:
                return f"part {i} of its result is {_text(got)}, not {_text(expected)}"
        return None

    def limits(self, clients: int) -> Limits:
        """What a message with a tree of this form may take, and no more."""
        slack = SLACK + 4 * len(str(self.structure)) + 64 * len(self.leaves) + 8 * clients
        return Limits(bytes=self.bytes + slack, tensors=len(self.leaves), structure=slack, text=2 * REASON)


def declaration_limits(clients: int, columns: int) -> Limits:
    """What the declaration of a node may take."""
    slack = SLACK + 64 * clients + 256 * columns
    return Limits(bytes=slack, tensors=0, structure=slack, text=2 * REASON)


def larger(first: Limits, second: Limits) -> Limits:
    """The larger of each limit."""
    return Limits(*map(max, first, second))


@dataclass
class Expectations:
    """The server's own problem as a measure of replies: oracles, the form of clients' rows, and of the target's."""

    task: Any
    train: Stack
    valid: Stack | None = None
    target: Shard | None = None
    _known: dict[Hashable, Form | None] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Type and shape of a row by column, as nodes declare them."""
        return tuple((WORDS[c.dtype], tuple(c.shape[1:])) for c in self.train.columns)

    def of(self, call: Call, *, at_target: bool = False) -> Form:
        """The form of the result of a call at one client, or at the target."""
        shared, memory = _first(call.shared), _memory_of(call)
        key = call.work, at_target, _text_of(shared), _text_of(memory)
        few = [Static(**_lowered(call.static, count)) for count in (2, 3)]
        few = few[:1] if _settings(few[0]) == _settings(few[1]) else few
        form = self._cached((*key, *map(_settings, few)), lambda: self._common(call, few, shared, memory, at_target))
        if form is None:
            form = self._cached(
                (*key, "as it is", _settings(call.static)), lambda: self._own(call, shared, memory, at_target)
            )
        assert form is not None
        return form

    def _cached(self, key: Hashable, make: Callable[[], Form | None]) -> Form | None:
        if key not in self._known:
            while len(self._known) >= FORMS:
                self._known.pop(next(iter(self._known)))
            self._known[key] = make()
        return self._known[key]

    def _run(self, call: Call, static: Static, shared: Tree, memory: Tree, at_target: bool) -> Form:
        shard = self._shard(static, at_target)
        with counted():  # rows that nobody has are not counted
            result = call.work(shard, shared, memory, static, Draw(call.draw.key))
        return Form.of(result if call.memory is None else result[0])

    def _common(self, call: Call, few: list[Static], shared: Tree, memory: Tree, at_target: bool) -> Form | None:
        """The form that the work has with each of these settings; None where they do not agree."""
        try:
            forms = [self._run(call, static, shared, memory, at_target) for static in few]
        except Exception:  # so few steps or rows may be too few for a work of the user's
            return None
        return forms[0] if forms[0] == forms[-1] else None

    def _own(self, call: Call, shared: Tree, memory: Tree, at_target: bool) -> Form:
        """The form that the work has with the settings as they are."""
        try:
            return self._run(call, call.static, shared, memory, at_target)
        except Exception as error:  # a work of the user's may fail in any way
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise RunError(
                f"the server cannot tell what {name_of(call.work)} returns, because it fails on rows of zeros "
                f"({reason}); change the work so that it accepts such rows."
            ) from error

    def _shard(self, static: Static, at_target: bool) -> Shard:
        batches = [value for key, value in static.items() if key in BATCHES and type(value) is int]
        count = max([ROWS, *batches])
        if not at_target:
            valid = None if self.valid is None else _zeros(self.valid.columns, count)
            return Shard(self.task, _zeros(self.train.columns, count), valid)
        if self.target is None:
            raise ValueError("the server has no rows of a target")
        parts = (self.target.train, self.target.valid)
        return Shard(self.target.task, *(None if part is None else _zeros(part.columns, count) for part in parts))


def _zeros(columns: tuple[Tensor, ...], count: int) -> Rows:
    made = tuple(c.new_zeros(()).expand(count, *c.shape[1:]) for c in columns)
    device = columns[0].device
    return Rows(made, torch.zeros((), dtype=torch.int64, device=device), torch.tensor(count, device=device), count)


def _first(shared: Tree) -> Tree:
    """Shared values as one client sees them."""

    def mine(leaf: Any) -> Any:
        return leaf.rows[0] if isinstance(leaf, Each) else leaf

    return tree_map(mine, shared)


def _memory_of(call: Call) -> Tree:
    """What one client remembers, in form: the beginning."""
    if call.memory is None:
        return None
    inside = call.memory.payload
    return row(inside.start if isinstance(inside, Handle) else inside, 0)


def _lowered(static: Static, count: int) -> dict[str, Any]:
    """Settings with every number of steps or rows of a batch at most this."""
    return {
        key: min(value, count) if key in STEPS | BATCHES and type(value) is int else value
        for key, value in static.items()
    }


def _settings(static: Static) -> str:
    """What of the settings may decide a form, as a text."""
    return repr(sorted((key, value) for key, value in static.items() if key not in POSITIONS))


def _text_of(tree: Tree) -> str:
    """The form of a tree, and its values that are no tensors."""
    leaves, structure = tree_flatten(tree)
    return f"{structure} {[_leaf(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]}"


def _leaf(leaf: Any) -> Any:
    return (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf)


def _text(leaf: Any) -> str:
    return f"{WORDS.get(leaf[0], leaf[0])}{list(leaf[1])}" if isinstance(leaf, tuple) else leaf.__name__
