"""Pure functions whose values are kept: asked again with equal tensors, they answer from memory.

A client that is asked several times at one point (products of a series with one Hessian) would do the same forward
pass each time. A kept function is opaque to the surrounding vmap, sees all clients' tensors at once, and compares them
with those of earlier calls, by where they are or by what they are: far cheaper than a pass through a network. Values
have the same bits either way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

Dims = tuple[int | None, ...]
BUDGET = 1 << 28  # bytes of operands and values that one function keeps


class Memoised:
    """A function of tensors with a memory. It cannot be differentiated."""

    def __init__(self, plain: Callable[..., Tensor], budget: int = BUDGET) -> None:
        self.plain, self.budget = plain, budget
        self._known: list[tuple[tuple[TensorVersion, ...], TensorVersion]] = []  # the last used at the end
        self._vectorised: dict[Dims, Memoised] = {}

    def __call__(self, *operands: Tensor) -> Tensor:
        """The function's value; all tensors that differ by row of a vmap must be among the operands."""
        return _Apply.apply(self, *operands)  # type: ignore[no-untyped-call]

    def over(self, dims: Dims) -> "Memoised":
        """The function mapped over these dimensions, the same object for the same dimensions."""
        if dims not in self._vectorised:
            self._vectorised[dims] = Memoised(vmap(self.plain, in_dims=dims), self.budget)
        return self._vectorised[dims]

    def run(self, *operands: Tensor) -> Tensor:
        """The value, from memory if it is there."""
        value = self._remembered(operands)
        value = self.plain(*operands) if value is None else value
        self._known.append((tuple(map(TensorVersion.of, operands)), TensorVersion.of(value)))
        while self._known and sum(seen.tensor.nbytes for ins, out in self._known for seen in (*ins, out)) > self.budget:
            self._known.pop(0)
        return value

    def forget(self) -> None:
        """Begin anew."""
        self._known.clear()
        self._vectorised.clear()

    def _remembered(self, operands: tuple[Tensor, ...]) -> Tensor | None:
        """The value of equal operands, taken out of memory."""
        for i, (known, value) in enumerate(self._known):
            # the last operand first: the rows differ more often than the point
            if all(a.equals(b) for a, b in zip(known[::-1], operands[::-1], strict=True)):
                del self._known[i]
                return value.tensor if value.unchanged else None
        return None


class TensorVersion(NamedTuple):
    """A tensor, and how often it had been written to when it was seen."""

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

    def equals(self, other: Tensor) -> bool:
        """Whether the other has the same numbers; where it is the same memory, nothing is read."""
        mine = self.tensor
        if mine.shape != other.shape or not self.unchanged:
            return False
        return (mine.data_ptr() == other.data_ptr() and mine.stride() == other.stride()) or torch.equal(mine, other)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(kept: Memoised, *operands: Tensor) -> Tensor:
        return kept.run(*(t.detach() for t in operands)).detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("a kept function is not differentiable")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], kept: Memoised, *operands: Tensor) -> tuple[Tensor, int]:
        return kept.over(in_dims[1:])(*operands), 0


__all__ = ["Memoised", "TensorVersion"]
