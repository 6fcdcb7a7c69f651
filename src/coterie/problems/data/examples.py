"""What every loader returns: examples in a compact type, and how they become model inputs."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.numerics import Draw


class Examples(NamedTuple):
    """Inputs, a row each (images are [n, channels, height, width]), and their class numbers from 0."""

    x: Tensor
    y: Tensor


class Holder(NamedTuple):
    """A real holder of data, such as a hospital or a writer: its name, training rows and test rows."""

    name: str
    train: Examples
    test: Examples


class Scale(NamedTuple):
    """x ↦ (x − shift) / width, in float32."""

    shift: Tensor
    width: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Model inputs."""
        return x.to(torch.float32, copy=True).sub_(self.shift).div_(self.width)


@dataclass(frozen=True)
class DataSet:
    """A data set as published. Inputs keep their compact type until the rows that are needed are known."""

    name: str
    classes: int
    train: Examples
    test: Examples | None = None  # None: it was published in one part
    unit: float = 1.0  # the number that stands for 1 in x: 255 for bytes
    measured: int = 0  # the leading columns that are measurements, to be standardised; the others are 0 or 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.train.x.shape[1:])

    @property
    def holds_images(self) -> bool:
        """Whether an input is channels × height × width."""
        return len(self.shape) == 3

    def parts(self, test: int, draw: Draw) -> tuple[Examples, Examples]:
        """Training and test rows as published, or so many rows set aside where there is one part only."""
        if self.test is not None:
            return self.train, self.test
        x, y = self.train
        if test >= len(y):
            raise UsageError(f"{self.name} has {len(y)} rows; problem.test = {test} leaves none to train on. Lower it.")
        order = draw.permutation(len(y))
        return Examples(x[order[test:]], y[order[test:]]), Examples(x[order[:test]], y[order[:test]])

    def scale(self, rows: Tensor | None = None) -> Scale:
        """To [0, 1], and measured columns to mean 0 and deviation 1 over these rows of train, or all of it."""
        shift, width = torch.zeros(self.shape), torch.full(self.shape, self.unit)
        if self.measured:
            x = self.train.x[:, : self.measured]
            x = (x if rows is None else x[rows]).to(torch.float64)
            shift[: self.measured] = x.mean(0)
            deviation = x.std(0, correction=0)
            width[: self.measured] = torch.where(deviation > 0, deviation, 1.0)
        return Scale(shift, width)
