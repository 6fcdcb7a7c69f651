"""Smaller networks cut out of a large one, kernel by kernel.

A kernel is a row of a convolution or of a linear map, with all that follows it by channel (bias, batch norm). Kernels
whose outputs are added (at the end of a residual block) stand or fall together, so they are one kernel here. A group is
the kernels of one layer, or of layers that are added. What the network takes in and puts out is never cut.

Every parameter θ_j has an owner, the kernel that it belongs to, and a feeder, the kernel whose output it multiplies.
With a ∈ {0, 1} by kernel, the sub-model holds the θ_j whose owner and feeder are both there, in their order, and

    submodel(θ[index]) = model(a ⊙ θ),   (a ⊙ θ)_j = a_owner(j) θ_j

because a kernel that is not there puts out 0, and only layers that leave 0 as it is are let through. Its multiply-adds
for one input are T(a) = sᵀWs, where s counts the kernels by group and W holds what a pair of kernels costs; each is
two FLOPs. Additions of biases, norms and activations are not counted.
"""

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coterie.errors import UsageError
from coterie.problems.models.layers import Scaler
from coterie.problems.models.resnet import Average, Block

ALWAYS = -1  # in place of a kernel: what the network takes in or puts out
UNCHANGED = (
    *(nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout2d, Average),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh),  # f(0) = 0
)
CUT = ("Sequential", "resnet Block", "Conv2d", "Linear", "BatchNorm1d", "BatchNorm2d")


class Segment(NamedTuple):
    """Where a parameter tensor lies in θ, and whether it is a weight (else a bias or a norm's)."""

    start: int
    stop: int
    is_weight: bool


@dataclass(frozen=True, eq=False)
class Anatomy:
    """Which parameter belongs to which kernel. Kernels are numbered group after group; the number K is always there."""

    module: nn.Module
    names: tuple[str, ...]  # of each group's first layer
    sizes: tuple[int, ...]
    owner: Tensor
    feeder: Tensor
    cost: Tensor  # W
    axes: dict[str, tuple[Tensor, ...]]  # kernel numbers along the first dimensions of a parameter, by its name
    output: Tensor  # the output that a parameter of the last layer belongs to, −1 for other parameters
    round_up: bool = False

    @property
    def kernels(self) -> int:
        """K."""
        return sum(self.sizes)

    @property
    def segments(self) -> list[Segment]:
        """The tensors of θ in their order."""
        found, start = [], 0
        for name, value in self.module.named_parameters():
            found.append(Segment(start, start + value.numel(), len(self.axes[name]) > 1))
            start += value.numel()
        return found

    def to(self, device: torch.device | str) -> "Anatomy":
        """The same on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("owner", "feeder", "cost", "output")}
        return replace(self, **moved)

    def counts(self, share: float) -> tuple[int, ...]:
        """⌊share · size⌋ kernels of each group (⌈…⌉ with round_up); a share that leaves a group none is refused."""
        kept = tuple(ceil(share * size - 1e-9) if self.round_up else int(share * size + 1e-9) for size in self.sizes)
        for name, size, count in zip(self.names, self.sizes, kept, strict=True):
            if count == 0:
                raise UsageError(
                    f"a capacity of {share:g} leaves layer {name} none of its {size} kernels; the least that leaves "
                    f"one is 1/{size}. Raise problem.capacities or widen the model (problem.width)."
                )
        return kept

    def first(self, share: float) -> Tensor:
        """The first kernels of every group, [K] bool."""
        return self.window(share, 0)

    def window(self, share: float, shift: int) -> Tensor:
        """As many kernels of every group in a row from number shift on, around the end to its beginning, [K] bool."""
        device = self.owner.device
        parts = [
            (torch.arange(size, device=device) - shift) % size < count
            for size, count in zip(self.sizes, self.counts(share), strict=True)
        ]
        return torch.cat(parts)

    def top(self, share: float, score: Tensor) -> Tensor:
        """As many kernels of every group with the largest scores, [..., K] bool; of equal ones the first."""
        parts = []
        for group, count in zip(torch.split(score, list(self.sizes), -1), self.counts(share), strict=True):
            best = group.argsort(dim=-1, descending=True, stable=True)[..., :count]
            parts.append(torch.zeros_like(group, dtype=torch.bool).scatter(-1, best, True))
        return torch.cat(parts, -1)

    def gated(self, theta: Tensor, a: Tensor) -> Tensor:
        """a ⊙ θ, for a in {0, 1} or relaxed to [0, 1]."""
        return theta * _with_one(a).to(theta)[..., self.owner]

    def over_kernels(self, values: Tensor) -> Tensor:
        """Sums over the parameters of each kernel, [..., d] to [..., K]: what turns θ ∘ ∂L/∂(a ⊙ θ) into ∂L/∂a."""
        sums = values.new_zeros(*values.shape[:-1], self.kernels + 1)
        return sums.index_add(-1, self.owner, values)[..., : self.kernels]

    def index(self, a: Tensor, share: float) -> Tensor:
        """Where the parameters of the sub-model lie in θ, ascending: [..., k] for a [..., K] with this share."""
        kept = _with_one(a)
        return places(kept[..., self.owner] & kept[..., self.feeder], self.parameters(share))

    def parameters(self, share: float) -> int:
        """How many parameters a sub-model with this share has."""
        kept = _with_one(self.first(share))
        return int((kept[self.owner] & kept[self.feeder]).sum())

    def work(self, a: Tensor) -> Tensor:
        """T(a): multiply-adds for one input, for a in {0, 1} or relaxed to [0, 1]."""
        a = a if a.is_floating_point() else a.double()
        s = torch.stack(
            [*(part.sum(-1) for part in torch.split(a, list(self.sizes), -1)), a.new_ones(a.shape[:-1])], -1
        )
        return ((s @ self.cost.to(s)) * s).sum(-1)

    def flops(self, share: float) -> int:
        """Floating point operations of a sub-model's forward pass on one input: two a multiply-add."""
        return 2 * round(float(self.work(self.first(share))))

    def carved(self, share: float, *, scaled: bool) -> nn.Module:
        """The sub-model with the first kernels as an ordinary, really smaller module; with scalers if asked for."""
        kept, net = _with_one(self.first(share).cpu()), deepcopy(self.module)
        for name, axes in self.axes.items():
            path, _, leaf = name.rpartition(".")
            value = net.get_parameter(name).detach()
            for dim, kernels in enumerate(axes):
                value = value.index_select(dim, kept[kernels].nonzero()[:, 0])
            setattr(net.get_submodule(path), leaf, nn.Parameter(value.clone()))
        for layer in net.modules():
            _restate(layer)
        if scaled:
            self._scale(net)
        return net

    def _scale(self, net: nn.Module) -> None:
        """Put a scaler behind each layer that lost kernels."""
        for name, axes in self.axes.items():
            if len(axes) < 2:
                continue
            whole, left = len(axes[0]), len(net.get_parameter(name))
            if left < whole:
                parent, _, child = name.removesuffix(".weight").rpartition(".")
                holder = net.get_submodule(parent)
                layer = getattr(holder, child)
                holder.add_module(child, nn.Sequential(layer, Scaler(whole / left)))


def anatomy(module: nn.Module, shape: tuple[int, ...], *, round_up: bool = False) -> Anatomy:
    """What can be cut from a network that takes inputs of this shape; an unsupported layer is named.

    Args:
        module: the network.
        shape: of one input.
        round_up: whether a share of the kernels of a layer is rounded up, as HeteroFL and FedRolex do, or down.
    """
    module = deepcopy(module).eval()
    walk = _Walk()
    end = walk.follow(module, "", None)
    parameters = dict(module.named_parameters())
    for name, value in parameters.items():
        if not value.requires_grad:
            raise UsageError(f"parameter {name} is frozen; a network that is to be cut must be trained as a whole.")
    if end is None or not walk.groups:
        raise UsageError(f"the model {type(module).__name__} has no layer with kernels.")
    groups = {name: kernels for name, kernels in walk.groups.items() if not torch.equal(kernels, end)}
    if not groups:
        raise UsageError(
            "the model has no hidden layer, so there is no kernel to leave out; choose one with hidden layers, "
            "such as small-cnn."
        )
    sizes = tuple(len(kernels) for kernels in groups.values())
    number = torch.full((sum(len(k) for k in walk.groups.values()) + 1,), sum(sizes))  # the last is for ALWAYS
    number[torch.cat(list(groups.values()))] = torch.arange(sum(sizes))
    axes = {name: tuple(number[kernels] for kernels in walk.axes[name]) for name in parameters}
    owner, feeder = (
        torch.cat([_spread(axes[name], p.shape, dim, sum(sizes)) for name, p in parameters.items()]) for dim in (0, 1)
    )
    ends = torch.full_like(number, -1).index_copy(0, end, torch.arange(len(end)))
    output = torch.cat([_spread((ends[walk.axes[name][0]],), p.shape, 0, -1) for name, p in parameters.items()])
    cost = _cost(module, shape, axes, sizes)
    return Anatomy(module, tuple(groups), sizes, owner, feeder, cost, axes, output, round_up)


def places(keep: Tensor, count: int) -> Tensor:
    """Where a row is true, ascending, [..., count]; every row of keep [..., d] must be true count times.

    Without a shape that depends on values, so that it runs under vmap.
    """
    rank = torch.where(keep, keep.cumsum(-1) - 1, count)
    out = torch.zeros(*keep.shape[:-1], count + 1, dtype=torch.int64, device=keep.device)
    numbers = torch.arange(keep.shape[-1], device=keep.device).expand_as(rank)
    return out.scatter(-1, rank, numbers)[..., :count]


class _Walk:
    """Follows an activation through the layers. `here` is the kernel of each of its channels; None: the input's."""

    def __init__(self) -> None:
        self.groups: dict[str, Tensor] = {}
        self.axes: dict[str, tuple[Tensor, ...]] = {}
        self.count = 0

    def follow(self, layer: nn.Module, name: str, here: Tensor | None) -> Tensor | None:
        if isinstance(layer, nn.Sequential) and type(layer).forward is nn.Sequential.forward:
            for child, part in layer.named_children():
                here = self.follow(part, f"{name}.{child}".lstrip("."), here)
            return here
        if isinstance(layer, Block):
            return self.block(layer, name, here)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            return self.kernels(layer, name, here, None)
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            self.norm(layer, name, here)
            return here
        if isinstance(layer, UNCHANGED):
            return here
        raise UsageError(
            f"layer {name or 'the model itself'} is a {type(layer).__name__}, which sub-models cannot be cut from; "
            f"supported are {', '.join([*CUT, *(kind.__name__ for kind in UNCHANGED)])}."
        )

    def block(self, block: Block, name: str, here: Tensor | None) -> Tensor:
        """Two convolutions whose output is added to the shortcut's: the same kernels, whichever made them."""
        inner = self.kernels(block.first, f"{name}.first", here, None)
        self.norm(block.first_norm, f"{name}.first_norm", inner)
        out = here
        if isinstance(block.shortcut, nn.Sequential):
            conv, norm = block.shortcut
            out = self.kernels(conv, f"{name}.shortcut.0", here, None)
            self.norm(norm, f"{name}.shortcut.1", out)
        out = self.kernels(block.second, f"{name}.second", inner, out)
        self.norm(block.second_norm, f"{name}.second_norm", out)
        return out

    def kernels(self, layer: nn.Module, name: str, here: Tensor | None, out: Tensor | None) -> Tensor:
        """A layer with kernels of its own, or with those that its output is added to."""
        if isinstance(layer, nn.Conv2d) and layer.groups != 1:
            raise UsageError(
                f"layer {name} is a convolution in {layer.groups} groups, which sub-models cannot be cut from; "
                f"use groups=1."
            )
        weight = layer.get_parameter("weight")
        if out is None:
            out = torch.arange(self.count, self.count + len(weight))
            self.groups[name] = out
            self.count += len(weight)
        self.axes[f"{name}.weight".lstrip(".")] = (out, self.inputs(name, here, weight.shape[1]))
        self.by_channel(layer, name, out, ("bias",))
        return out

    def inputs(self, name: str, here: Tensor | None, features: int) -> Tensor:
        """The kernel that feeds each input of a layer; flattened images have several inputs a channel."""
        if here is None:
            return torch.full((features,), ALWAYS)
        if features % len(here):
            raise UsageError(f"layer {name} takes {features} inputs, which {len(here)} channels cannot be spread over.")
        return here.repeat_interleave(features // len(here))

    def norm(self, layer: nn.Module, name: str, here: Tensor | None) -> None:
        size = int(layer.num_features)  # type: ignore[arg-type]
        self.by_channel(layer, name, torch.full((size,), ALWAYS) if here is None else here, ("weight", "bias"))

    def by_channel(self, layer: nn.Module, name: str, kernels: Tensor, which: tuple[str, ...]) -> None:
        for leaf in which:
            if getattr(layer, leaf) is not None:
                self.axes[f"{name}.{leaf}".lstrip(".")] = (kernels,)


def _with_one(a: Tensor) -> Tensor:
    """a with a 1 behind it, for what is always there."""
    return torch.cat([a, torch.ones_like(a[..., :1])], -1)


def _spread(axes: tuple[Tensor, ...], shape: torch.Size, dim: int, otherwise: int) -> Tensor:
    """The kernel along one dimension, for each entry of a parameter; another number where it has no such dimension."""
    if dim >= len(axes):
        return torch.full((shape.numel(),), otherwise)
    return axes[dim].view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape).reshape(-1)


def _cost(
    module: nn.Module, shape: tuple[int, ...], axes: dict[str, tuple[Tensor, ...]], sizes: tuple[int, ...]
) -> Tensor:
    """W: multiply-adds by pair of groups, for one kernel of each; a weight works once for each place of its output."""
    group = torch.repeat_interleave(torch.arange(len(sizes) + 1), torch.tensor([*sizes, 1]))
    cost = torch.zeros(len(sizes) + 1, len(sizes) + 1, dtype=torch.float64)
    for name, numbers in _outputs(module, shape).items():
        out, into = axes[f"{name}.weight"]
        weight = module.get_parameter(f"{name}.weight")
        to, by = int(group[out[0]]), int(group[into[0]])
        pairs = (sizes[to] if to < len(sizes) else 1) * (sizes[by] if by < len(sizes) else 1)
        cost[to, by] += numbers // len(out) * weight.numel() / pairs
    return cost


def _outputs(module: nn.Module, shape: tuple[int, ...]) -> dict[str, int]:
    """How many numbers each layer with a weight matrix puts out for one input."""
    found: dict[str, int] = {}
    layers = {name: part for name, part in module.named_modules() if isinstance(part, nn.Conv2d | nn.Linear)}
    try:
        with ExitStack() as hooks, torch.no_grad():
            for name, layer in layers.items():
                hook = layer.register_forward_hook(lambda _, __, out, name=name: found.update({name: out[0].numel()}))
                hooks.enter_context(hook)
            module(next(module.parameters()).new_zeros(2, *shape))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the model does not take inputs of shape {shape}: {str(error).splitlines()[0]}") from None
    return found


def _restate(layer: nn.Module) -> None:
    """Let a layer say the sizes that its parameters have now."""
    if isinstance(layer, nn.Conv2d):
        layer.out_channels, layer.in_channels = layer.weight.shape[:2]
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and layer.weight is not None:
        layer.num_features = len(layer.weight)
