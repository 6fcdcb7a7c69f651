"""Several clients at a time, in threads of this process.

torch computes without Python's lock, so threads that run different clients keep several cores busy, with the data in
place. Every thread computes by itself (one intra-op thread): kernels then add in one order, so that a client's bits are
those of a single thread, however many threads there are. Results are handed on in the order of the clients.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Generic, NamedTuple, TypeVar

import torch

from coterie.federation.points import Abandoned, counted, ending_with, touched
from coterie.numerics.control import transformed

R = TypeVar("R")
PATIENCE = 0.5  # seconds of one wait


class _Outcome(NamedTuple, Generic[R]):
    """What became of one item: its result or its error, and the rows that were touched for it."""

    number: int
    result: R | None
    error: BaseException | None
    points: int


def in_threads(function: Callable[[int], R], count: int, threads: int, *, ahead: Callable[[R], int]) -> Iterator[R]:
    """function(0), function(1) … in this order, computed by several threads.

    An error is raised where its result would be handed on; what comes after it is dropped. If the caller stops early,
    by an error or an interruption of its own, the threads end where they next take rows, by an exception of their own:
    one that comes from outside may hit them between entering and holding something, such as a vmap of torch. Between
    the results the caller computes with one intra-op thread as well.

    Args:
        function: makes a result; it may be run by several threads at once.
        count: how many results there are.
        threads: how many threads compute.
        ahead: how many results may wait to be handed on, by the first of them; it bounds the memory.
    """
    todo: SimpleQueue[int | None] = SimpleQueue()
    done: SimpleQueue[_Outcome[R]] = SimpleQueue()
    ended, grad = Event(), torch.is_grad_enabled()

    def compute() -> None:
        torch.set_num_threads(1)  # of this thread
        ending_with(ended)
        with torch.set_grad_enabled(grad), suppress(Abandoned):
            while (number := todo.get()) is not None and not ended.is_set():
                done.put(_outcome(function, number))

    before = torch.get_num_threads()
    workers = [Thread(target=copy_context().run, args=(compute,), daemon=True) for _ in range(min(threads, count))]
    waiting: dict[int, _Outcome[R]] = {}
    given, limit = 0, 2 * threads
    try:
        torch.set_num_threads(1)  # the caller's sums meanwhile, too: the cores are taken
        for worker in workers:
            worker.start()
        for number in range(count):
            while given < min(count, number + limit):
                todo.put(given)
                given += 1
            while number not in waiting:
                outcome = _next_of(done)
                waiting[outcome.number] = outcome
            result, error, points = waiting.pop(number)[1:]
            if error is not None:
                raise error
            touched(points)
            limit = max(limit, ahead(result)) if number == 0 else limit  # type: ignore[arg-type]
            yield result  # type: ignore[misc]
    finally:
        ended.set()
        for _ in workers:
            todo.put(None)
        for worker in workers:
            if worker.ident is not None:  # it was started
                worker.join()
        torch.set_num_threads(before)


def _next_of(done: "SimpleQueue[_Outcome[R]]") -> _Outcome[R]:
    """Wait for an outcome. In parts: a signal that comes just before a wait begins is seen when the wait ends."""
    while True:
        with suppress(Empty):
            return done.get(timeout=PATIENCE)


def _outcome(function: Callable[[int], R], number: int) -> _Outcome[R]:
    try:
        with counted() as points:  # an open count belongs to one thread
            result = function(number)
        return _Outcome(number, result, None, points.rows)
    except Abandoned:
        raise
    except BaseException as error:
        return _Outcome(number, None, error, 0)


def seen_by_threads() -> bool:
    """Whether other threads compute as this one would: nothing is around the call that belongs to this thread alone,
    such as a derivative, a mode that watches operations, or autocast."""
    return not (
        transformed()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch.is_autocast_enabled("cpu")
        or torch.is_inference_mode_enabled()
    )


__all__ = ["in_threads", "seen_by_threads"]
