"""A model is a specification and one flat vector θ ∈ R^d; un-flattening is views.

The module becomes a pure function of (θ, inputs, keys). With keys, one per row, dropout is on and its masks are drawn
from them; without keys it is off. Batch norm uses the statistics of the batch at hand; what it needs after training is
computed once (`models/statistics.py`), so clients cannot share running buffers by accident. Other buffers, and
parameters that need no gradient (a frozen encoder below an adapter), are constants.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy, deepcopy
from threading import Lock
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from coterie.errors import UsageError
from coterie.numerics.control import transformed
from coterie.numerics.memory import empty_like
from coterie.numerics.tracing import recording
from coterie.problems.models.chain import Chain
from coterie.problems.models.layers import PatchConv2d
from coterie.problems.models.masks import Masks
from coterie.problems.models.native import with_native_layers
from coterie.problems.models.perceptron import Perceptron
from coterie.problems.models.probing import current_probe
from coterie.problems.models.tiled import Tiled

Inputs = Tensor | tuple[Tensor, ...]
Buffers = Mapping[str, Tensor]
NO_BUFFERS: Buffers = MappingProxyType({})
SPECIAL = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoder, nn.Transformer)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class FlatModel:
    """θ ↦ module, for any nn.Module. The given module is copied, never changed.

    Args:
        module: the module, with the start in its parameters.
        names: the names of the module's arguments, where inputs are given by name.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...] = ()) -> None:
        self._module = deepcopy(module).eval()
        self._trainer: nn.Module | None = None
        self._idle = _no_copies()
        self.names = names
        self.dropout = self.attention = self.mixes_rows = False
        self.vmaps, self.reason = True, ""
        self.normalised: tuple[str, ...] = ()
        for name, part in self._module.named_modules():
            if getattr(part, "inplace", False) is True and type(part).__module__.startswith("torch.nn."):
                part.inplace = False  # as the first layer it would overwrite the rows; values are the same
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.train()
                if part.running_mean is not None:
                    self.normalised += (name,)
                part.track_running_stats = False
                part.running_mean = part.running_var = part.num_batches_tracked = None
                self.mixes_rows = True
        parameters = [(name, p) for name, p in self._module.named_parameters() if p.requires_grad]
        if not parameters:
            raise UsageError(f"the model {type(module).__name__} has no parameters; there is nothing to train.")
        self._layout = [(name, tuple(p.shape), p.numel()) for name, p in parameters]
        self._lengths = [length for _, _, length in self._layout]
        self._tied = _has_ties(self._module)
        self._activations: dict[Hashable, int] = {}
        self.affine = _is_affine(self._module)
        self.linear = self.affine and _with_offset(self._module)
        self.perceptron = None if self._tied else Perceptron.of(self._module)
        self.chain = None if self._tied else Chain.of(self._module)
        self.tiled = None if self._tied else Tiled.of(self._module)
        self.start = torch.cat([p.detach().reshape(-1) for _, p in parameters])
        self.size = len(self.start)

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """Named views into θ."""
        if theta.requires_grad and not (transformed() or recording()):
            views = _Views.apply(theta, self._lengths, [shape for _, shape, _ in self._layout])  # type: ignore[no-untyped-call]
        else:
            views = _views(theta, self._lengths, [shape for _, shape, _ in self._layout])
        return {name: view for (name, _, _), view in zip(self._layout, views, strict=True)}

    def __call__(self, theta: Tensor, inputs: Inputs, keys: Tensor | None = None) -> Tensor:
        """The module's output at θ.

        Args:
            theta: the parameters.
            inputs: the module's argument, or its arguments in order.
            keys: one key per row, from which the masks of dropout are drawn; without them dropout is off.
        """
        probe = current_probe()
        if probe is not None:
            rows = inputs if isinstance(inputs, Tensor) else inputs[0]
            with Masks(torch.arange(len(rows), device=rows.device)) as masks:
                output = self.run(self.trainer, theta, inputs)
            self.dropout |= masks.drawn > 0
            self.attention |= masks.attention
            probe.append(output)
            return output
        if self.perceptron is not None and self.perceptron.takes(inputs):
            return self.perceptron.outputs(theta, inputs)
        if keys is None or not self.dropout:
            with self._copy() as module:
                return self.run(module, theta, inputs)
        with Masks(keys), self._copy(training=True) as module:
            return self.run(module, theta, inputs)

    def run(self, module: nn.Module, theta: Tensor, inputs: Inputs) -> Tensor:
        """The output at θ of the module, or of another form of it."""
        values = inputs if isinstance(inputs, tuple) else (inputs,)
        args, named = ((), dict(zip(self.names, values, strict=True))) if self.names else (values, {})
        with _PLAIN_ATTENTION if self.attention else nullcontext():
            return _tensor(functional_call(module, self.unflatten(theta), args, named, tie_weights=self._tied))

    @contextmanager
    def _copy(self, *, training: bool = False) -> Iterator[nn.Module]:
        """A copy of the module with the same tensors that nobody else runs: a call exchanges the tensors of its module,
        and several threads may call. Copies are used again."""
        idle = self._idle[training]
        try:
            module = idle.pop()  # in one operation, so that no two threads get the same
        except IndexError:
            module = with_native_layers(self._skeleton())
            module = module.train() if training else module
        try:
            yield module
        finally:
            idle.append(module)

    @property
    def unknown(self) -> bool:
        """Whether it has parts of which only a trial tells what they do in forward."""
        return any(
            isinstance(part, SPECIAL) or not type(part).__module__.startswith(("torch.nn.modules.", "coterie."))
            for part in self._module.modules()
        )

    @property
    def trainer(self) -> nn.Module:
        """The module in training mode; its tensors are those of the module itself."""
        if self._trainer is None:
            self._trainer = self._skeleton().train()
        return self._trainer

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that calls run: for training, and for evaluation."""
        return self.trainer, self._module

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return (*self._module.parameters(), *self._module.buffers())

    def _skeleton(self) -> nn.Module:
        """A copy of the module with the same tensors."""
        return deepcopy(self._module, {id(tensor): tensor for tensor in self._tensors})

    def prepare(self, inputs: Tensor) -> Tensor:
        """What the model makes of inputs whatever θ is, to be done once and for all; the model takes both forms."""
        first = self._module[0] if isinstance(self._module, nn.Sequential) else self._module
        return first.prepare(inputs) if isinstance(first, PatchConv2d) else inputs

    def activation_numbers(self, inputs: Inputs) -> int:
        """How many numbers all layers put out for inputs of these shapes; counted once for each."""
        shapes = tuple(t.shape for t in (inputs if isinstance(inputs, tuple) else (inputs,)))
        if shapes not in self._activations:
            self._activations[shapes] = self._counted_activations(inputs)
        return self._activations[shapes]

    def _counted_activations(self, inputs: Inputs) -> int:
        """By hooks, while the model runs."""
        count = 0

        def add(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal count
            count += output.numel() if isinstance(output, Tensor) else 0

        with ExitStack() as hooks, torch.no_grad(), self._copy() as module:
            for part in module.modules():
                hooks.enter_context(part.register_forward_hook(add))
            self.run(module, self.start, inputs)
        return count

    def to(self, *, dtype: torch.dtype, device: torch.device | str) -> "FlatModel":
        """The same model for other numbers or another device; tensors that stay as they are, are shared."""
        moved = copy(self)
        moved._trainer, moved._idle = None, _no_copies()
        # the skeleton's tensors are read only, and a call exchanges those of its own module alone
        stays = all(
            t.device == torch.device(device) and (t.dtype == dtype or not (t.is_floating_point() or t.is_complex()))
            for t in self._tensors
        )
        moved._module = self._skeleton() if stays else deepcopy(self._module).to(device=device, dtype=dtype)
        moved.start = self.start.to(device=device, dtype=dtype)
        return moved

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the trained parameters, in the order of θ: for most modules that of their layers."""
        return tuple(name for name, _, _ in self._layout)

    @property
    def norm_parameters(self) -> tuple[str, ...]:
        """The names of the trained parameters of batch norm."""
        parts = self._module.named_modules()
        homes = {name for name, part in parts if isinstance(part, nn.modules.batchnorm._BatchNorm)}
        return tuple(name for name in self.parameter_names if name.rpartition(".")[0] in homes)

    def entries(self, names: Collection[str]) -> Tensor:
        """Which numbers of θ belong to the parameters of these names, [d] of booleans."""
        device = self.start.device
        return torch.cat([torch.full((length,), name in names, device=device) for name, _, length in self._layout])

    def called_with(self, names: tuple[str, ...]) -> "FlatModel":
        """The same model, whose inputs are given by these names."""
        self.names = names
        return self

    def parameters(self, theta: Tensor) -> dict[str, Tensor]:
        """All parameters at θ by name; tied ones under each of their names."""
        trained = self.unflatten(theta)
        first = {id(p): name for name, p in self._module.named_parameters()}
        every = self._module.named_parameters(remove_duplicate=False)
        return {name: trained.get(first[id(p)], p).detach().clone() for name, p in every}

    def state_dict(self, theta: Tensor, buffers: Buffers = NO_BUFFERS) -> dict[str, Tensor]:
        """θ as the module's ordinary state, for saving: parameters and buffers.

        Args:
            theta: the parameters.
            buffers: running statistics of batch norm; without them these buffers are missing.
        """
        values = self.parameters(theta)
        constants = {name: value for name, value in self._module.state_dict().items() if name not in values}
        return values | {name: value.detach().clone() for name, value in (constants | dict(buffers)).items()}

    def state_dicts(self, thetas: Tensor, buffers: Buffers = NO_BUFFERS) -> dict[str, Tensor]:
        """One model per row, named `client_0.name` …; what is not trained is saved once."""
        every = self._module.named_parameters(remove_duplicate=False)
        own = {name for name, p in every if p.requires_grad}
        saved = {name: value for name, value in self.state_dict(self.start).items() if name not in own}
        for k, theta in enumerate(thetas):
            row = self.state_dict(theta, {name: values[k] for name, values in buffers.items()})
            saved |= {f"client_{k}.{name}": row[name] for name in row if name in own or name in buffers}
        return saved

    def module(self, theta: Tensor, buffers: Buffers = NO_BUFFERS) -> nn.Module:
        """An ordinary module with these parameters, for evaluation.

        Args:
            theta: the parameters.
            buffers: running statistics of batch norm; without them it goes on to use those of the batch at hand.
        """
        made = deepcopy(self._module)
        fill(made, buffers)
        made.load_state_dict(self.state_dict(theta, buffers))
        return made

    def frozen_at(self, buffers: Buffers) -> nn.Module:
        """The module for evaluation whose batch norm, as far as statistics are known, uses these; for `run`."""
        skeleton = self._skeleton()
        fill(skeleton, buffers)
        return skeleton


def _views(theta: Tensor, lengths: list[int], shapes: list[tuple[int, ...]]) -> tuple[Tensor, ...]:
    # one split, not a slice for each: the derivative of a slice is a vector as long as θ
    return tuple(part.view(shape) for part, shape in zip(torch.split(theta, lengths), shapes, strict=True))


class _Views(torch.autograd.Function):
    """Views into θ whose gradients are written to their places at once: torch would bring those with channels last into
    the usual layout first."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, lengths: list[int], shapes: list[tuple[int, ...]]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.like, ctx.lengths, ctx.shapes = theta.new_empty(()), lengths, shapes
        return _views(theta, lengths, shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        like, lengths = ctx.like, ctx.lengths
        if torch.is_grad_enabled():  # it is differentiated again
            parts = [like.new_zeros(n) if g is None else g.reshape(n) for n, g in zip(lengths, gradients, strict=True)]
            return torch.cat(parts), None, None
        whole = empty_like(like, sum(lengths))
        for view, g in zip(_views(whole, lengths, ctx.shapes), gradients, strict=True):
            view.zero_() if g is None else view.copy_(g)
        return whole, None, None


def _no_copies() -> dict[bool, list[nn.Module]]:
    """Where copies of a module are kept that nobody runs just now: for evaluation and for training."""
    return {False: [], True: []}


class _PlainAttention:
    """Attention by plain products: torch's quick kernels have no second derivative, or none at all.

    The switch is one for all threads: the first to enter turns it, the last to leave turns it back.
    """

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0
        self._switched = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._switched.callback(
                    torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
                )
                torch.backends.mha.set_fastpath_enabled(False)
                self._switched.enter_context(sdpa_kernel(SDPBackend.MATH))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._switched.close()


_PLAIN_ATTENTION = _PlainAttention()


def fill(module: nn.Module, buffers: Buffers) -> None:
    """Give batch norm the running statistics that are known, by their names in the module's state."""
    for name in {name.rpartition(".")[0] for name in buffers}:
        part: Any = module.get_submodule(name)
        part.track_running_stats = True
        for key in STATISTICS:
            setattr(part, key, buffers[f"{name}.{key}".lstrip(".")])
        part.eval()


def _has_ties(module: nn.Module) -> bool:
    """Whether some tensor of a module has two names; to look for them in every call would take half of its time."""
    tensors = [*module.parameters(), *module.buffers()]
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return len({id(tensor) for tensor in tensors}) < len(every)


def _tensor(output: Any) -> Tensor:
    """The tensor of a module's output; models of the transformers library put it into `logits`."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise TypeError(
        f"it returns a {type(output).__name__}, where a tensor (or an object with .logits) with one row per input row "
        "is needed; wrap it in a module that picks the tensor"
    )


def _layers(module: nn.Module) -> list[nn.Module]:
    """Its layers behind a flattening of the input."""
    layers = list(module) if isinstance(module, nn.Sequential) else [module]
    if layers and isinstance(layers[0], nn.Flatten) and (layers[0].start_dim, layers[0].end_dim) == (1, -1):
        layers = layers[1:]
    return layers


def _is_affine(module: nn.Module) -> bool:
    """Whether it is one trained linear map of the flattened input, with or without offset, and nothing else."""
    layers = _layers(module)
    return len(layers) == 1 and type(layers[0]) is nn.Linear and all(p.requires_grad for p in layers[0].parameters())


def _with_offset(module: nn.Module) -> bool:
    """Whether its linear map has an offset."""
    return _layers(module)[0].bias is not None
