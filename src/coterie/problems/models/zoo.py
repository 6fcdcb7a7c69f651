"""Networks by name. Each takes the shape of one input and the number of outputs."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from math import prod

import torch
from torch import nn

from coterie.errors import UsageError
from coterie.problems.models.layers import BatchStatisticsNorm2d, PatchConv2d
from coterie.problems.models.resnet import resnet18_layers
from coterie.settings import chosen


def logistic(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One linear map of the flattened input: multinomial logistic or linear regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), outputs))


def mlp(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One hidden layer of 64."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 64), nn.ReLU(), nn.Linear(64, outputs))


def cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The small network of 'Adaptively weighted nodes', section G: two strided convolutions, each with batch norm.

    Its first kernel, of 4, leaves nothing of an 8 × 8 image; below 16 pixels both are 2, with 4 and 8 channels.
    """
    channels, height, width = _image(shape, "cnn", smallest=4)
    if min(height, width) < 16:
        first, middle, last = 2, 4, 8
    else:
        first, middle, last = 4, channels, 2 if channels == 1 else 5
    sizes = [((side + 2) // first + 2) // 2 for side in (height, width)]
    return nn.Sequential(
        PatchConv2d(channels, middle, first, padding=1),
        BatchStatisticsNorm2d(middle),
        nn.ReLU(),
        PatchConv2d(middle, last, 2, padding=1),
        BatchStatisticsNorm2d(last),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(last * prod(sizes), outputs),
    )


def lenet5(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling; images below 32 pixels get a border of 2."""
    channels, height, width = _image(shape, "lenet5", smallest=12)
    border = 2 if min(height, width) < 32 else 0
    sizes = [((side + 2 * border - 4) // 2 - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=border),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * prod(sizes), 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, outputs),
    )


def wide_cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The CNN of McMahan et al. 2017 as PFLlib has it: 5 × 5 convolutions of 32 and 64, and a hidden layer of 512.

    Max pooling follows each convolution, and nothing is padded.
    """
    channels, height, width = _image(shape, "wide-cnn", smallest=16)
    sizes = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * prod(sizes), 512),
        nn.ReLU(),
        nn.Linear(512, outputs),
    )


def small_cnn(shape: tuple[int, ...], outputs: int, width: int = 32, norm: bool = False) -> nn.Module:
    """Three 3 × 3 convolutions of 32, 64 and 64 channels, each with max pooling, and a hidden layer of 64.

    With another width for the first, the others are twice that; with norm, each convolution has batch norm.
    """
    channels, rows, columns = _image(shape, "small-cnn", smallest=8)
    wide = 2 * width
    layers: list[nn.Module] = []
    for before, after in ((channels, width), (width, wide), (wide, wide)):
        layers += [nn.Conv2d(before, after, 3, padding=1), *([BatchStatisticsNorm2d(after)] if norm else [])]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    pooled = wide * (rows // 8) * (columns // 8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(pooled, wide), nn.ReLU(), nn.Linear(wide, outputs))


def conv4(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The network of 'FedSep': three 3 × 3 convolutions and a 2 × 2 one of 32 kernels (64 for colour), then one linear.

    The paper names no pooling; here each of the first three halves an image of at least 4 pixels.
    """
    channels, height, width = _image(shape, "conv4", smallest=4)
    kernels, before = 32 if channels == 1 else 64, channels
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Conv2d(before, kernels, 3, padding=1), nn.ReLU()]
        if min(height, width) >= 4:
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
        before = kernels
    flat = kernels * (height - 1) * (width - 1)
    return nn.Sequential(*layers, nn.Conv2d(kernels, kernels, 2), nn.ReLU(), nn.Flatten(), nn.Linear(flat, outputs))


def resnet18(shape: tuple[int, ...], outputs: int, width: int = 64) -> nn.Module:
    """ResNet-18 for small images; its first stage has `width` channels."""
    return resnet18_layers(_image(shape, "resnet18", smallest=8)[0], outputs, width)


def _image(shape: tuple[int, ...], model: str, smallest: int) -> tuple[int, int, int]:
    """Channels, height and width, or why this model cannot take such inputs."""
    if len(shape) != 3:
        raise UsageError(
            f"model {model} needs images (channels, height, width), but inputs here have shape {shape}; "
            f"use model logistic or mlp."
        )
    channels, height, width = shape
    if min(height, width) < smallest:
        raise UsageError(
            f"model {model} needs images of at least {smallest} × {smallest}, not {height} × {width}; "
            f"use model logistic, mlp or cnn."
        )
    return channels, height, width


MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "cnn": cnn,
    "lenet5": lenet5,
    "wide-cnn": wide_cnn,
    "small-cnn": small_cnn,
    "small-cnn-norm": partial(small_cnn, norm=True),
    "conv4": conv4,
    "resnet18": resnet18,
    "resnet18-narrow": partial(resnet18, width=16),  # a sixteenth of the parameters and of the work
}


def build(name: str, shape: tuple[int, ...], outputs: int, seed: int, width: int | None = None) -> nn.Module:
    """A fresh network, its initial parameters fixed by the seed; the global generator is left as it was."""
    make = chosen("model", name, MODELS)
    options = {} if width is None else {"width": width}
    if options and "width" not in signature(make).parameters:
        wide = ", ".join(other for other in MODELS if "width" in signature(MODELS[other]).parameters)
        raise UsageError(f"model {name} has no width to choose; leave problem.width out, or use one of {wide}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(shape, outputs, **options)
