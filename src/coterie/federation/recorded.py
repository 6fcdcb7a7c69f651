"""The local engine while a round is recorded for a compiler: all clients at once, and nothing remembered."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from coterie.federation.api import Call
from coterie.federation.local import LocalEngine, Mode
from coterie.federation.shards import Columns, Stack
from coterie.federation.tree import Tree
from coterie.numerics.tracing import Untraceable


@dataclass(frozen=True)
class RecordedEngine(LocalEngine):
    """A local engine whose calls are recorded.

    Args:
        views: all rows of all clients, of the training part and the validation part, where everybody takes part.
        totals: how many rows these are.
    """

    views: tuple[Columns, ...] = ()
    totals: tuple[int, ...] = ()

    @staticmethod
    def of(engine: LocalEngine, ids: Tensor) -> "RecordedEngine":
        """The engine for rounds with these clients; `Untraceable` where their works are not all run at once.

        Args:
            engine: the engine.
            ids: the clients that take part.
        """
        if engine.mode != "vmap" or engine.train.mapped or engine.sizes.device.type != "cpu":
            raise Untraceable("clients are run one after the other")
        if engine.chunk is not None and engine.chunk < len(ids):
            raise Untraceable(f"clients are run {engine.chunk} at a time")
        stacks = [stack for stack in (engine.train, engine.valid) if stack is not None]
        whole = len(ids) == len(engine.sizes)
        sizes = [(stack.capacity, stack.ragged) for stack in stacks]  # computed here, where counts are numbers
        if not whole and any(ragged for _, ragged in sizes):
            raise Untraceable("clients with unequal numbers of rows take turns")
        views = tuple(stack.views(ids) for stack in stacks) if whole else ()
        totals = tuple(int(stack.counts.sum()) for stack in stacks) if whole else ()
        return RecordedEngine(engine.task, engine.train, engine.valid, engine.target, views=views, totals=totals)

    def _mode_of(self, call: Call) -> Mode:
        if super()._mode_of(call) != "vmap":
            raise Untraceable("clients are run one after the other")
        return "vmap"

    def _vectorised(self, call: Call, ids: Tensor, size: int) -> Iterator[tuple[Tensor, Tree]]:
        yield ids, self._at_once(call, ids)

    def _views(self, part: Stack, batch: Tensor) -> Columns:
        return self.views[part is not self.train] if len(batch) == len(self.sizes) and self.views else ()

    def _total(self, part: Stack, batch: Tensor) -> int:
        if len(batch) != len(self.sizes):
            raise Untraceable("a part of clients with unequal numbers of rows is asked")
        return self.totals[part is not self.train]

    def _copied(self, value: Tensor, count: int) -> Tensor:
        return value.expand(count, *value.shape)


__all__ = ["RecordedEngine"]
