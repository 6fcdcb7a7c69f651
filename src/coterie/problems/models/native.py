"""Layers for clients that are computed one after the other: torch's own layers, by other kernels.

oneDNN's convolutions and torch's batch norm and max pooling are quicker where channels are stored last. So in networks
of torch's layers alone, whose convolutions all have many outputs, images are stored so from the first convolution on.
A forward that others wrote may rely on the usual layout (`x.view(n, -1)`), and images with few channels are quicker in
it. There max pooling is coterie's own. Under vmap, while operations are recorded, in portable processes and on other
devices layers do what torch's do.
"""

from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from coterie.machine import wanted
from coterie.numerics.control import transformed
from coterie.numerics.convolutions import Geometry, convolution, few_pixels
from coterie.numerics.pooling import max_pool
from coterie.numerics.tracing import recording

MANY_CHANNELS = 16
M = TypeVar("M", bound=nn.Module)


class NativeConv2d(nn.Conv2d):
    """A convolution with torch's parameters and values."""

    channels_last = False

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] to [n, outputs, h', w']."""
        if not is_native(x):
            return super().forward(x)
        weight = self.weight
        geometry = Geometry(self.stride, self.padding, self.dilation)  # type: ignore[arg-type]
        if self.channels_last:
            x = channels_last(x)
            weight = weight if few_pixels(x.shape, weight.shape, geometry) else channels_last(weight)
        # a hook (weight_norm) may have made the weight of other parameters; then it is none itself
        return convolution(x, weight, self.bias, geometry, linear="weight" in self._parameters)


class NativeMaxPool2d(nn.MaxPool2d):
    """Max pooling of 2 × 2 pixels."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] to [n, channels, h / 2, w / 2]."""
        usual = is_native(x) and x.is_contiguous() and min(x.shape[1:]) > 1
        return max_pool(x) if usual else super().forward(x)


def with_native_layers(module: M) -> M:
    """The module itself, whose convolutions and poolings are exchanged for those of this file where they can be.

    Args:
        module: a module that nobody else uses.
    """
    if wanted():  # oneDNN, for which this is made, is off there
        return module
    parts = list(module.modules())
    for part in parts:
        if is_plain_convolution(part):
            part.__class__ = NativeConv2d
        elif is_plain_pooling(part):
            part.__class__ = NativeMaxPool2d
    convolutions = [part for part in parts if isinstance(part, NativeConv2d)]
    last = all(map(_is_known, parts)) and all(part.out_channels >= MANY_CHANNELS for part in convolutions)
    for part in convolutions:
        part.channels_last = last
    return module


def channels_last(x: Tensor) -> Tensor:
    """The same images, stored so. Where there is one channel both layouts are the same, and strides tell them apart.

    Args:
        x: images, [n, channels, h, w].
    """
    if x.shape[1] == 1 and x.is_contiguous():
        return x.squeeze(1).unsqueeze(3).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)


def is_native(x: Tensor) -> bool:
    """Whether the kernels of this file may compute a layer: rows are there, and nothing else is around the call.

    Args:
        x: what the layer is given.
    """
    images = x.dim() == 4 and len(x) > 0 and x.device.type == "cpu" and x.is_floating_point()
    return images and not (transformed() or recording() or torch.is_autocast_enabled("cpu"))


def _is_known(part: nn.Module) -> bool:
    return type(part).__module__.startswith(("torch.nn.modules.", "coterie."))


def is_plain_convolution(part: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether it is torch's convolution of all channels, with a border of zeros.

    Args:
        part: any module.
    """
    return (
        type(part) is nn.Conv2d
        and part.groups == 1
        and part.padding_mode == "zeros"
        and not isinstance(part.padding, str)
    )


def is_plain_pooling(part: nn.Module) -> bool:
    """Whether it is torch's max pooling of 2 × 2 pixels.

    Args:
        part: any module.
    """
    usual = nn.MaxPool2d(2)
    return type(part) is nn.MaxPool2d and part.extra_repr() == usual.extra_repr() and not part.return_indices


__all__ = [
    "MANY_CHANNELS",
    "NativeConv2d",
    "NativeMaxPool2d",
    "channels_last",
    "is_native",
    "is_plain_convolution",
    "is_plain_pooling",
    "with_native_layers",
]
