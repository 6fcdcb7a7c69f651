"""Pure functions whose values are remembered: called again with equal tensors, they answer from memory.

A client that is asked several times at one point (products of a series with one Hessian) would do the same forward
pass each time. A memoised function is opaque to the surrounding vmap, sees all clients' tensors at once, and compares
them with those of earlier calls, by address or by content: far cheaper than a pass through a network. Values have the
same bits either way.
"""

from collections.abc import Callable
from threading import Lock
from typing import NamedTuple, Self

import torch
from torch import Tensor

from coterie.numerics.control import Opaque
from coterie.numerics.tracing import recording

BUDGET = 1 << 28  # bytes of operands and values that one function keeps
ENTRIES = 64  # values that one function keeps: a search must cost less than a pass


_CHANGING = Lock()  # one for all: a lock of its own would keep a memory from being sent to another process


class TensorVersion(NamedTuple):
    """A tensor, and its version counter when it was stored."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorVersion":
        """The tensor as it is now."""
        return cls(tensor, tensor._version)

    @property
    def unchanged(self) -> bool:
        """Whether nobody wrote to it since."""
        return self.tensor._version == self.version

    def is_still(self, other: Tensor) -> bool:
        """Whether the other is this tensor, with the same numbers as then."""
        return self.tensor is other and self.unchanged

    def equals(self, other: Tensor) -> bool:
        """Whether the other has the same numbers; where it is the same memory, nothing is read."""
        mine = self.tensor
        if mine.shape != other.shape or not self.unchanged:
            return False
        return (mine.data_ptr() == other.data_ptr() and mine.stride() == other.stride()) or torch.equal(mine, other)


class _Entry(NamedTuple):
    operands: tuple[TensorVersion, ...]
    value: TensorVersion
    bytes: int


class TensorMemo:
    """Tensors by the tensors that they were computed from, within a budget of bytes; the last used stay longest.

    Several threads may use one: at worst two of them compute the same value.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.budget = budget
        self._entries: list[_Entry] = []  # the last used at the end
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def take(self, matches: Callable[[tuple[TensorVersion, ...], Tensor], bool]) -> Tensor | None:
        """The value of the last entry that matches, taken out; None if somebody wrote to it since."""
        for entry in self._entries[::-1]:
            if matches(entry.operands, entry.value.tensor):
                with _CHANGING:
                    self._remove(entry)
                return entry.value.tensor if entry.value.unchanged else None
        return None

    def add(self, operands: tuple[Tensor, ...], value: Tensor) -> None:
        """Remember a value; the entries that were not used for longest make room."""
        size = sum(tensor.nbytes for tensor in (*operands, value))
        entry = _Entry(tuple(map(TensorVersion.of, operands)), TensorVersion.of(value), size)
        with _CHANGING:
            self._entries.append(entry)
            self._bytes += size
            while self._entries and (self._bytes > self.budget or len(self._entries) > ENTRIES):
                self._remove(self._entries[0])

    def clear(self) -> None:
        """Forget everything."""
        with _CHANGING:
            self._entries.clear()
            self._bytes = 0

    def _remove(self, entry: _Entry) -> None:
        for i in range(len(self._entries) - 1, -1, -1):
            if self._entries[i] is entry:  # unless another thread has taken it
                self._bytes -= self._entries.pop(i).bytes
                return


class Memoised(Opaque):
    """A function of tensors with a memory. It cannot be differentiated."""

    def __init__(self, plain: Callable[..., Tensor], budget: int = BUDGET) -> None:
        super().__init__(plain)
        self.memo = TensorMemo(budget)

    def of(self, plain: Callable[..., Tensor]) -> Self:
        """Another function, with a memory as large as this one's."""
        return type(self)(plain, self.memo.budget)

    def run(self, *operands: Tensor) -> Tensor:
        """The value, from memory if it is known."""
        operands = tuple(tensor.detach() for tensor in operands)
        if recording():
            return self.plain(*operands).detach()

        def equal(known: tuple[TensorVersion, ...], value: Tensor) -> bool:
            # the last operand first: the rows differ more often than the point
            return all(a.equals(b) for a, b in zip(known[::-1], operands[::-1], strict=True))

        known = self.memo.take(equal)
        value = self.plain(*operands) if known is None else known
        self.memo.add(operands, value)
        return value.detach()

    def clear(self) -> None:
        """Forget all values."""
        self.memo.clear()
        self._vectorised.clear()


__all__ = ["Memoised", "TensorMemo", "TensorVersion"]
