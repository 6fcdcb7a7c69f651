"""Networks of patches that do not overlap, each layer with batch norm, differentiated by hand for all clients at once.

A stage cuts what it is given into patches x, and has one matrix w, batch norm and rectified units; the last is a
linear map. Over the N pixels of a batch, channel by channel:

    z = w x − mean,   r = (mean z² + ε)^(−½),   y = γ r z + β,   h = relu(y)

A gradient g by y comes back as (with a = γ r and q = mean g z)

    ∂γ = N r q,   ∂β = N mean g,   by w x:  a (g − mean g − r² q z)

A Hessian-vector product is the derivative of all this where θ moves along v (Pearlmutter 1994); what moves is written
with a dot. An offset of w x falls out of z, so its derivatives are 0, where autograd finds rounding errors.

Clients have parameters of their own, and often several points on one batch (Local-SVRG has two). Everything here has
their numbers in front, K clients × P points, so that a surrounding `vmap` finds one function and not sixty operations.
Small networks spend most of their time on starting operations and on autograd's records; this takes a third.
"""

from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from coterie.machine import wanted
from coterie.numerics.control import Flags, Levels
from coterie.numerics.tracing import recording
from coterie.problems.models.layers import BatchStatisticsNorm2d, PatchConv2d
from coterie.problems.models.perceptron import heard, trained

Slope = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Slopes = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
Pair = tuple[int, int]
Slices = tuple[slice, slice]


class _Stage(NamedTuple):
    """Patches of side × side pixels of so many channels, with a border around the image; outputs and ε of the norm."""

    outputs: int
    channels: int
    side: int
    border: int
    eps: float

    @property
    def lengths(self) -> list[int]:
        """Numbers of its matrix, of the offset, of γ and of β."""
        return [self.outputs * self.channels * self.side**2, *(self.outputs,) * 3]

    def size(self, image: Pair) -> Pair:
        """How many patches an image has, by height and width."""
        down, right = ((pixels + 2 * self.border) // self.side for pixels in image)
        return down, right

    def patches(self, h: Tensor, image: Pair) -> Tensor:
        """Images [B, channels, h × w × n] as patches, [B, channels × side², h' × w' × n]."""
        (rows, columns), k = self.size(image), self.side
        found = h.new_zeros(len(h), self.channels, k, k, rows, columns, h.shape[2] // prod(image))
        h = h.view(len(h), self.channels, *image, -1)
        for i, j, tile, part in self._places(image):
            found[:, :, i, j, *tile] = h[:, :, *part]
        return found.view(len(h), self.channels * k * k, -1)

    def images(self, patches: Tensor, image: Pair) -> Tensor:
        """A slope by patches made one by images, [B, channels, h × w × n]."""
        (rows, columns), k = self.size(image), self.side
        patches = patches.view(len(patches), self.channels, k, k, rows, columns, -1)
        found = patches.new_zeros(len(patches), self.channels, *image, patches.shape[-1])
        for i, j, tile, part in self._places(image):
            found[:, :, *part] = patches[:, :, i, j, *tile]
        return found.view(len(found), self.channels, -1)

    def _places(self, image: Pair) -> Iterator[tuple[int, int, Slices, Slices]]:
        """Each place in a patch, the patches that have a pixel there, and these pixels."""
        for i in range(self.side):
            for j in range(self.side):
                ends = [
                    self._line(at, *of)
                    for at, of in zip((i, j), zip(self.size(image), image, strict=True), strict=True)
                ]
                yield i, j, (ends[0][0], ends[1][0]), (ends[0][1], ends[1][1])

    def _line(self, place: int, count: int, pixels: int) -> Slices:
        """By height or width: which of so many patches have a pixel at a place in them, and which pixels these are."""
        first = 0 if place >= self.border else -(-(self.border - place) // self.side)
        start = first * self.side + place - self.border
        last = min(count, (pixels - 1 - place + self.border) // self.side + 1)
        return slice(first, last), slice(start, start + (last - first - 1) * self.side + 1, self.side)


class _Weights(NamedTuple):
    """Of a stage: its matrix [B, outputs, inputs], and γ and β, [B, outputs, 1]."""

    w: Tensor
    gamma: Tensor
    beta: Tensor


class _Kept(NamedTuple):
    """What the way back needs of a stage: its patches, z, r, and what comes out of it."""

    x: Tensor
    z: Tensor
    r: Tensor
    h: Tensor


class _Moves(NamedTuple):
    """How that moves: patches, z and r, and γ r."""

    x: Tensor | None
    z: Tensor
    r: Tensor
    a: Tensor


class Tiled(NamedTuple):
    """What is to be known of such a module. θ has each stage's matrix, offset, γ and β, then the last map's matrix and
    offset.

    Args:
        stages: patches, batch norm and units.
        outputs: of the last map.
    """

    stages: tuple[_Stage, ...]
    outputs: int

    @staticmethod
    def of(module: nn.Module) -> "Tiled | None":
        """The network that a module is; None where it is something else, or where somebody listens to its layers."""
        if type(module) is not nn.Sequential or any(map(heard, module.modules())):
            return None
        layers = list(module)
        stages = [_stage(*layers[i : i + 3]) for i in range(0, len(layers) - 2, 3)]
        last = layers[-2:]
        flat = len(last) == 2 and type(last[0]) is nn.Flatten and (last[0].start_dim, last[0].end_dim) == (1, -1)
        if not (stages and flat and len(layers) == 3 * len(stages) + 2 and type(last[1]) is nn.Linear):
            return None
        known = tuple(stage for stage in stages if stage is not None)
        return Tiled(known, last[1].out_features) if len(known) == len(stages) and trained(last[1]) else None

    def takes(self, inputs: object) -> TypeGuard[Tensor]:
        """Whether inputs are patches as the first layer prepares them, and other operations than those of the layers
        may compute here.

        Args:
            inputs: what a model is given.
        """
        if not isinstance(inputs, Tensor) or inputs.dim() != 5 or len(inputs) == 0:
            return False
        return not (wanted() or recording() or torch.is_autocast_enabled(inputs.device.type))

    def gradient(self, theta: Tensor, inputs: Tensor, labels: Tensor, weight: Tensor | None, slope: Slope) -> Tensor:
        """∇L(θ); it composes with vmap, and is not to be differentiated again.

        Args:
            theta: the parameters.
            inputs: patches, [n, h', w', channels, side²].
            labels: one per row.
            weight: of the rows in L, or None.
            slope: from outputs […, n, o], labels […, n] and weights to the derivative of L by the outputs.
        """
        return _of_all(self, slope, 1)(theta, inputs, labels, *_there(weight))

    def product(
        self, theta: Tensor, v: Tensor, inputs: Tensor, labels: Tensor, weight: Tensor | None, slopes: Slopes
    ) -> Tensor:
        """∇²L(θ) v; it composes with vmap, and is not to be differentiated again.

        Args:
            theta: the parameters.
            v: the direction.
            inputs: patches, [n, h', w', channels, side²].
            labels: one per row.
            weight: of the rows in L, or None.
            slopes: from outputs, how they move, labels and weights to the derivative of L by outputs, and how it moves.
        """
        return _of_all(self, slopes, 2)(theta, v, inputs, labels, *_there(weight))

    def _gradients(self, slope: Slope, theta: Tensor, inputs: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
        """[K, P, d] of parameters [K, P, d] and batches [K, n, …]."""
        (clients, points), n = theta.shape[:2], inputs.shape[1]
        *weights, (w, b) = self._views(theta)
        sizes = self._sizes((inputs.shape[2], inputs.shape[3]))
        run: list[_Kept] = []
        for i, own in enumerate(weights):
            x = self._first(inputs) if i == 0 else self.stages[i].patches(run[-1].h, sizes[i - 1])
            run.append(self._forward(i, own, x, clients))
        h = run[-1].h.view(len(w), -1, n)
        outputs = torch.baddbmm(b, w, h)
        e = slope(outputs.mT.view(clients, points, n, -1), labels, weight).view(len(w), n, -1).mT
        found = torch.empty_like(theta)
        *into, (by_w, by_b) = self._views(found)
        by_w.copy_(e.bmm(h.mT))
        by_b.copy_(e.sum(2, keepdim=True))
        g = w.mT.bmm(e).view_as(run[-1].h)
        for i in reversed(range(len(weights))):
            kept, own = run[i], weights[i]
            g = torch.ops.aten.threshold_backward(g, kept.h, 0)
            pixels = g.shape[2]
            a, mean, q = own.gamma * kept.r, g.mean(2, keepdim=True), _dot(g, kept.z) / pixels
            into[i].gamma.copy_(pixels * kept.r * q)
            into[i].beta.copy_(pixels * mean)
            g = torch.addcmul(-a * mean, g, a).addcmul_(kept.z, -a * kept.r.square() * q)
            into[i].w.copy_(self._by_weights(i, g, kept.x, clients))
            if i:
                g = self.stages[i].images(own.w.mT.bmm(g), sizes[i - 1])
        return self._without_offsets(found)

    def _products(
        self, slopes: Slopes, theta: Tensor, v: Tensor, inputs: Tensor, labels: Tensor, weight: Tensor | None
    ) -> Tensor:
        """[K, P, d] of parameters and directions [K, P, d] and batches [K, n, …]."""
        (clients, points), n = theta.shape[:2], inputs.shape[1]
        *weights, (w, b) = self._views(theta)
        *along, (dw, db) = self._views(v)
        sizes = self._sizes((inputs.shape[2], inputs.shape[3]))
        run: list[_Kept] = []
        moves: list[_Moves] = []
        dh: Tensor | None = None
        for i, (own, ahead) in enumerate(zip(weights, along, strict=True)):
            x = self._first(inputs) if i == 0 else self.stages[i].patches(run[-1].h, sizes[i - 1])
            kept = self._forward(i, own, x, clients)
            dx = None if dh is None else self.stages[i].patches(dh, sizes[i - 1])
            dz = self._map(i, ahead.w, x, clients)
            dz = dz if dx is None else dz.baddbmm_(own.w, dx)
            dz = dz.sub_(dz.mean(2, keepdim=True))
            r = kept.r
            dr = -(r**3) * _dot(kept.z, dz) / dz.shape[2]
            a, da = own.gamma * r, ahead.gamma * r + own.gamma * dr
            dy = torch.addcmul(ahead.beta, dz, a).addcmul_(kept.z, da)
            dh = torch.ops.aten.threshold_backward(dy, kept.h, 0)
            run.append(kept)
            moves.append(_Moves(dx, dz, dr, da))
        assert dh is not None
        h, dh = run[-1].h.view(len(w), -1, n), dh.view(len(w), -1, n)
        outputs = torch.baddbmm(b, w, h)
        d_outputs = torch.baddbmm(db, dw, h).baddbmm_(w, dh)
        shape = clients, points, n, -1
        e, de = slopes(outputs.mT.view(shape), d_outputs.mT.view(shape), labels, weight)
        e, de = e.view(len(w), n, -1).mT, de.view(len(w), n, -1).mT
        found = torch.empty_like(v)
        *into, (by_w, by_b) = self._views(found)
        by_w.copy_(de.bmm(h.mT).baddbmm_(e, dh.mT))
        by_b.copy_(de.sum(2, keepdim=True))
        g = w.mT.bmm(e).view_as(run[-1].h)
        dg = w.mT.bmm(de).baddbmm_(dw.mT, e).view_as(g)
        for i in reversed(range(len(weights))):
            (x, z, r, h), (dx, dz, dr, da), own = run[i], moves[i], weights[i]
            g = torch.ops.aten.threshold_backward(g, h, 0)
            dg = torch.ops.aten.threshold_backward(dg, h, 0)
            pixels = g.shape[2]
            a, mean, d_mean = own.gamma * r, g.mean(2, keepdim=True), dg.mean(2, keepdim=True)
            q, dq = _dot(g, z) / pixels, (_dot(dg, z) + _dot(g, dz)) / pixels
            into[i].gamma.copy_(pixels * (dr * q + r * dq))
            into[i].beta.copy_(pixels * d_mean)
            by_z = a * r.square() * q
            d_by_z = da * r.square() * q + a * (2 * r * dr * q + r.square() * dq)
            dg = torch.addcmul(-(da * mean + a * d_mean), dg, a).addcmul_(g, da).addcmul_(z, -d_by_z)
            dg.addcmul_(dz, -by_z)
            by_weights = self._by_weights(i, dg, x, clients)
            if dx is not None:
                g = torch.addcmul(-a * mean, g, a).addcmul_(z, -by_z)
                by_weights = by_weights.baddbmm_(g, dx.mT)
                dg = self.stages[i].images(own.w.mT.bmm(dg).baddbmm_(along[i].w.mT, g), sizes[i - 1])
                g = self.stages[i].images(own.w.mT.bmm(g), sizes[i - 1])
            into[i].w.copy_(by_weights)
        return self._without_offsets(found)

    def _sizes(self, first: Pair) -> list[Pair]:
        """Height and width of what comes out of each stage."""
        sizes = [first]
        for stage in self.stages[1:]:
            sizes.append(stage.size(sizes[-1]))
        return sizes

    def _forward(self, i: int, own: _Weights, x: Tensor, clients: int) -> _Kept:
        z = self._map(i, own.w, x, clients)
        z = z.sub_(z.mean(2, keepdim=True))
        r = (_dot(z, z) / z.shape[2] + self.stages[i].eps).rsqrt()
        return _Kept(x, z, r, torch.addcmul(own.beta, z, own.gamma * r).relu_())

    def _first(self, inputs: Tensor) -> Tensor:
        """The patches of a batch, which all points have in common, [K, n, h' × w', inputs]."""
        return inputs.reshape(len(inputs), inputs.shape[1], -1, prod(inputs.shape[4:]))

    def _map(self, i: int, w: Tensor, x: Tensor, clients: int) -> Tensor:
        """w x, [B, outputs, h' × w' × n]: rows innermost, so that patches are made of runs of n numbers. The first
        stage's patches are common: one product for all points."""
        if i:
            return w.bmm(x)
        n = x.shape[1]
        z = w.reshape(clients, -1, w.shape[2]).bmm(x.flatten(1, 2).mT)
        return z.view(len(w), w.shape[1], n, -1).mT.reshape(len(w), w.shape[1], -1)

    def _by_weights(self, i: int, g: Tensor, x: Tensor, clients: int) -> Tensor:
        """The gradient by w where g is that by w x, [B, outputs, inputs]."""
        if i:
            return g.bmm(x.mT)
        n = x.shape[1]
        g = g.view(clients, -1, g.shape[2] // n, n).mT.reshape(clients, -1, g.shape[2])
        found = g.bmm(x.flatten(1, 2))
        return found.view(-1, self.stages[0].outputs, found.shape[2])

    def _views(self, theta: Tensor) -> list[Any]:
        """Each stage's weights, and the last map's matrix [B, o, inputs] and offset [B, o, 1]; views into θ."""
        theta = theta.view(-1, theta.shape[-1])
        own = [length for stage in self.stages for length in stage.lengths]
        rest = theta.shape[1] - sum(own) - self.outputs
        *parts, w, b = theta.split_with_sizes([*own, rest, self.outputs], 1)
        matrices, gammas, betas = parts[::4], parts[2::4], parts[3::4]
        stages = [
            _Weights(matrix.view(len(theta), stage.outputs, -1), gamma[..., None], beta[..., None])
            for stage, matrix, gamma, beta in zip(self.stages, matrices, gammas, betas, strict=True)
        ]
        return [*stages, (w.view(len(theta), self.outputs, -1), b[..., None])]

    def _without_offsets(self, found: Tensor) -> Tensor:
        """Derivatives by offsets before batch norm are 0."""
        start = 0
        for stage in self.stages:
            matrix, offset, *norm = stage.lengths
            found[..., start + matrix : start + matrix + offset] = 0.0
            start += matrix + offset + sum(norm)
        return found


@cache
def _of_all(network: Tiled, slope: Callable[..., Any], count: int) -> Levels:
    """The gradient (count 1), or the product at a point along a direction (count 2), as a function of these, inputs,
    labels and weights, for all levels of vmap: those over batches are clients, the others points on a batch."""
    plain: Callable[..., Tensor] = network._gradients if count == 1 else network._products

    def whole(flags: Flags, *operands: Tensor) -> Tensor:
        front = [sum(flag[i] for flag in flags) for i in range(len(operands))]
        sizes = [
            next(t.shape[sum(f[i] for f in flags[:level])] for i, t in enumerate(operands) if flag[i])
            for level, flag in enumerate(flags)
        ]
        clients = [level for level, flag in enumerate(flags) if any(flag[count:])]
        points = [level for level, flag in enumerate(flags) if not any(flag[count:])]

        def laid_out(i: int, levels: list[int]) -> Tensor:
            """An operand with these levels in front, in this order."""
            t = operands[i]
            own = t.shape[front[i] :]
            for level in sorted(levels):
                if not flags[level][i]:
                    t = t.unsqueeze(sorted(levels).index(level))
            t = t.expand(*(sizes[level] for level in sorted(levels)), *own)
            return t.permute(*(sorted(levels).index(level) for level in levels), *range(len(levels), t.dim()))

        K, P = prod(sizes[level] for level in clients), prod(sizes[level] for level in points)
        at = [laid_out(i, clients + points) for i in range(count)]
        inputs, labels, *weight = (
            laid_out(i, clients).flatten(0, len(clients) - 1) if clients else operands[i][None]
            for i in range(count, len(operands))
        )
        found = plain(
            slope,
            *(t.reshape(K, P, -1).contiguous() for t in at),
            inputs,
            labels[:, None].expand(K, P, -1),
            weight[0][:, None] if weight else None,
        )
        found = found.view(*(sizes[level] for level in clients + points), -1)
        return found.permute(*((clients + points).index(level) for level in range(len(flags))), len(flags))

    return Levels(whole)


def _there(weight: Tensor | None) -> tuple[Tensor, ...]:
    return () if weight is None else (weight,)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ a b over pixels, [B, channels, 1], without a tensor of products."""
    return torch.linalg.vecdot(a, b)[..., None]


def _stage(convolution: nn.Module, norm: nn.Module, units: nn.Module) -> _Stage | None:
    """The stage that three layers are, if they are one."""
    if type(convolution) is not PatchConv2d or type(norm) is not BatchStatisticsNorm2d or type(units) is not nn.ReLU:
        return None
    if not (trained(convolution) and norm.weight.requires_grad and norm.bias.requires_grad):
        return None
    channels, outputs = convolution.in_channels, convolution.out_channels
    return _Stage(outputs, channels, convolution.side, convolution.border, norm.eps)


__all__ = ["Tiled"]
