"""Convolutions for small batches, by the quickest kernels at hand, as often differentiable as one likes.

A convolution is bilinear, and so are its two derivatives:

    y = x ∗ w        dx = g ∗ᵀ w (the input's gradient)        dw = x ⋆ g (the weights' gradient)

The derivatives of each of the three are made of the other two. So a Hessian-vector product needs these three kernels
only, where torch derives its second derivatives by convolutions whose kernels are as large as images.

Values are torch's own up to rounding. Which kernel computes follows from shapes and layouts alone, so a result has the
same bits whenever it is computed again. Where there are far fewer pixels than outputs, the weights are most of what is
moved, and a convolution's time goes into bringing them into an order of its own. There all three are matrix products
with the weights as they are, and patches are brought into their order instead (`few_pixels`). Elsewhere y and dx are
torch's, and for dw:

- x has one channel (grey images): a matrix product of g with patches of x, of a few images at a time
- x stores its channels last, large images, many channels, no stride: one product per row of the kernel
- x stores its channels last, and there are many outputs or small images: the product with patches
- else: torch's own kernel

None of this is for use under `vmap`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PATCHES = 1 << 19  # bytes of patches at a time: they stay in the cache, and fresh memory is slow
MANY_OUTPUTS = 128
SMALL_IMAGE = 64  # pixels
LARGE_IMAGE = 256
WIDE = 32  # channels and outputs
Pair = tuple[int, int]
_READ: ContextVar[bool] = ContextVar("weight gradients are read", default=True)


@contextmanager
def unread_weight_gradients() -> Iterator[None]:
    """Inside, gradients by weights are made to be differentiated again and not to be read, as in the first pass of a
    Hessian-vector product: they are 0 instead of computed. Their derivatives are right."""
    token = _READ.set(False)
    try:
        yield
    finally:
        _READ.reset(token)


class Geometry(NamedTuple):
    """Stride, border and dilation of a convolution, each by height and width."""

    stride: Pair
    padding: Pair
    dilation: Pair = (1, 1)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, *, linear: bool = False) -> Tensor:
    """x ∗ w + b, [n, outputs, h', w'], in the layout of x.

    Args:
        x: images, [n, channels, h, w].
        weight: [outputs, channels, kernel height, kernel width].
        bias: [outputs], or None.
        geometry: stride, border and dilation.
        linear: whether the weights depend linearly on what is differentiated by: only then `unread_weight_gradients`
            holds for them.

    Example:
        >>> x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2)
        >>> convolution(x, w, None, Geometry((1, 1), (0, 0)))
        tensor([[[[4., 4.],
                  [4., 4.]]]])
    """
    return _Convolution.apply(x, weight, bias, geometry, linear)  # type: ignore[no-untyped-call]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, linear: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry, ctx.linear = geometry, linear
        if not (_is_last(x) and w.is_contiguous() and few_pixels(x.shape, w.shape, geometry)):
            ctx.patches = None
            return F.conv2d(x, w, b, *geometry)
        ctx.patches = _ordered_patches(x, w.shape, geometry)
        y = _like(x, torch.Size((len(x), len(w), *_size(x.shape, w.shape, geometry))))
        rows, weight = _slopes(y), w.flatten(1).T  # views of y, which is none itself: an activation may overwrite it
        torch.mm(ctx.patches, weight, out=rows) if b is None else torch.addmm(b, ctx.patches, weight, out=rows)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        by_x, by_w, by_b, _, _ = ctx.needs_input_grad
        again = torch.is_grad_enabled()  # it is differentiated again
        read = _READ.get() or not (ctx.linear and again)
        patches = None if again else ctx.patches
        return (
            _by_input(g, w, x.shape, ctx.geometry) if by_x else None,
            _by_weights(x, g, w.shape, ctx.geometry, patches, read=read) if by_w else None,
            g.sum((0, 2, 3)) if by_b else None,
            None,
            None,
        )


def input_gradient(g: Tensor, w: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """g ∗ᵀ w; autograd does not see it.

    Args:
        g: the gradient by the convolution's output, [n, outputs, h', w'].
        w: the weights.
        shape: that of the input.
        geometry: stride, border and dilation.
    """
    if _is_last(g) and w.is_contiguous() and few_pixels(shape, w.shape, geometry):
        return _collected(_slopes(g).mm(w.flatten(1)), w.shape, shape, geometry)
    found: Tensor = _torchs(g, _like(g, shape), w, geometry, (True, False, False))[0]
    return found


def _by_input(g: Tensor, w: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    return _InputGradient.apply(g, w, shape, geometry)  # type: ignore[no-untyped-call]


class _InputGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, w: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(g, w)
        ctx.geometry = geometry
        return input_gradient(g, w, shape, geometry)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> Any:
        g, w = ctx.saved_tensors
        by_g, by_w, _, _ = ctx.needs_input_grad
        return (
            convolution(v, w, None, ctx.geometry) if by_g else None,
            _by_weights(v, g, w.shape, ctx.geometry) if by_w else None,
            None,
            None,
        )


def weight_gradient(x: Tensor, g: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """x ⋆ g; autograd does not see it.

    Args:
        x: images, [n, channels, h, w].
        g: the gradient by the convolution's output, [n, outputs, h', w'].
        shape: that of the weights.
        geometry: stride, border and dilation.
    """
    if shape[1] == 1:
        return _by_grey_patches(x, g, shape, geometry)
    pixels = g.shape[2] * g.shape[3]
    if _is_last(x):
        if few_pixels(x.shape, shape, geometry):
            return _by_ordered_patches(_ordered_patches(x, shape, geometry), g, shape)
        dense = geometry.stride == geometry.dilation == (1, 1)
        if dense and pixels >= LARGE_IMAGE and min(shape[:2]) >= WIDE:
            return _by_rows(x, g, shape, geometry)
        if shape[0] >= MANY_OUTPUTS or pixels <= SMALL_IMAGE:
            return _by_patches(x, g, shape, geometry)
    found: Tensor = _torchs(g, x, _like(x, shape), geometry, (False, True, False))[1]
    return found


def _by_weights(
    x: Tensor, g: Tensor, shape: torch.Size, geometry: Geometry, patches: Tensor | None = None, *, read: bool = True
) -> Tensor:
    if patches is not None:
        return _by_ordered_patches(patches, g, shape)
    return _WeightGradient.apply(x, g, shape, geometry, read)  # type: ignore[no-untyped-call]


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, shape: torch.Size, geometry: Geometry, read: bool) -> Tensor:
        ctx.save_for_backward(x, g)
        ctx.geometry = geometry
        return weight_gradient(x, g, shape, geometry) if read else x.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> Any:
        x, g = ctx.saved_tensors
        by_x, by_g, _, _, _ = ctx.needs_input_grad
        return (
            _by_input(g, v, x.shape, ctx.geometry) if by_x else None,
            convolution(x, v, None, ctx.geometry) if by_g else None,
            None,
            None,
            None,
        )


def _torchs(g: Tensor, x: Tensor, w: Tensor, geometry: Geometry, wanted: tuple[bool, bool, bool]) -> Any:
    return torch.ops.aten.convolution_backward(g, x, w, None, *geometry, False, (0, 0), 1, wanted)


def _like(other: Tensor, shape: torch.Size) -> Tensor:
    """A tensor of which only the shape and the layout, that of the other, are looked at."""
    layout = torch.channels_last if _is_last(other) else torch.contiguous_format
    return torch.empty(shape, dtype=other.dtype, device=other.device, memory_format=layout)


def few_pixels(images: torch.Size, weight: torch.Size, geometry: Geometry) -> bool:
    """Whether weights are to be left in the usual layout, where images have their channels last.

    Args:
        images: the shape of the input, [n, channels, h, w].
        weight: that of the weights.
        geometry: stride, border and dilation.

    Example:
        >>> few_pixels(torch.Size((8, 512, 4, 4)), torch.Size((512, 512, 3, 3)), Geometry((1, 1), (1, 1)))
        True
    """
    rows, columns = _size(images, weight, geometry)
    return 2 * images[0] * rows * columns <= weight[0] and weight[1] > 1 and weight[2] * weight[3] > 1


def _size(images: torch.Size, weight: torch.Size, geometry: Geometry) -> Pair:
    """Height and width of what comes out."""
    height, width = (
        (images[2 + i] + 2 * p - d * (weight[2 + i] - 1) - 1) // s + 1
        for i, (s, p, d) in enumerate(zip(*geometry, strict=True))
    )
    return height, width


def _slopes(g: Tensor) -> Tensor:
    """A row per pixel of all images, [n h' w', outputs]."""
    return g.permute(0, 2, 3, 1).reshape(-1, g.shape[1])


def _places(weight: torch.Size, size: Pair, geometry: Geometry) -> Iterator[tuple[int, int, slice, slice]]:
    """Each place in the kernel, and which lines and columns of padded images are seen there."""
    (down, right), _, (dy, dx) = geometry
    for i in range(weight[2]):
        for j in range(weight[3]):
            yield i, j, slice(i * dy, i * dy + down * size[0], down), slice(j * dx, j * dx + right * size[1], right)


def _ordered_patches(x: Tensor, weight: torch.Size, geometry: Geometry) -> Tensor:
    """What the kernel sees, in the order of the weights, [n h' w', channels × kernel]; place by place in the kernel,
    because torch copies long runs into gaps far quicker than short runs of three numbers."""
    padded, size = _padded(x, geometry).permute(0, 2, 3, 1), _size(x.shape, weight, geometry)
    patches = x.new_empty(len(x), *size, *weight[1:])
    for i, j, lines, columns in _places(weight, size, geometry):
        patches[..., i, j] = padded[:, lines, columns]
    return patches.view(-1, weight[1:].numel())


def _by_ordered_patches(patches: Tensor, g: Tensor, shape: torch.Size) -> Tensor:
    """The weights' gradient, in the order of the weights."""
    return _slopes(g).T.mm(patches).view(shape)


def _collected(patches: Tensor, weight: torch.Size, images: torch.Size, geometry: Geometry) -> Tensor:
    """Images [n, channels, h, w], each pixel the sum of what patches, [n h' w', channels × kernel], have there."""
    n, channels, height, width = images
    size, (below, beside) = _size(images, weight, geometry), geometry.padding
    total = patches.new_zeros(n, height + 2 * below, width + 2 * beside, channels)
    seen = patches.view(n, *size, *weight[1:])
    for i, j, lines, columns in _places(weight, size, geometry):
        total[:, lines, columns] += seen[..., i, j]
    return total[:, below : below + height, beside : beside + width].contiguous().permute(0, 3, 1, 2)


def _is_last(x: Tensor) -> bool:
    """Whether images store their channels last."""
    return x.is_contiguous(memory_format=torch.channels_last)


def _by_patches(x: Tensor, g: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """Channels are stored last, so a row of a patch is one run of numbers."""
    outputs, channels, height, width = shape
    rows, columns = g.shape[2:]
    slopes = g.permute(0, 2, 3, 1).reshape(-1, rows * columns, outputs)
    patches = _patches(x, g, shape, geometry).permute(0, 4, 5, 2, 3, 1)
    size = height * width * channels
    total: Tensor | None = None
    for i, some in _blocks(patches, outputs * size):  # fewer patches would be less than the sum that they are added to
        pair = slopes[i : i + len(some)].flatten(0, 1).T, some.reshape(-1, size)
        total = pair[0] @ pair[1] if total is None else total.addmm_(*pair)
    assert total is not None
    return total.view(outputs, height, width, channels).permute(0, 3, 1, 2)


def _by_rows(x: Tensor, g: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """The kernel moves by one pixel, so what its row i sees is what row 0 sees, i lines further down: patches are as
    high as one line only, and stay in the cache."""
    outputs, channels, height, width = shape
    rows, columns = g.shape[2:]
    lines = _padded(x, geometry)
    n, down, right = lines.stride(0), lines.stride(2), lines.stride(3)
    seen = (len(x), lines.shape[2], columns, width, channels)
    lines = lines.as_strided(seen, (n, down, right, right, 1))
    slopes = g.permute(0, 2, 3, 1).reshape(len(x), rows * columns, outputs).mT
    some = x.new_empty(seen[1:])
    flat = some.view(-1, width * channels)
    total = x.new_zeros(height, outputs, width * channels)
    for image, slope in zip(lines, slopes, strict=True):
        some.copy_(image)
        for i in range(height):
            total[i].addmm_(slope, flat[i * columns : (i + rows) * columns])
    return total.view(height, outputs, width, channels).permute(1, 3, 0, 2)


def _by_grey_patches(x: Tensor, g: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """There is one channel, so runs are made as long as an image is wide: first all images for one place in the kernel,
    then for the next."""
    outputs, size = shape[0], shape[2] * shape[3]
    patches = _patches(x, g, shape, geometry)[:, 0]
    last = _is_last(g)
    total = x.new_zeros(size, outputs)
    for i, some in _blocks(patches):
        slopes = g[i : i + len(some)]
        if last:
            total.addmm_(some.permute(1, 2, 0, 3, 4).reshape(size, -1), slopes.permute(0, 2, 3, 1).reshape(-1, outputs))
        else:
            total += torch.bmm(some.reshape(len(some), size, -1), slopes.flatten(2).mT).sum(0)
    return total.T.reshape(shape)


def _patches(x: Tensor, g: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """What the kernel sees of padded images, without a copy: [n, channels, kernel height, width, h', w']."""
    stride, _, dilation = geometry
    x = _padded(x, geometry)
    n, channels, down, right = x.stride()
    steps = (down * dilation[0], right * dilation[1], down * stride[0], right * stride[1])
    return x.as_strided((len(x), *shape[1:], *g.shape[2:]), (n, channels, *steps))


def _padded(x: Tensor, geometry: Geometry) -> Tensor:
    """Images with their border, in the layout of x."""
    border = (geometry.padding[1],) * 2 + (geometry.padding[0],) * 2
    if _is_last(x):
        return F.pad(x.permute(0, 2, 3, 1), (0, 0, *border)).permute(0, 3, 1, 2)
    return F.pad(x, border)


def _blocks(patches: Tensor, least: int = 0) -> Iterator[tuple[int, Tensor]]:
    """The patches of a few images at a time, about `least` numbers or more, and the number of the first of these."""
    size = max(1, max(PATCHES // patches.element_size(), least) // max(1, patches[:1].numel()))
    return ((i, patches[i : i + size]) for i in range(0, len(patches), size))


__all__ = [
    "Geometry",
    "convolution",
    "few_pixels",
    "input_gradient",
    "unread_weight_gradients",
    "weight_gradient",
]
