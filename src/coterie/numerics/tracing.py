"""What code must know of a compiler that records it: whether it is recorded, and what the recording may assume.

A recording runs Python once, on tensors without numbers, and keeps the operations. So code must not branch on a number.
Where one branch is the usual one (all replies are finite), `assumed` takes it, and the condition becomes part of the
recording: a compiled round whose conditions do not all hold is thrown away and run as it is written. Everything that
cannot be recorded raises, and is run as it is written, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from typing import NoReturn, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


class Untraceable(Exception):
    """Why something is run as it is written."""


class Unbuildable(Untraceable):
    """Why nothing can be compiled here."""


@dataclass
class Recording:
    """The conditions under which a recording holds."""

    conditions: list[Tensor] = field(default_factory=list)


_OPEN: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Inside, operations are being recorded."""
    recording = Recording()
    token = _OPEN.set(recording)
    try:
        yield recording
    finally:
        _OPEN.reset(token)


def recording() -> bool:
    """Whether operations are being recorded: then nothing may be remembered of them, or depend on their numbers."""
    return _OPEN.get() is not None


def assumed(condition: Tensor) -> bool:
    """Whether a condition holds. A recording assumes it, and is not used where it does not.

    Args:
        condition: one boolean.

    Example:
        >>> import torch
        >>> assumed(torch.tensor(2.0) > 3.0)
        False
        >>> with recorded() as found:
        ...     assumed(torch.tensor(2.0) > 3.0)
        True
        >>> found.conditions
        [tensor(False)]
    """
    open_ = _OPEN.get()
    if open_ is None:
        return bool(condition)
    open_.conditions.append(condition)
    return True


def remembered(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """`lru_cache` for functions that return tensors: what is recorded has no numbers, and is not remembered.

    Args:
        maxsize: how many values are kept.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kept = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*args: P.args, **settings: P.kwargs) -> T:
            return function(*args, **settings) if recording() else kept(*args, **settings)  # type: ignore[arg-type]

        return call

    return decorate


@dataclass(frozen=True, eq=False)
class Counter:
    """A whole number of a method's state while a round is recorded: times · n + plus, whatever n is, where n is the
    number at the place `of` in the state.

    A round may count on and hand the number about, but not look at it: whatever depends on it is not recorded.

    Example:
        >>> (Counter() + 1).at(5)
        6
    """

    times: int = 1
    plus: int = 0
    of: int = 0

    def at(self, n: int) -> int:
        """The number where the state has n."""
        return self.times * n + self.plus

    def __add__(self, other: object) -> "Counter":
        return replace(self, plus=self.plus + other) if isinstance(other, int) else NotImplemented

    def __sub__(self, other: object) -> "Counter":
        return replace(self, plus=self.plus - other) if isinstance(other, int) else NotImplemented

    def __mul__(self, other: object) -> "Counter":
        return (
            replace(self, times=self.times * other, plus=self.plus * other)
            if isinstance(other, int)
            else NotImplemented
        )

    __radd__, __rmul__ = __add__, __mul__

    def _refuse(self, *_: object) -> NoReturn:
        raise Untraceable("the round depends on its number")

    __bool__ = __int__ = __float__ = __index__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __mod__ = __rmod__ = __floordiv__ = __truediv__ = __rtruediv__ = __divmod__ = __pow__ = __rpow__ = _refuse
    __hash__ = _refuse


__all__ = ["Counter", "Recording", "Unbuildable", "Untraceable", "assumed", "recorded", "recording", "remembered"]
