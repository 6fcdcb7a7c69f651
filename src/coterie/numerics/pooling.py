"""Max pooling of 2 × 2 pixels, forwards and backwards, by comparisons of whole columns and rows where that is quicker.

Images with channels outermost are pooled here; torch's own kernel takes several times as long for them, and is used
where channels are stored last. Not for use under `vmap`.
"""

from typing import Any

import torch
from torch import Tensor


def max_pool(x: Tensor) -> Tensor:
    """The largest number of every 2 × 2 pixels, [n, channels, h / 2, w / 2]; a last odd row or column is left out.

    For images with channels outermost, where torch's own takes several times as long. Among equal numbers the gradient
    goes to the first one, as torch has it.

    Args:
        x: images, [n, channels, h, w].

    Example:
        >>> max_pool(torch.tensor([[[[1.0, 2.0], [4.0, 3.0]]]]))
        tensor([[[[4.]]]])
    """
    return _MaxPool.apply(x)  # type: ignore[no-untyped-call]


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        largest, places = _maxima(x)
        ctx.save_for_backward(places)
        return largest

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        n, channels, height, width = ctx.shape
        (places,) = ctx.saved_tensors
        return g.new_zeros(n, channels, height * width).scatter(2, places.flatten(2), g.flatten(2)).view(ctx.shape)


def maxima(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of every 2 × 2 pixels, and its place in its image; autograd does not see it.

    Args:
        x: images, [n, channels, h, w].

    Example:
        >>> maxima(torch.tensor([[[[1.0, 2.0], [4.0, 3.0]]]]))
        (tensor([[[[4.]]]]), tensor([[[[2]]]]))
    """
    if _channels_outermost(x):
        return _maxima(x)
    found: tuple[Tensor, Tensor] = torch.ops.aten.max_pool2d_with_indices(x, [2, 2])
    return found


def spread(g: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Numbers at their places in images that are 0 elsewhere; autograd does not see it.

    Args:
        g: numbers, [n, channels, h', w'].
        places: where `maxima` found them.
        shape: that of the images.
    """
    if _channels_outermost(g):
        found = g.new_zeros(shape)
        found.flatten(2).scatter_(2, places.flatten(2), g.flatten(2))
        return found
    layout = torch.channels_last if g.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    like = torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=layout)
    back: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
        g, like, [2, 2], [2, 2], [0, 0], [1, 1], False, places
    )
    return back


def picked(x: Tensor, places: Tensor) -> Tensor:
    """The numbers of images at given places; autograd does not see it.

    Args:
        x: images, [n, channels, h, w].
        places: where `maxima` found those of other images.
    """
    if _channels_outermost(x):
        return x.flatten(2).gather(2, places.flatten(2)).view(places.shape)
    rows, order = (t.permute(0, 2, 3, 1).flatten(1, 2) for t in (x, places))
    n, channels, height, width = places.shape
    return rows.gather(1, order).view(n, height, width, channels).permute(0, 3, 1, 2)


def _channels_outermost(x: Tensor) -> bool:
    """Whether images are stored so, and nothing else could be meant by their strides."""
    return x.is_contiguous() and min(x.shape[1:]) > 1


def _maxima(x: Tensor) -> tuple[Tensor, Tensor]:
    """For images with channels outermost."""
    full = x.shape[3]
    rows, columns = x.shape[2] // 2, full // 2
    x = x[..., : 2 * rows, : 2 * columns]
    left, right = x[..., 0::2], x[..., 1::2]
    wider = torch.maximum(left, right)
    above, below = wider[..., 0::2, :], wider[..., 1::2, :]
    lower, on_right = below > above, right > left
    column = (on_right[..., 1::2, :] & lower) | (on_right[..., 0::2, :] > lower)  # `where` takes far longer
    corner = torch.arange(0, 2 * columns, 2) + full * torch.arange(0, 2 * rows, 2)[:, None]
    places = corner + column.long()
    return torch.maximum(above, below), places.add_(lower.long(), alpha=full)


__all__ = ["max_pool", "maxima", "picked", "spread"]
