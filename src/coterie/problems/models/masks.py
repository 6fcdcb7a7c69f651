"""Dropout whose masks come from the draws: a mask depends on the key of its row and on the layer alone.

Modules ask torch for dropout by functions of `torch.nn.functional`. While a model runs with keys, one per row of the
batch, `Masks` answers them. So masks do not depend on how many clients are computed at once, on padding, on where they
are computed, or on an interruption.
"""

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from coterie.numerics import Draw

ALPHA = -1.7580993408473766  # −λα of SELU: the value of dropped units that keeps mean and variance
PLAIN = {F.dropout: 0, torch.dropout: 0, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}
SELF_NORMALISING = {F.alpha_dropout: False, torch.alpha_dropout: False, F.feature_alpha_dropout: True}
# torch's function would hide its own calls from a mode around it: here is the same one that does not look for a mode
_ATTENTION = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
_ATTENTION.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__


class Masks(TorchFunctionMode):
    """Answers calls of dropout by masks from the keys, [n], of a batch's rows; the n-th call gets the n-th masks.

    Args:
        keys: one key per row.
    """

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys = keys
        self.drawn = 0
        self.attention = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in PLAIN:
            return self._dropout(*args, spatial=PLAIN[function], **kwargs)
        if function in SELF_NORMALISING:
            return self._alpha(*args, features=SELF_NORMALISING[function], **kwargs)
        if function is F.scaled_dot_product_attention:
            self.attention = True
            return self._attend(*args, **kwargs)
        if function is F.multi_head_attention_forward:
            self.attention = True
            with self:
                return _ATTENTION(*args, **kwargs)
        return function(*args, **kwargs)

    def kept(self, shape: tuple[int, ...], p: float) -> Tensor:
        """Where units of such an activation stay, each with probability 1 − p."""
        draw = Draw(self.keys).step(self.drawn)
        self.drawn += 1
        rows = len(self.keys)
        if shape[0] % rows == 0:  # one part per row, also where rows and positions are one dimension
            return (draw.uniform(math.prod(shape) // rows) >= p).reshape(shape)
        if len(shape) > 1 and shape[1] == rows:  # positions first
            return (draw.uniform(shape[0], *shape[2:]) >= p).transpose(0, 1)
        return Draw(draw.key.sum()).uniform(*shape) >= p

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, spatial: int = 0
    ) -> Tensor:
        if not training or p in (0.0, 1.0):
            return torch.zeros_like(input) if training and p else input
        shape = tuple(input.shape[: input.dim() - spatial]) + (1,) * spatial
        return input * self.kept(shape, p) / (1.0 - p)

    def _alpha(
        self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False, *, features: bool
    ) -> Tensor:
        if not training or p in (0.0, 1.0):
            return torch.zeros_like(input) if training and p else input
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if features else tuple(input.shape)
        scale = ((1.0 - p) * (1.0 + p * ALPHA**2)) ** -0.5
        return scale * torch.where(self.kept(shape, p), input, ALPHA) - scale * ALPHA * p

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """softmax(QKᵀ/√d + mask) with dropout, times V."""
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            masked = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
        return self._dropout(torch.softmax(scores, -1), dropout_p) @ value


__all__ = ["Masks"]
