"""Variables of nested problems: tensors and modules, laid out in one flat vector; un-flattening is views.

A variable may stay at its client (`PerClient`), and it may be kept within a convex set.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coterie.errors import UsageError
from coterie.numerics.memo import Memoised
from coterie.problems.models import FlatModel
from coterie.problems.models.probing import current_probe
from coterie.problems.tasks.sets import Projection, Within, projection

Variable = Tensor | nn.Module | FlatModel | Mapping[str, Any]


@dataclass(frozen=True)
class PerClient:
    """Marks x or y of a nested problem as a variable that every client has for itself, and that never leaves it.

    Args:
        start: the value that every client starts from: a tensor, a module, or a dict of these. Where clients need
            different sizes (one weight per row), give the largest; entries without influence stay as they are.

    Example:
        `coterie.Nested(inner, outer).on(train, valid, x=PerClient(torch.zeros(rows)), y=torch.zeros(10))`:
        weights of a client's own rows, which neither the server nor another client sees.
    """

    start: Variable


class Bound(NamedTuple):
    """A module with its parameters: call it on inputs. `flat` is the vector of its parameters, for penalties.

    Where nothing is differentiated by its parameters, its outputs on a batch's unchanged inputs are `memoised`.
    """

    model: FlatModel
    flat: Tensor
    memoised: Memoised | None = None
    inputs: Tensor | None = None
    keys: Tensor | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The module's output on these inputs; with dropout where the batch has keys."""
        known = self.memoised is not None and self.keys is None and current_probe() is None
        if known and self.memoised is not None and len(inputs) == 1 and inputs[0] is self.inputs:
            return self.memoised(self.flat, inputs[0])
        return self.model(self.flat, inputs if len(inputs) > 1 else inputs[0], self.keys)


class Flat:
    """θ ↦ the variable as its owner wrote it: a tensor, a module (as `Bound`), or a dict of these."""

    def __init__(self, value: Variable, name: str = "x", within: Within = None) -> None:
        self.name = name
        self._project: Projection | None = None
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
            by_part = within if isinstance(within, Mapping) else {}
            _check_parts(by_part, value, name)
            self._parts = {key: Flat(part, f"{name}.{key}", by_part.get(key)) for key, part in value.items()}
            self.start = torch.cat([part.start for part in self._parts.values()])
        else:
            raise UsageError(
                f"{name} is a {type(value).__name__}; give a tensor, a torch.nn.Module, or a dict of these by name."
            )
        if not bool(torch.isfinite(self.start).all()):
            raise UsageError(f"the start value of {name} holds NaN or infinity; start somewhere finite.")
        self.size = len(self.start)
        if isinstance(within, Mapping) and self._parts is None:
            raise UsageError(f"{name}_set is a dict, and {name} is none; give one set for the whole variable.")
        if within is not None and not isinstance(within, Mapping):
            self._project = projection(within, self.start, name)
        self.start = self.project(self.start)

    @property
    def bounded(self) -> bool:
        """Whether it, or a part of it, is kept within a set."""
        return self._project is not None or any(part.bounded for part in (self._parts or {}).values())

    def project(self, theta: Tensor) -> Tensor:
        """The nearest θ within the variable's set; θ itself where it has none."""
        if self._project is not None:
            return self._project(theta)
        if self._parts is None or not self.bounded:
            return theta
        parts = zip(self._parts.values(), self._split(theta), strict=True)
        return torch.cat([part.project(t) for part, t in parts])

    @property
    def models(self) -> list[FlatModel]:
        """The modules among the parts."""
        own = [] if self._model is None else [self._model]
        return own + [model for part in (self._parts or {}).values() for model in part.models]

    @property
    def linear(self) -> bool:
        """Whether it is one linear map with offset."""
        return self._model is not None and self._model.linear

    def __call__(self, theta: Tensor, keys: Tensor | None = None) -> Any:
        """The variable at θ, made of views; modules draw the masks of dropout from a batch's keys."""
        if self._model is not None:
            return Bound(self._model, theta, keys=keys)
        if self._parts is None:
            return theta.view(self.shape)
        return {key: part(t, keys) for (key, part), t in zip(self._parts.items(), self._split(theta), strict=True)}

    def fixed(self, theta: Tensor, inputs: Tensor, keys: Tensor | None = None) -> Any:
        """The variable at θ where θ is a constant: what modules make of these inputs is computed once."""
        if self._model is not None:
            return Bound(self._model, theta, self._memoised, inputs, keys if self._model.dropout else None)
        if self._parts is None:
            return self(theta)
        split = zip(self._parts.items(), self._split(theta), strict=True)
        return {key: part.fixed(t, inputs, keys) for (key, part), t in split}

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


def _check_parts(sets: Mapping[str, Any], value: Mapping[str, Any], name: str) -> None:
    for key in sets:
        if key not in value:
            raise UsageError(f"{name}_set names {key!r}, but {name} has the parts {', '.join(value)}.")
