"""The local engine: all clients in this process.

Two ways to run a work at many clients give the same numbers up to rounding: `vmap` runs it once over stacked values,
`sequential` client after client with the native kernels (faster for large convolutions). Chunks bound the memory;
the bits of a result do not depend on their size. Two things keep it so under `vmap`. It is never run on a single
client, because batched kernels take another path for a batch of one: a lone client is doubled and the copy dropped.
And shared values are given to every client as its own, because a product with a value common to all would be one
large product over all clients' rows, whose bits depend on how many there are. (oneDNN's grouped float32 convolutions
are the exception: on several threads their last bits do depend on the chunk.)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from coterie.errors import UsageError
from coterie.federation.api import Call, Replies
from coterie.federation.shards import Rows, Shard, Stack
from coterie.federation.tree import Tree, row, rows, stack, tree_flatten, tree_unflatten
from coterie.federation.work import Each, Memory, held

Mode = Literal["vmap", "sequential"]


@dataclass(frozen=True)
class LocalEngine:
    """K clients' rows, the oracles, and how to run works on them."""

    task: object
    train: Stack
    valid: Stack | None
    target: Shard | None
    mode: Mode = "vmap"
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise UsageError(f"federation.chunk must be at least 1, not {self.chunk}.")

    @property
    def sizes(self) -> Tensor:
        """Rows of training data by client, [n]."""
        return self.train.counts

    def execute(self, call: Call, ids: Tensor) -> Iterator[Replies]:
        """Run a work at these clients, chunk after chunk."""
        run: Callable[[Call, Tensor], Tree] = self._vectorised if self._mode_of(call) == "vmap" else self._one_by_one
        size = self.chunk or len(ids)
        for start in range(0, len(ids), size):
            some = ids[start : start + size]
            result = run(call, some)
            values, memory = (result, None) if call.memory is None else result
            yield Replies(some, values, memory)

    def execute_at_target(self, call: Call) -> Tree:
        """Run a work on the target's shard."""
        if self.target is None:
            raise UsageError(
                "this method asks the target, but the problem has none; give validation data (target=…) "
                "or choose a method that does not learn weights, such as fedavg."
            )
        draw = call.draw.client(self.train.counts.new_tensor(-1))
        return call.work(self.target, call.shared, None, call.static, draw)

    def remember(self, memory: Memory, parts: list[tuple[Tensor, Tree]]) -> Memory:
        """The memory with the rows of those who answered replaced."""
        ids = torch.cat([part[0] for part in parts])
        old, structure = tree_flatten(held(memory))
        new = [torch.cat(column) for column in zip(*(tree_flatten(part[1])[0] for part in parts), strict=True)]
        if len(ids) == len(self.train):
            return Memory(tree_unflatten(new, structure))
        return Memory(tree_unflatten([o.index_copy(0, ids, v) for o, v in zip(old, new, strict=True)], structure))

    def _mode_of(self, call: Call) -> Mode:
        # Padded rows would enter the statistics of layers that mix rows (batch norm), so unequal shards go one by one.
        ragged = any(part is not None and part.ragged for part in (self.train, self.valid))
        if ragged and getattr(self.task, "mixes_rows", False):
            return "sequential"
        return getattr(call.work, "__coterie_mode__", self.mode)

    def _vectorised(self, call: Call, ids: Tensor) -> Tree:
        lone = len(ids) == 1
        some = ids.repeat(2) if lone else ids
        sent, fill = _split(call.shared)
        private = None if call.memory is None else held(call.memory)

        def at_one(client: Tensor, places: list[Tensor], mine: list[Tensor], private_row: Tree) -> Tree:
            # vmap takes no None for an argument, so "no memory" travels as an empty list
            shard = Shard(self.task, _rows(self.train, places[:2]), _rows(self.valid, places[2:]))
            return call.work(
                shard,
                fill(mine),
                None if private is None else private_row,
                call.static,
                call.draw.client(client),
            )

        out = vmap(at_one)(
            some,
            [t[some] for s in (self.train, self.valid) if s is not None for t in (s.offsets, s.counts)],
            [v.of(some) if isinstance(v, Each) else v.repeat(len(some), *[1] * v.dim()) for v in sent],
            [] if private is None else rows(private, some),
        )
        return rows(out, slice(1)) if lone else out

    def _one_by_one(self, call: Call, ids: Tensor) -> Tree:
        sent, fill = _split(call.shared)
        private = None if call.memory is None else held(call.memory)
        results = []
        for client in ids.tolist():
            shard = Shard(
                self.task,
                self.train.client(client),
                None if self.valid is None else self.valid.client(client),
            )
            number = ids.new_tensor(client)
            mine = fill([v.of(number) if isinstance(v, Each) else v for v in sent])
            draw = call.draw.client(number)
            results.append(call.work(shard, mine, row(private, client), call.static, draw))
        return stack(results)


def _rows(part: Stack | None, place: list[Tensor]) -> Rows | None:
    """One client's rows as seen under vmap: where they begin and how many they are."""
    return None if part is None else Rows(part.columns, place[0], place[1], part.capacity, part.ragged)


def _split(shared: Tree) -> tuple[list[Tensor | Each], Callable[[list[Tensor]], Tree]]:
    """What is sent, without what is plain data; the function puts one client's values back in place."""
    leaves, structure = tree_flatten(shared)

    def fill(mine: list[Tensor]) -> Tree:
        supply = iter(mine)
        return tree_unflatten([next(supply) if isinstance(leaf, Tensor | Each) else leaf for leaf in leaves], structure)

    return [leaf for leaf in leaves if isinstance(leaf, Tensor | Each)], fill


def faster_mode(engine: LocalEngine, call: Call, *, sample: int = 8, margin: float = 1.25) -> Mode:
    """Which mode runs a typical work faster, by a short measurement; ties go to vmap.

    The answer is kept in the resolved configuration, so that a resumed run does not measure again.
    """
    ids = torch.arange(min(sample, len(engine.train)), device=engine.sizes.device)
    seconds: dict[Mode, float] = {}
    modes: tuple[Mode, Mode] = ("vmap", "sequential")
    for mode in modes:
        trial = replace(engine, mode=mode)
        list(trial.execute(call, ids))  # the first call warms caches up
        seconds[mode] = min(_seconds(trial, call, ids) for _ in range(3))  # the best is the least disturbed
    return "sequential" if seconds["sequential"] * margin < seconds["vmap"] else "vmap"


def _seconds(engine: LocalEngine, call: Call, ids: Tensor) -> float:
    start = perf_counter()
    list(engine.execute(call, ids))
    return perf_counter() - start
