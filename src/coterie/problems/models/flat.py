"""A model is a specification and one flat vector θ ∈ R^d; un-flattening is views.

The module becomes a pure function of (θ, inputs). Batch norm uses the statistics of the batch at hand and keeps no
running buffers, so clients cannot share them by accident; dropout is off. Other buffers, and parameters that need no
gradient (a frozen encoder), are constants.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coterie.errors import UsageError
from coterie.problems.models.layers import PatchConv2d


class FlatModel:
    """θ ↦ module, for any nn.Module. The given module is copied, never changed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = deepcopy(module).eval()
        self.mixes_rows = False
        for part in self._module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.train()
                part.track_running_stats = False
                part.running_mean = part.running_var = part.num_batches_tracked = None
                self.mixes_rows = True
        parameters = [(name, p) for name, p in self._module.named_parameters() if p.requires_grad]
        if not parameters:
            raise UsageError(f"the model {type(module).__name__} has no parameters; there is nothing to train.")
        self._layout = [(name, tuple(p.shape), p.numel()) for name, p in parameters]
        self.linear = _is_linear(self._module)
        self.start = torch.cat([p.detach().reshape(-1) for _, p in parameters])
        self.size = len(self.start)

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """Named views into θ."""
        # one split, not a slice for each: the derivative of a slice is a vector as long as θ
        parts = torch.split(theta, [length for _, _, length in self._layout])
        return {name: part.view(shape) for (name, shape, _), part in zip(self._layout, parts, strict=True)}

    def __call__(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """The module's output at θ."""
        return functional_call(self._module, self.unflatten(theta), (inputs,))

    def prepare(self, inputs: Tensor) -> Tensor:
        """What the model makes of inputs whatever θ is, to be done once and for all; the model takes both forms."""
        first = self._module[0] if isinstance(self._module, nn.Sequential) else self._module
        return first.prepare(inputs) if isinstance(first, PatchConv2d) else inputs

    def activation_numbers(self, inputs: Tensor) -> int:
        """How many numbers all layers put out for these inputs."""
        count = 0

        def add(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal count
            count += output.numel() if isinstance(output, Tensor) else 0

        hooks = [part.register_forward_hook(add) for part in self._module.modules()]
        try:
            with torch.no_grad():
                self(self.start, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return count

    def to(self, *, dtype: torch.dtype, device: torch.device | str) -> "FlatModel":
        """The same model for other numbers or another device."""
        moved = deepcopy(self)
        moved._module = moved._module.to(device=device, dtype=dtype)
        moved.start = self.start.to(device=device, dtype=dtype)
        return moved

    def state_dict(self, theta: Tensor) -> dict[str, Tensor]:
        """θ as the module's ordinary named parameters, for saving."""
        values = dict(self._module.named_parameters()) | self.unflatten(theta)
        return {name: value.detach().clone() for name, value in values.items()}

    def state_dicts(self, thetas: Tensor) -> dict[str, Tensor]:
        """One model per row, named `client_0.name` …; parameters that are not trained are saved once."""
        names = {name for name, _, _ in self._layout}
        fixed = {n: t for n, t in self.state_dict(self.start).items() if n not in names}
        rows = [(f"client_{k}", self.unflatten(theta.detach())) for k, theta in enumerate(thetas)]
        return fixed | {f"{client}.{name}": value.clone() for client, row in rows for name, value in row.items()}

    def module(self, theta: Tensor) -> nn.Module:
        """An ordinary module with these parameters."""
        copy = deepcopy(self._module)
        copy.load_state_dict(self.state_dict(theta), strict=False)
        return copy


def _is_linear(module: nn.Module) -> bool:
    """Whether it is one trained linear map with offset of the flattened input, and nothing else."""
    layers = list(module) if isinstance(module, nn.Sequential) else [module]
    if layers and isinstance(layers[0], nn.Flatten) and (layers[0].start_dim, layers[0].end_dim) == (1, -1):
        layers = layers[1:]
    return (
        len(layers) == 1
        and type(layers[0]) is nn.Linear
        and layers[0].bias is not None
        and all(p.requires_grad for p in layers[0].parameters())
    )
