"""Functions compiled into one kernel, `vmap` included.

`torch.func.vmap` runs a function operation by operation; for small models most of the time goes into starting
operations and writing intermediate values. A fused function is opaque to the surrounding vmap: when it is reached, it
is vectorised as a whole, compiled once for each shape by `torch.compile`, and kept. The compiler's own cache on disk
makes later processes start quickly. Where there is no working compiler the function runs as it is, with a warning.

A fused function is not differentiable, and sums may differ from the plain ones in the last bits.
"""

import warnings
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from coterie.numerics.control import Opaque

TOLERANCE = 1e-3  # relative, of a compiled value; rounding alone stays far below


class Fused(Opaque):
    """A function of tensors that is compiled at first use."""

    constant = True

    def __init__(self, plain: Callable[..., Tensor]) -> None:
        super().__init__(plain)
        self._by_shape: dict[Hashable, Callable[..., Tensor]] = {}

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


__all__ = ["Fused"]
