"""What a model does in forward, found before the first round: whether it drops units, attends, keeps state or draws."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from coterie.errors import UsageError

_PROBE: ContextVar[list[Tensor] | None] = ContextVar("probe", default=None)
_OF_TORCH = frozenset(nn.Module().__dict__)


class Probed(Protocol):
    """A model that notes what it does while it is probed."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that its calls run."""


def current_probe() -> list[Tensor] | None:
    """Where models leave their outputs while they are probed; None elsewhere."""
    return _PROBE.get()


@contextmanager
def _probing() -> Iterator[list[Tensor]]:
    outputs: list[Tensor] = []
    token = _PROBE.set(outputs)
    try:
        yield outputs
    finally:
        _PROBE.reset(token)


def probe(models: Sequence[Probed], run: Callable[[], Any]) -> None:
    """Run models in training mode, so that they note what they do, and refuse those that are no functions of inputs.

    Args:
        models: the models that `run` calls; batch norm's own statistics are no state here.
        run: something that calls them on a few rows.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        with _probing():
            run()  # caches may be filled once
        before, generator = _states(models), torch.get_rng_state()
        with _probing() as first:
            run()
        after = _states(models)
        drew = not torch.equal(generator, torch.get_rng_state())
        with _probing() as second:
            run()
    for key, value in after.items():
        if key not in before or not _same(before[key], value):
            raise UsageError(
                f"the model keeps state in forward: {key[1]} changes with every call, and clients would share it; "
                "make forward a function of its inputs and parameters alone, and return what must be kept."
            )
    if drew:
        raise UsageError(
            "the model draws random numbers of its own in forward (torch.rand, a sampled layer, the dropout= of "
            "nn.LSTM or nn.GRU), which cannot be repeated at other clients or after an interruption; use nn.Dropout or "
            "torch.nn.functional.dropout, whose masks coterie draws."
        )
    if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)):
        raise UsageError(
            "the model gives two answers for the same rows and parameters, so it keeps state outside of its tensors; "
            "make forward a function of its inputs and parameters alone."
        )


def _states(models: Sequence[Probed]) -> dict[tuple[int, str], Any]:
    """Buffers, and tensors, numbers and sizes of collections among the attributes, by name."""
    found: dict[tuple[int, str], Any] = {}
    for i, module in enumerate(module for model in models for module in model.modules):
        for path, part in module.named_modules():
            where = f"of {path} ({type(part).__name__})" if path else f"of {type(part).__name__}"
            for name, buffer in part.named_buffers(recurse=False):
                found[i, f"buffer {name!r} {where}"] = buffer.detach().clone()
            for name, value in vars(part).items():
                if name not in _OF_TORCH:
                    found[i, f"attribute {name!r} {where}"] = _summary(value)
    return found


def _summary(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, list | dict | set | tuple):
        return len(value)
    return value if isinstance(value, bool | int | float | str) else None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    return bool(a == b)
