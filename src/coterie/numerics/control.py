"""Control flow that survives vmap: costly work for only those rows that need it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


def only_where(mask: Tensor, then: Callable[..., Tensors], otherwise: Tensors, operands: Tensors) -> Tensors:
    """then(*operands) where the mask is true, else `otherwise`.

    Under vmap, `torch.where` would compute `then` for every row; this computes it for the true rows alone, one after
    the other and outside of vmap: meant for a costly `then` that few rows need. All tensors that differ by row must be
    among the operands (`then` may close over common ones only). Not differentiable.
    """
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


__all__ = ["only_where", "transformed"]
