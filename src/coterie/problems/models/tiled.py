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

from collections.abc import Callable
from functools import cache, lru_cache, partial
from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from coterie.machine import wanted
from coterie.numerics.control import Flags, Levels
from coterie.numerics.proximal import Pull, proximal_point
from coterie.numerics.tracing import recording
from coterie.problems.models.layers import BatchStatisticsNorm2d, PatchConv2d, check_values
from coterie.problems.models.perceptron import heard, trained

Slope = Callable[[Tensor, Tensor | None, int, torch.dtype], Callable[[Tensor], Tensor]]
Slopes = Callable[[Tensor, Tensor | None, int, torch.dtype], Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]
Pair = tuple[int, int]


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
        found = _selected(h.view(len(h), self.channels * prod(image), -1), *_orders(self, image, h.device)[:2])
        return found.view(len(h), self.channels * self.side**2, -1)

    def images(self, patches: Tensor, image: Pair) -> Tensor:
        """A slope by patches made one by images, [B, channels, h × w × n]."""
        count = self.channels * self.side**2 * prod(self.size(image))
        found = _selected(patches.view(len(patches), count, -1), *_orders(self, image, patches.device)[2:])
        return found.view(len(patches), self.channels, -1)


@cache
def _orders(stage: _Stage, image: Pair, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each place of all patches its pixel, and which places have none; for each pixel its place, and which pixels
    are in no patch."""
    (rows, columns), k, pixels = stage.size(image), stage.side, prod(image)
    down, right = (torch.arange(k)[:, None] + k * torch.arange(count) - stage.border for count in (rows, columns))
    inside = [(at >= 0) & (at < size) for at, size in zip((down, right), image, strict=True)]
    pixel = down[:, None, :, None] * image[1] + right[:, None]
    there = (inside[0][:, None, :, None] & inside[1][:, None]).expand_as(pixel)
    pixel = (pixel + pixels * torch.arange(stage.channels).view(-1, 1, 1, 1, 1)).flatten()
    there = there.expand(stage.channels, *there.shape).flatten()
    place = torch.full((stage.channels * pixels,), -1)
    place[pixel[there]] = there.nonzero()[:, 0]
    orders = pixel.where(there, 0), (~there).nonzero()[:, 0], place.clamp(min=0), (place < 0).nonzero()[:, 0]
    return tuple(order.to(device) for order in orders)  # type: ignore[return-value]


def _selected(t: Tensor, order: Tensor, empty: Tensor) -> Tensor:
    """Rows t[:, order], 0 where they are empty."""
    found = t.index_select(1, order)
    return found.index_fill_(1, empty, 0.0) if len(empty) else found


class _Weights(NamedTuple):
    """Of a stage: its matrix [B, outputs, inputs], and γ and β, [B, outputs, 1]."""

    w: Tensor
    gamma: Tensor
    beta: Tensor


class _Common(NamedTuple):
    """The patches of a batch, which all points of a client have in common.

    Args:
        x: [K, n, h' × w', inputs], or [K, inputs, h' × w' × n] where they are laid out.
        image: h' and w'.
        n: rows.
    """

    x: Tensor
    image: Pair
    n: int

    @staticmethod
    def of(inputs: Tensor) -> "_Common":
        """Patches as the first layer prepares them, [K, n, h', w', channels, side²]."""
        image = inputs.shape[2], inputs.shape[3]
        return _Common(inputs.reshape(*inputs.shape[:2], prod(image), -1), image, inputs.shape[1])

    def laid_out(self) -> "_Common":
        """The same with rows innermost, as everything after them has it: products then take half of the time, but
        this copy as long as a few of them."""
        return self._replace(x=self.x.permute(0, 3, 2, 1).flatten(2))

    def map(self, w: Tensor) -> Tensor:
        """w x, [B, outputs, h' × w' × n]: one product for all points. Rows are innermost, so that patches are made of
        runs of n numbers."""
        rows = w.reshape(len(self.x), -1, w.shape[2])
        if self.x.dim() == 3:
            return _batched(rows, self.x).view(len(w), w.shape[1], -1)
        z = _product(rows, self.x.flatten(1, 2).mT)
        return z.view(len(w), w.shape[1], self.n, -1).mT.reshape(len(w), w.shape[1], -1)

    def by_weights(self, g: Tensor) -> Tensor:
        """The gradient by w where g is that by w x, [B, outputs, inputs]."""
        if self.x.dim() == 3:
            found = _batched(g.view(len(self.x), -1, g.shape[2]), self.x.mT)
        else:
            rows = g.view(len(self.x), -1, g.shape[2] // self.n, self.n).mT.reshape(len(self.x), -1, g.shape[2])
            found = _product(rows, self.x.flatten(1, 2))
        return found.view(len(g), g.shape[1], -1)


class _Own(NamedTuple):
    """The patches of a later stage, [B, inputs, h' × w' × n]: each point has its own."""

    x: Tensor

    def map(self, w: Tensor) -> Tensor:
        """w x."""
        return _product(w, self.x)

    def by_weights(self, g: Tensor) -> Tensor:
        """The gradient by w where g is that by w x."""
        return _product(g, self.x.mT)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b, matrix by matrix. A matrix of a single row gets a second one: MKL has functions of its own for one row, and
    another one where there is a single matrix, which differs in last bits on Intel's AVX-512."""
    return a.bmm(b) if a.shape[1] > 1 else a.repeat(1, 2, 1).bmm(b)[:, :1].contiguous()


def _batched(a: Tensor, b: Tensor) -> Tensor:
    """The same where b is small: a single matrix is multiplied twice, which is cheaper than a second row for many."""
    single = len(a) == 1 and a.shape[1] == 1
    return a.repeat(2, 1, 1).bmm(b.expand(2, -1, -1))[:1] if single else a.bmm(b)


class _Kept(NamedTuple):
    """What the way back needs of a stage: its patches, w x, its mean and r by channel, and what comes out of it."""

    x: _Common | _Own
    u: Tensor
    mean: Tensor
    r: Tensor
    h: Tensor

    def centred(self) -> tuple[Tensor, Tensor]:
        """z and r, [B, channels, ·]."""
        mean, r = (t.view(*self.u.shape[:2], 1) for t in (self.mean, self.r))
        return self.u - mean, r


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
            slope: from labels […, n], weights, the number o of outputs and their type to a function from outputs
                […, o, n] to the derivative of L by them.
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
            slopes: the same for a function from outputs and how they move to that derivative and how it moves.
        """
        return _of_all(self, slopes, 2)(theta, v, inputs, labels, *_there(weight))

    def proximal_point(
        self, center: Tensor, inputs: Tensor, labels: Tensor, weight: Tensor | None, slope: Slope, pull: Pull
    ) -> Tensor:
        """Gradient descent on L(θ) + λ/2 ‖θ − centre‖², all steps on one batch; it composes with vmap, and is not to be
        differentiated.

        Args:
            center: where θ starts and is pulled to.
            inputs: patches, [n, h', w', channels, side²].
            labels: one per row.
            weight: of the rows in L, or None.
            slope: as in `gradient`.
            pull: λ, and how to descend.
        """
        return _of_all(self, slope, 1, pull)(center, inputs, labels, *_there(weight))

    def _gradients(self, slope: Slope, theta: Tensor, inputs: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
        """[K, P, d] of parameters [K, P, d] and batches [K, n, …]."""
        return self._gradients_at(slope(labels, weight, self.outputs, theta.dtype), theta, _Common.of(inputs))

    def _proximal_points(
        self, pull: Pull, slope: Slope, center: Tensor, inputs: Tensor, labels: Tensor, weight: Tensor | None
    ) -> Tensor:
        """[K, P, d] of centres [K, P, d] and batches [K, n, …], which are laid out once for all steps."""
        common, by_outputs = _Common.of(inputs).laid_out(), slope(labels, weight, self.outputs, center.dtype)
        return proximal_point(lambda theta: self._gradients_at(by_outputs, theta, common), center, pull)

    def _gradients_at(self, slope: Callable[[Tensor], Tensor], theta: Tensor, common: "_Common") -> Tensor:
        clients, points = theta.shape[:2]
        *weights, (w, b) = self._views(theta)
        sizes = self._sizes(common.image)
        run: list[_Kept] = []
        for i, own in enumerate(weights):
            x = common if i == 0 else _Own(self.stages[i].patches(run[-1].h, sizes[i - 1]))
            run.append(self._forward(i, own, x))
        h = run[-1].h.view(len(w), -1, common.n)
        outputs = torch.baddbmm(b, w, h)
        e = slope(outputs.view(clients, points, -1, common.n)).view_as(outputs)
        parts = [e.sum(2), e.bmm(h.mT)]
        g = w.mT.bmm(e).view_as(run[-1].h)
        for i in reversed(range(len(weights))):
            kept, own = run[i], weights[i]
            g, by_gamma, by_beta = self._back(i, own, kept, torch.ops.aten.threshold_backward(g, kept.h, 0))
            parts += [by_beta, by_gamma, torch.zeros_like(by_beta), kept.x.by_weights(g)]
            if i:
                g = self.stages[i].images(own.w.mT.bmm(g), sizes[i - 1])
        return _joined(parts, theta)

    def _products(
        self, slopes: Slopes, theta: Tensor, v: Tensor, inputs: Tensor, labels: Tensor, weight: Tensor | None
    ) -> Tensor:
        """[K, P, d] of parameters and directions [K, P, d] and batches [K, n, …]."""
        clients, points = theta.shape[:2]
        *weights, (w, b) = self._views(theta)
        *along, (dw, db) = self._views(v)
        common = _Common.of(inputs)
        n, sizes = common.n, self._sizes(common.image)
        run: list[_Kept] = []
        centred: list[tuple[Tensor, Tensor]] = []
        moves: list[_Moves] = []
        dh: Tensor | None = None
        for i, (own, ahead) in enumerate(zip(weights, along, strict=True)):
            x = common if i == 0 else _Own(self.stages[i].patches(run[-1].h, sizes[i - 1]))
            kept = self._forward(i, own, x)
            dx = None if dh is None else self.stages[i].patches(dh, sizes[i - 1])
            dz = x.map(ahead.w)
            dz = dz if dx is None else dz.baddbmm_(own.w, dx)
            dz = dz.sub_(dz.mean(2, keepdim=True))
            z, r = kept.centred()
            dr = -(r**3) * _dot(z, dz) / dz.shape[2]
            a, da = own.gamma * r, ahead.gamma * r + own.gamma * dr
            dy = (dz * a).add_(ahead.beta).addcmul_(z, da)
            dh = torch.ops.aten.threshold_backward(dy, kept.h, 0)
            run.append(kept)
            centred.append((z, r))
            moves.append(_Moves(dx, dz, dr, da))
        assert dh is not None
        h, dh = run[-1].h.view(len(w), -1, n), dh.view(len(w), -1, n)
        outputs = torch.baddbmm(b, w, h)
        d_outputs = torch.baddbmm(db, dw, h).baddbmm_(w, dh)
        shape = clients, points, -1, n
        both = slopes(labels, weight, self.outputs, theta.dtype)(outputs.view(shape), d_outputs.view(shape))
        e, de = (t.view_as(outputs) for t in both)
        parts = [de.sum(2), de.bmm(h.mT).baddbmm_(e, dh.mT)]
        g = w.mT.bmm(e).view_as(run[-1].h)
        dg = w.mT.bmm(de).baddbmm_(dw.mT, e).view_as(g)
        for i in reversed(range(len(weights))):
            (z, r), (dx, dz, dr, da), own = centred[i], moves[i], weights[i]
            g, dg = (torch.ops.aten.threshold_backward(t, run[i].h, 0) for t in (g, dg))
            pixels = g.shape[2]
            a, mean, d_mean = own.gamma * r, g.mean(2, keepdim=True), dg.mean(2, keepdim=True)
            q, dq = _dot(g, z) / pixels, (_dot(dg, z) + _dot(g, dz)) / pixels
            parts += [pixels * d_mean, pixels * (dr * q + r * dq), torch.zeros_like(r)]
            by_z = a * r.square() * q
            d_by_z = da * r.square() * q + a * (2 * r * dr * q + r.square() * dq)
            dg = dg.mul_(a).sub_(da * mean + a * d_mean).addcmul_(g, da).addcmul_(z, -d_by_z).addcmul_(dz, -by_z)
            by_weights = run[i].x.by_weights(dg)
            if dx is not None:
                g = g.mul_(a).sub_(a * mean).addcmul_(z, -by_z)
                by_weights = by_weights.baddbmm_(g, dx.mT)
                dg = self.stages[i].images(own.w.mT.bmm(dg).baddbmm_(along[i].w.mT, g), sizes[i - 1])
                g = self.stages[i].images(own.w.mT.bmm(g), sizes[i - 1])
            parts.append(by_weights)
        return _joined(parts, v)

    def _sizes(self, first: Pair) -> list[Pair]:
        """Height and width of what comes out of each stage."""
        sizes = [first]
        for stage in self.stages[1:]:
            sizes.append(stage.size(sizes[-1]))
        return sizes

    def _forward(self, i: int, own: _Weights, x: "_Common | _Own") -> _Kept:
        u = x.map(own.w)
        check_values(u.shape[2])
        gamma, beta = (t.flatten().contiguous() for t in (own.gamma, own.beta))
        flat, eps = u.view(1, -1, u.shape[2]), self.stages[i].eps  # all channels of all points
        y, mean, r = torch.native_batch_norm(flat, gamma, beta, None, None, True, 0.0, eps)
        return _Kept(x, u, mean, r, y.relu_().view_as(u))

    def _back(self, i: int, own: _Weights, kept: _Kept, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The slopes by w x, γ and β where g is that by y."""
        flat = (t.view(1, -1, g.shape[2]) for t in (g, kept.u))
        moments = None, None, kept.mean, kept.r, True, self.stages[i].eps, [True] * 3
        found = torch.ops.aten.native_batch_norm_backward(*flat, own.gamma.flatten().contiguous(), *moments)
        return found[0].view_as(g), found[1].view(g.shape[:2]), found[2].view(g.shape[:2])

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


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Derivatives by all parts of θ, the last part first; those by offsets before batch norm are 0."""
    return torch.cat([part.flatten(1) for part in reversed(parts)], 1).view_as(like)


@lru_cache(maxsize=64)  # a schedule of pFedMe's inner step has another pull every round
def _of_all(network: Tiled, slope: Callable[..., Any], count: int, pull: Pull | None = None) -> Levels:
    """The gradient (count 1), the proximal point (with a pull), or the product at a point along a direction (count 2),
    as a function of these, inputs, labels and weights, for all levels of vmap: those over batches are clients, the
    others points on a batch."""
    plain: Callable[..., Tensor] = network._gradients if count == 1 else network._products
    if pull is not None:
        plain = partial(network._proximal_points, pull)

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
