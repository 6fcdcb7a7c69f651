"""Points: the rows that works touch, counted where they are taken.

A row counts each time that a work takes it, in a batch or in a pass over all rows. `Rows` adds to the count that is
open, once for every client that it stands for, so that all modes, chunks and engines give the same number.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

import torch
from torch import Tensor

from coterie.numerics.control import transformed

T = TypeVar("T")
CheckBatch = Callable[[int, int | None], None]
"""Is given how many rows a batch has, and how many of them differ, where that is known; it may raise an error."""


@dataclass
class Points:
    """How many rows were touched since the count was opened."""

    rows: int = 0


class Abandoned(BaseException):
    """Ends a work whose result nobody waits for any more."""


_OPEN: ContextVar[Points | None] = ContextVar("points", default=None)
_ENDED: ContextVar[Event | None] = ContextVar("ended", default=None)


_CHECK: ContextVar[CheckBatch | None] = ContextVar("check", default=None)


@contextmanager
def counted() -> Iterator[Points]:
    """Count the rows that are touched inside; a count that is open outside does not see them.

    Example:
        >>> with counted() as points:
        ...     touched(50)
        >>> points.rows
        50
    """
    points = Points()
    token = _OPEN.set(points)
    try:
        yield points
    finally:
        _OPEN.reset(token)


def ending_with(ended: Event) -> None:
    """From now on, works of this context end where they next take rows once the event is set.

    Args:
        ended: says that nobody waits for their results any more.
    """
    _ENDED.set(ended)


def touched(rows: int) -> None:
    """Add to the count that is open, where one is; a work whose result nobody waits for ends here.

    Args:
        rows: how many rows.
    """
    if (ended := _ENDED.get()) is not None and ended.is_set():
        raise Abandoned
    if (points := _OPEN.get()) is not None:
        points.rows += rows


@contextmanager
def batches_checked(check: CheckBatch) -> Iterator[None]:
    """Every batch that a work takes inside is shown to this function first, in threads of their own too."""
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


def batch_taken(index: Tensor, clients: int) -> None:
    """Count a batch of rows.

    Args:
        index: the numbers of the rows.
        clients: how many clients the batch stands for.
    """
    touched(clients * index.numel())
    if (check := _CHECK.get()) is not None:
        seen_alone = clients == 1 and not transformed()
        check(index.shape[-1] if index.dim() else 1, torch.unique(index).numel() if seen_alone else None)


def with_points(items: Iterator[T]) -> Iterator[tuple[T, int]]:
    """Every item with the rows that were touched to make it.

    Args:
        items: replies that are computed one after the other, as an engine's are.
    """
    while True:
        with counted() as points:
            try:
                item = next(items)
            except StopIteration:
                return
        yield item, points.rows
