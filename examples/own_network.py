"""A network of one's own: any function of the shape of an input and the number of outputs that returns a module."""

from torch import nn


def make(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Sixteen hidden units."""
    return nn.Sequential(nn.Linear(shape[0], 16), nn.Tanh(), nn.Linear(16, outputs))
