"""Variables of nested problems: tensors and modules, laid out in one flat vector; un-flattening is views."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coterie.errors import UsageError
from coterie.numerics.memo import Memoised
from coterie.problems.models import FlatModel

Variable = Tensor | nn.Module | FlatModel | Mapping[str, Any]


class Bound(NamedTuple):
    """A module with its parameters: call it on inputs. `flat` is the vector of its parameters, for penalties.

    Where nothing is differentiated by its parameters, its outputs on a batch's unchanged inputs are `memoised`.
    """

    model: FlatModel
    flat: Tensor
    memoised: Memoised | None = None
    inputs: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """The module's output."""
        if self.memoised is not None and inputs is self.inputs:
            return self.memoised(self.flat, inputs)
        return self.model(self.flat, inputs)


class Flat:
    """θ ↦ the variable as its owner wrote it: a tensor, a module (as `Bound`), or a dict of these."""

    def __init__(self, value: Variable, name: str = "x") -> None:
        self.name = name
        self._parts: dict[str, Flat] | None = None
        self._model: FlatModel | None = None
        self._memoised: Memoised | None = None
        self.start = torch.zeros(0)
        self.shape: tuple[int, ...] = (0,)
        if isinstance(value, nn.Module | FlatModel):
            self._model = value if isinstance(value, FlatModel) else FlatModel(value)
            self._memoised, self.start = Memoised(self._model), self._model.start
        elif isinstance(value, Tensor):
            if not value.is_floating_point():
                raise UsageError(f"{name} is a tensor of {value.dtype}; a variable needs real numbers, use .float().")
            self.start, self.shape = value.detach().reshape(-1).clone(), tuple(value.shape)
        elif isinstance(value, Mapping) and value:
            self._parts = {key: Flat(part, f"{name}.{key}") for key, part in value.items()}
            self.start = torch.cat([part.start for part in self._parts.values()])
        else:
            raise UsageError(
                f"{name} is a {type(value).__name__}; give a tensor, a torch.nn.Module, or a dict of these by name."
            )
        if not bool(torch.isfinite(self.start).all()):
            raise UsageError(f"the start value of {name} holds NaN or infinity; start somewhere finite.")
        self.size = len(self.start)

    @property
    def mixes_rows(self) -> bool:
        """Whether a module among the parts lets rows of a batch influence each other (batch norm)."""
        own = self._model is not None and self._model.mixes_rows
        return own or any(part.mixes_rows for part in (self._parts or {}).values())

    @property
    def linear(self) -> bool:
        """Whether it is one linear map with offset."""
        return self._model is not None and self._model.linear

    def __call__(self, theta: Tensor) -> Any:
        """The variable at θ, made of views."""
        if self._model is not None:
            return Bound(self._model, theta)
        if self._parts is None:
            return theta.view(self.shape)
        return {key: part(t) for (key, part), t in zip(self._parts.items(), self._split(theta), strict=True)}

    def fixed(self, theta: Tensor, inputs: Tensor) -> Any:
        """The variable at θ where θ is a constant: what modules make of these inputs is computed once."""
        if self._model is not None:
            return Bound(self._model, theta, self._memoised, inputs)
        if self._parts is None:
            return self(theta)
        split = zip(self._parts.items(), self._split(theta), strict=True)
        return {key: part.fixed(t, inputs) for (key, part), t in split}

    def clear(self) -> None:
        """Forget all values of earlier calls."""
        for part in (self._parts or {}).values():
            part.clear()
        if self._memoised is not None:
            self._memoised.clear()

    def named(self, theta: Tensor) -> dict[str, Tensor]:
        """The tensors by name, as they are saved."""
        if self._model is not None:
            return {f"{self.name}.{key}": t for key, t in self._model.state_dict(theta).items()}
        if self._parts is None:
            return {self.name: theta.view(self.shape).detach().clone()}
        return {
            key: tensor
            for part, t in zip(self._parts.values(), self._split(theta), strict=True)
            for key, tensor in part.named(t).items()
        }

    def _split(self, theta: Tensor) -> tuple[Tensor, ...]:
        return torch.split(theta, [part.size for part in (self._parts or {}).values()])

    def to(self, *, dtype: torch.dtype, device: torch.device | str) -> "Flat":
        """The same variable for other numbers or another device."""
        moved = object.__new__(Flat)
        moved.__dict__.update(self.__dict__, start=self.start.to(device=device, dtype=dtype))
        if self._model is not None:
            moved._model = self._model.to(dtype=dtype, device=device)
            moved._memoised = Memoised(moved._model)
        if self._parts is not None:
            moved._parts = {key: part.to(dtype=dtype, device=device) for key, part in self._parts.items()}
        return moved
