"""Networks by name. Each takes the shape of one input and the number of outputs."""

from collections.abc import Callable
from math import prod

import torch
from torch import nn

from coterie.errors import unknown


def logistic(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One linear map of the flattened input: multinomial logistic or linear regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), outputs))


def mlp(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One hidden layer of 64."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 64), nn.ReLU(), nn.Linear(64, outputs))


MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {"logistic": logistic, "mlp": mlp}


def build(name: str, shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """A fresh network, its initial parameters fixed by the seed; the global generator is left as it was."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](shape, outputs)
