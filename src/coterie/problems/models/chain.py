"""Convolutional networks without branches, differentiated by hand, for clients that are computed one after the other.

Each stage is a convolution or a linear map, then a constant factor, batch norm N by the batch at hand, max pooling and
rectified units where it has them. The maximum of rectified numbers is the rectified maximum, so units come after
pooling, on a quarter of the numbers:

    z = N(c (x ∗ w + b)),   p = pool(z),   h = relu(p)

A gradient g by h goes back through the same places, and its sum over pixels, without norm the gradient by b, is taken
before it is spread. A Hessian-vector product of a network without norms is the derivative of all this where θ moves
along v (Pearlmutter 1994):

    ż = x ∗ ẇ + ẋ ∗ w + ḃ,   ∂ẇ = x ⋆ ġ + ẋ ⋆ g,   ∂ẋ = ġ ∗ᵀ w + g ∗ᵀ ẇ

The network's input does not move, so what only its derivatives would need is left out. Numbers are those of the module
and of autograd up to rounding; autograd's bookkeeping and the tensors that it keeps were a third of a small network's
time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coterie.machine import wanted
from coterie.numerics.convolutions import Geometry, input_gradient, weight_gradient
from coterie.numerics.memory import empty_like
from coterie.numerics.pooling import maxima, picked, spread
from coterie.problems.models.layers import BatchStatisticsNorm2d, Scaler, check_values
from coterie.problems.models.native import (
    MANY_CHANNELS,
    channels_last,
    is_native,
    is_plain_convolution,
    is_plain_pooling,
)
from coterie.problems.models.perceptron import heard, trained

Slope = Callable[[Tensor], Tensor]
Slopes = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class _Kept(NamedTuple):
    """What the way back needs of a stage: its input and output, the shape before pooling, where the maxima were.

    normed is what the norm was given, its mean by channel and one over its deviation.
    """

    x: Tensor
    h: Tensor
    shape: torch.Size
    places: Tensor | None
    normed: tuple[Tensor, Tensor, Tensor] | None = None


@dataclass(frozen=True)
class _Linear:
    """A linear map of rows. The shape is that of its matrix, outputs × inputs."""

    shape: tuple[int, ...]
    rectified: bool
    factor: float = 1.0
    norm: float | None = None
    pooled: bool = False

    def entering(self, h: Tensor) -> Tensor:
        """What comes out of the stage before, as rows."""
        return h.flatten(1)

    def map(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """x ∗ w + b."""
        return F.linear(x, w, b)

    def by_weights(self, x: Tensor, g: Tensor) -> Tensor:
        """x ⋆ g."""
        return g.t().mm(x)

    def by_input(self, g: Tensor, w: Tensor, x: Tensor) -> Tensor:
        """g ∗ᵀ w."""
        return g.mm(w)

    def over_rows(self, g: Tensor, out: Tensor) -> None:
        """The gradient by the offset."""
        torch.sum(g, 0, out=out)


@dataclass(frozen=True)
class _Convolution:
    """A convolution of images. The shape is that of its kernels; norm is the ε of its batch norm."""

    shape: tuple[int, ...]
    rectified: bool
    factor: float
    norm: float | None
    pooled: bool
    geometry: Geometry

    def entering(self, h: Tensor) -> Tensor:
        """What comes out of the stage before: images."""
        return h

    def map(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """x ∗ w + b."""
        return F.conv2d(x, w, b, *self.geometry)

    def by_weights(self, x: Tensor, g: Tensor) -> Tensor:
        """x ⋆ g."""
        return weight_gradient(x, g, torch.Size(self.shape), self.geometry)

    def by_input(self, g: Tensor, w: Tensor, x: Tensor) -> Tensor:
        """g ∗ᵀ w."""
        return input_gradient(g, w, x.shape, self.geometry)

    def over_rows(self, g: Tensor, out: Tensor) -> None:
        """The gradient by the offset."""
        torch.sum(g, (0, 2, 3), out=out)


_Stage = _Linear | _Convolution


class Chain(NamedTuple):
    """What is to be known of such a module. θ has each stage's weights, its offset, and its norm's scale and shift.

    Args:
        stages: convolutions, then linear maps; the last has no units.
        channels_last: whether images are stored with their channels last.
    """

    stages: tuple[_Stage, ...]
    channels_last: bool

    @staticmethod
    def of(module: nn.Module) -> "Chain | None":
        """The chain that a module is; None where it is something else, or where somebody listens to its layers."""
        if type(module) is not nn.Sequential or any(map(heard, module.modules())):
            return None
        layers, stages, flat = _in_order(module)[::-1], list[_Stage](), False
        while layers:
            layer = layers.pop()
            if isinstance(layer, nn.Conv2d) and is_plain_convolution(layer) and trained(layer) and not flat:
                factor, norm = _factor(layers), _norm(layers)
                units, pooling = _follows(layers, _is_relu), _follows(layers, is_plain_pooling)
                units |= _follows(layers, _is_relu)  # either order
                geometry = Geometry(layer.stride, layer.padding, layer.dilation)  # type: ignore[arg-type]
                stages.append(_Convolution(tuple(layer.weight.shape), units, factor, norm, pooling, geometry))
            elif type(layer) is nn.Linear and trained(layer) and flat:
                factor = _factor(layers)
                stages.append(_Linear(tuple(layer.weight.shape), _follows(layers, _is_relu), factor))
            elif type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1) and stages and not flat:
                flat = True
            else:
                return None
        if not stages or not isinstance(stages[-1], _Linear) or stages[-1].rectified:
            return None
        last = all(stage.shape[0] >= MANY_CHANNELS for stage in stages if isinstance(stage, _Convolution))
        return Chain(tuple(stages), last)

    def takes(self, inputs: object) -> TypeGuard[Tensor]:
        """Whether inputs are images, and kernels other than those of torch's layers may compute here.

        Args:
            inputs: what a model is given.
        """
        return isinstance(inputs, Tensor) and not wanted() and is_native(inputs)

    def gradient(self, theta: Tensor, inputs: Tensor, slope: Slope) -> Tensor:
        """∇L(θ); not to be differentiated again, and not for use under vmap.

        Args:
            theta: the parameters.
            inputs: images, [n, channels, h, w].
            slope: from the outputs to the derivative of L by them.
        """
        return self.outputs_and_gradient(theta, inputs, slope)[1]

    def outputs_and_gradient(self, theta: Tensor, inputs: Tensor, slope: Slope) -> tuple[Tensor, Tensor]:
        """The outputs and ∇L(θ), by one pass forward.

        Args:
            theta: the parameters.
            inputs: images, [n, channels, h, w].
            slope: from the outputs to the derivative of L by them.
        """
        weights, run, h = self._weights(theta), list[_Kept](), self._images(inputs)
        for stage, values in zip(self.stages, weights, strict=True):
            run.append(_forward(stage, stage.entering(h), values))
            h = run[-1].h
        g, found = slope(h), empty_like(theta)
        for i, (by_w, by_b, *by_norm) in self._backwards(found):
            stage, kept = self.stages[i], run[i]
            g = self._before_units(stage, g, kept)
            if by_norm:
                g = _before_norm(_before_pooling(g, kept), stage, kept, weights[i][2], by_norm)
            g = _scaled(stage, g)
            stage.over_rows(g, by_b)
            g = g if by_norm else _before_pooling(g, kept)
            by_w.copy_(stage.by_weights(kept.x, g))
            g = stage.by_input(g, weights[i][0], kept.x) if i else g
        return h, found

    def product(self, theta: Tensor, v: Tensor, inputs: Tensor, slopes: Slopes) -> Tensor:
        """∇²L(θ) v of a network without norms; not to be differentiated again, and not for use under vmap.

        Args:
            theta: the parameters.
            v: the direction.
            inputs: images, [n, channels, h, w].
            slopes: from the outputs and how they move to the derivative of L by them, and how that moves.
        """
        weights, along = self._weights(theta), self._weights(v)
        run, moves = list[_Kept](), list[Tensor]()
        h, dh = self._images(inputs), inputs.new_empty(0)
        for stage, (w, b), (dw, db) in zip(self.stages, weights, along, strict=True):
            x = stage.entering(h)
            kept, dz = _forward(stage, x, [w, b]), stage.map(x, dw, db)
            if run:
                moves.append(stage.entering(dh))
                dz += stage.map(moves[-1], w, None)
            run.append(kept)
            h, dh = kept.h, _after_units(stage, _scaled(stage, dz), kept)
        (g, dg), found = slopes(h, dh), empty_like(theta)
        for i, (by_w, by_b) in self._backwards(found):
            stage, kept, w, dw = self.stages[i], run[i], weights[i][0], along[i][0]
            dg = _scaled(stage, self._before_units(stage, dg, kept))
            stage.over_rows(dg, by_b)
            dg = _before_pooling(dg, kept)
            by_w.copy_(stage.by_weights(kept.x, dg))
            if i:
                g = _before_pooling(_scaled(stage, self._before_units(stage, g, kept)), kept)
                by_w += stage.by_weights(moves[i - 1], g)
                dg = stage.by_input(dg, w, kept.x)
                dg += stage.by_input(g, dw, kept.x)
                g = stage.by_input(g, w, kept.x) if i > 1 else g  # nobody asks for it at the first stage
        return found

    def _weights(self, theta: Tensor) -> list[list[Tensor]]:
        """Each stage's weights, stored as its images are, its offset, and its norm's scale and shift."""
        return [[self._images(w) if w.dim() == 4 else w, *others] for w, *others in self._views(theta)]

    def _views(self, theta: Tensor) -> list[list[Tensor]]:
        """The same, as views into θ."""
        counts = [1 if stage.norm is None else 3 for stage in self.stages]
        lengths = [[prod(stage.shape), *[stage.shape[0]] * n] for stage, n in zip(self.stages, counts, strict=True)]
        parts = iter(theta.split_with_sizes([length for stage in lengths for length in stage]))
        return [
            [next(parts).view(stage.shape), *(next(parts) for _ in range(n))]
            for stage, n in zip(self.stages, counts, strict=True)
        ]

    def _backwards(self, found: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """The stages' numbers from the last to the first, with where their derivatives go."""
        views = self._views(found)
        return ((i, views[i]) for i in reversed(range(len(views))))

    def _images(self, x: Tensor) -> Tensor:
        return channels_last(x) if self.channels_last else x.contiguous()

    def _before_units(self, stage: _Stage, g: Tensor, kept: _Kept) -> Tensor:
        """A slope by h made one by p."""
        if g.dim() < kept.h.dim():  # of rows, by a linear map behind a convolution
            g = self._images(g.view(kept.h.shape))
        return _where_positive(g, kept.h) if stage.rectified else g


def _forward(stage: _Stage, x: Tensor, values: list[Tensor]) -> _Kept:
    w, b, *of_norm = values
    z, normed = _scaled(stage, stage.map(x, w, b)), None
    if stage.norm is not None:
        given = z
        check_values(given.numel() // given.shape[1])
        z, *moments = torch.ops.aten.native_batch_norm(given, *of_norm, None, None, True, 0.0, stage.norm)
        normed = (given, *moments)
    p, places = maxima(z) if stage.pooled else (z, None)
    return _Kept(x, p.relu_() if stage.rectified else p, z.shape, places, normed)


def _scaled(stage: _Stage, x: Tensor) -> Tensor:
    """x times the stage's factor."""
    return x if stage.factor == 1.0 else x * stage.factor


def _before_norm(g: Tensor, stage: _Stage, kept: _Kept, scale: Tensor, found: list[Tensor]) -> Tensor:
    """A slope by what the norm gives made one by what it is given; those by its scale and shift go to found."""
    assert kept.normed is not None
    given, mean, inverse = kept.normed
    wanted = [True, True, True]
    backward = torch.ops.aten.native_batch_norm_backward
    g, *parts = backward(g, given, scale, None, None, mean, inverse, True, stage.norm, wanted)
    for place, part in zip(found, parts, strict=True):
        place.copy_(part)
    return g


def _after_units(stage: _Stage, dz: Tensor, kept: _Kept) -> Tensor:
    """How h moves where z moves by dz."""
    dp = dz if kept.places is None else picked(dz, kept.places)
    return _where_positive(dp, kept.h) if stage.rectified else dp


def _before_pooling(g: Tensor, kept: _Kept) -> Tensor:
    """A slope by p made one by z."""
    return g if kept.places is None else spread(g, kept.places, kept.shape)


def _where_positive(g: Tensor, h: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.threshold_backward(g, h, 0)
    return found


def _follows(layers: list[nn.Module], wanted: Callable[[nn.Module], bool]) -> bool:
    """Whether the next layer is a wanted one, which is then taken."""
    return bool(layers) and wanted(layers[-1]) and layers.pop() is not None


def _in_order(module: nn.Sequential) -> list[nn.Module]:
    """The layers of a chain; one inside another is taken apart."""
    parts = ([part] if type(part) is not nn.Sequential else _in_order(part) for part in module)
    return [layer for part in parts for layer in part]


def _factor(layers: list[nn.Module]) -> float:
    """The factor of a scaler that comes next, which is then taken; 1 without one."""
    scaler = layers[-1] if layers else None
    if not isinstance(scaler, Scaler):
        return 1.0
    layers.pop()
    return scaler.factor


def _norm(layers: list[nn.Module]) -> float | None:
    """The ε of a batch norm that comes next, which is then taken; None without one."""
    norm = layers[-1] if layers else None
    if not isinstance(norm, nn.BatchNorm2d) or type(norm) not in (nn.BatchNorm2d, BatchStatisticsNorm2d):
        return None
    if norm.running_mean is not None or not trained(norm):
        return None
    layers.pop()
    return norm.eps


def _is_relu(layer: nn.Module) -> bool:
    return type(layer) is nn.ReLU


__all__ = ["Chain"]
