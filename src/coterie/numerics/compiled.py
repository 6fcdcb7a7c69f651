"""Functions compiled into one kernel, `vmap` included.

`torch.func.vmap` runs a function operation by operation; for small models most of the time goes into starting
operations and writing intermediate values. A fused function is opaque to the surrounding vmap: when it is reached, it
is vectorised as a whole, compiled once for each shape by `torch.compile`, and kept. The compiler's own cache on disk
makes later processes start quickly. Where there is no working compiler the function runs as it is, with a warning.

A fused function is not differentiable, and sums may differ from the plain ones in the last bits.
"""

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

Dims = tuple[int | None, ...]
TOLERANCE = 1e-3  # relative, of a compiled value; rounding alone stays far below


class Fused:
    """A function of tensors that is compiled at first use."""

    def __init__(self, plain: Callable[..., Tensor]) -> None:
        self.plain = plain
        self._by_shape: dict[Hashable, Callable[..., Tensor]] = {}
        self._vectorised: dict[Dims, Fused] = {}

    def __call__(self, *operands: Tensor) -> Tensor:
        """The function's value; all tensors that differ by row of a vmap must be among the operands."""
        return _Apply.apply(self, *operands)  # type: ignore[no-untyped-call]

    def over(self, dims: Dims) -> "Fused":
        """The function mapped over these dimensions, the same object for the same dimensions."""
        if dims not in self._vectorised:
            self._vectorised[dims] = Fused(vmap(self.plain, in_dims=dims))
        return self._vectorised[dims]

    def run(self, *operands: Tensor) -> Tensor:
        """Compute, by the function that was compiled for such operands."""
        key = tuple((t.shape, t.dtype) for t in operands)
        if key not in self._by_shape:
            self._by_shape[key] = _compiled(self.plain, operands)
        return self._by_shape[key](*operands)


def _compiled(plain: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """The function compiled for these operands; the function itself where that fails or gives another value."""
    try:
        # The pattern matcher of torch 2.13 turned a Hessian-vector product into another number; hence also the trial.
        graph = make_fx(plain)(*operands)
        compiled = torch.compile(graph, fullgraph=True, dynamic=False, options={"pattern_matcher": False})
        fast, slow = compiled(*operands), plain(*operands)
        if float((fast - slow).norm()) <= TOLERANCE * float(slow.norm()):
            return compiled
        reason = "the compiled function gives another value"
    except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
        reason = " ".join(str(error).split())[:300]
    warnings.warn(f"not compiled, runs as it is: {reason}", RuntimeWarning, stacklevel=2)
    return plain


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(fused: Fused, *operands: Tensor) -> Tensor:
        return fused.run(*operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("a fused function is not differentiable")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], fused: Fused, *operands: Tensor) -> tuple[Tensor, int]:
        return fused.over(in_dims[1:])(*operands), 0


__all__ = ["Fused"]
