"""Functions that vmap does not look into: costly work for only those rows that need it, or for all rows at once."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.func import vmap

from coterie.numerics.tracing import Untraceable, recording

Dims = tuple[int | None, ...]
Tensors = tuple[Tensor, ...]


class Opaque:
    """A function of tensors that is opaque to a surrounding vmap, which vectorises it as a whole; not differentiable.

    Args:
        plain: the function itself.
    """

    constant = False
    """Whether a derivative takes the value as a constant; where it does not, it is refused."""

    def __init__(self, plain: Callable[..., Tensor]) -> None:
        self.plain = plain
        self._vectorised: dict[Dims, Self] = {}

    def __call__(self, *operands: Tensor) -> Tensor:
        """The function's value; all tensors that differ by row of a vmap must be among the operands."""
        return _Apply.apply(self, *operands)  # type: ignore[no-untyped-call]

    def run(self, *operands: Tensor) -> Tensor:
        """Compute the value, where no vmap is around."""
        return self.plain(*operands)

    def over(self, dims: Dims) -> Self:
        """The function mapped over these dimensions, the same object for the same dimensions."""
        if dims not in self._vectorised:
            self._vectorised[dims] = self.of(vmap(self.plain, in_dims=dims))
        return self._vectorised[dims]

    def of(self, plain: Callable[..., Tensor]) -> Self:
        """Another function, treated as this one."""
        return type(self)(plain)


Flags = tuple[tuple[bool, ...], ...]
"""For each surrounding vmap, outermost first, which operands have a dimension for it."""


class Levels(Opaque):
    """A function that computes all rows of all surrounding vmaps at once, by operations of its own.

    Args:
        plain: takes `Flags`, then the operands, each with the dimensions of its vmaps in front, outermost first; its
            value has the dimensions of all of them in front.
        dims: where operands have the dimensions of each vmap, outermost first.
    """

    def __init__(self, plain: Callable[..., Tensor], dims: tuple[Dims, ...] = ()) -> None:
        super().__init__(plain)
        self.dims = dims

    def over(self, dims: Dims) -> Self:
        """The function under one more vmap."""
        if dims not in self._vectorised:
            self._vectorised[dims] = type(self)(self.plain, (dims, *self.dims))
        return self._vectorised[dims]

    def run(self, *operands: Tensor) -> Tensor:
        """Compute the value, where no vmap is around any more."""
        moved = []
        for i, operand in enumerate(operands):
            depth = 0
            for level in self.dims:
                if (dim := level[i]) is not None:
                    operand = operand.movedim(dim + depth, depth)
                    depth += 1
            moved.append(operand)
        return self.plain(tuple(tuple(dim is not None for dim in level) for level in self.dims), *moved)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(function: Opaque, *operands: Tensor) -> Tensor:
        return function.run(*operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        if inputs[0].constant:
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("a memoised or compiled function is not differentiable")

    @staticmethod
    def vmap(info: Any, in_dims: Dims, function: Opaque, *operands: Tensor) -> tuple[Tensor, int]:
        return function.over(in_dims[1:])(*operands), 0


def only_where(mask: Tensor, then: Callable[..., Tensors], otherwise: Tensors, operands: Tensors) -> Tensors:
    """then(*operands) where the mask is true, else `otherwise`.

    Under vmap, `torch.where` would compute `then` for every row; this computes it for the true rows alone, one after
    the other and outside of vmap: meant for a costly `then` that few rows need. All tensors that differ by row must be
    among the operands (`then` may close over common ones only). Not differentiable.
    """
    if recording():
        raise Untraceable("some clients do more than others")
    out: Any = _OnlyWhere.apply(then, len(otherwise), mask, *otherwise, *operands)  # type: ignore[no-untyped-call]
    return out if isinstance(out, tuple) else (out,)


class _OnlyWhere(torch.autograd.Function):
    @staticmethod
    def forward(then: Callable[..., Tensors], count: int, mask: Tensor, *tensors: Tensor) -> Any:
        return then(*tensors[count:]) if bool(mask) else tuple(t.clone() for t in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("only_where is not differentiable")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        then: Callable[..., Tensors],
        count: int,
        mask: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensors, tuple[int, ...]]:
        dims = in_dims[3:]
        rows = [t if d is None else t.movedim(d, 0) for t, d in zip(tensors, dims, strict=True)]
        kept = [
            (t.expand(info.batch_size, *t.shape) if d is None else t).clone()
            for t, d in zip(rows[:count], dims[:count], strict=True)
        ]
        for i in mask.expand(info.batch_size).nonzero().flatten().tolist():
            fresh = then(*(t if d is None else t[i] for t, d in zip(rows[count:], dims[count:], strict=True)))
            for old, new in zip(kept, fresh, strict=True):
                old[i] = new
        return tuple(kept), (0,) * count


def transformed() -> bool:
    """Whether a vmap or a derivative of torch.func is around this call."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def readable(t: Tensor) -> bool:
    """Whether code may look at the numbers of a tensor: it does not stand for one row of a vmap.

    Args:
        t: what would be looked at.
    """
    return not torch._C._functorch.is_batchedtensor(t)


def differentiated(*operands: Any) -> bool:
    """Whether something around this call may differentiate what is computed from these operands: a derivative of
    torch.func, or autograd, also through vmap.

    Args:
        operands: tensors; anything else is left out.
    """
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != TransformType.Vmap for level in levels) or any(map(_recorded, operands))


def _recorded(operand: Any) -> bool:
    """Whether autograd follows a tensor, which vmap hides."""
    while isinstance(operand, Tensor) and torch._C._functorch.is_batchedtensor(operand):
        operand = torch._C._functorch.get_unwrapped(operand)
    return isinstance(operand, Tensor) and operand.requires_grad


__all__ = ["Flags", "Levels", "Opaque", "differentiated", "only_where", "readable", "transformed"]
