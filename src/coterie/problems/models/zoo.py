"""Networks by name. Each takes the shape of one input and the number of outputs."""

from collections.abc import Callable
from math import prod

import torch
from torch import nn

from coterie.errors import UsageError, unknown
from coterie.problems.models.layers import BatchStatisticsNorm2d, PatchConv2d


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


MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "cnn": cnn,
    "lenet5": lenet5,
}


def build(name: str, shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """A fresh network, its initial parameters fixed by the seed; the global generator is left as it was."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](shape, outputs)
