"""The local engine: all clients in this process.

Two ways to run a work at many clients give the same numbers up to rounding: `vmap` runs it once over stacked values,
`sequential` client after client with the native kernels (faster for large convolutions), several of them at a time
where torch is set to several threads (`groups.py`). Chunks bound the memory; the bits of a result do not depend on
their size. Two things keep it so under `vmap`. It is never run on a single
client, because batched kernels take another path for a batch of one: a lone client is doubled and the copy dropped.
And shared values are given to every client as its own, because a product with a value common to all would be one
large product over all clients' rows, whose bits depend on how many there are. (oneDNN's grouped float32 convolutions
are the exception: on several threads their last bits do depend on the chunk.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter, process_time
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap

from coterie.errors import CoterieError, UsageError, WorkError, gist
from coterie.federation.api import Call, Replies
from coterie.federation.groups import in_threads, seen_by_threads
from coterie.federation.points import counted, touched
from coterie.federation.shards import Rows, Shard, Stack
from coterie.federation.tree import Tree, mapped, row, rows, stack, tensors, tree_flatten, tree_unflatten
from coterie.federation.tree import size as size_of
from coterie.federation.work import Each, Memory, info_of, name_of
from coterie.numerics import Draw
from coterie.numerics.memo import TensorMemo, TensorVersion

Mode = Literal["vmap", "sequential"]
LONG = 1.0  # seconds
LARGE = 1 << 25  # bytes
MANY = 1 << 22  # bytes of one client's rows


@dataclass(frozen=True)
class LocalEngine:
    """All clients in this process.

    Args:
        task: the problem's oracles; None where works ask for none.
        train: the clients' training rows.
        valid: the clients' validation rows, where they have some.
        target: the target's shard, where there is one.
        mode: `vmap` for all clients of a chunk at once, `sequential` for one after the other.
        chunk: how many clients at once; None for all. It bounds the memory and changes no bit.

    Example:
        >>> from coterie.federation import pack
        >>> LocalEngine(None, pack([torch.ones(2, 1), torch.ones(3, 1)]), None, None).sizes.tolist()
        [2, 3]
    """

    task: Any
    train: Stack
    valid: Stack | None
    target: Shard | None
    mode: Mode = "vmap"
    chunk: int | None = None
    _copies: "_Copies" = field(default_factory=lambda: _Copies(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise UsageError(f"federation.chunk must be at least 1, not {self.chunk}.")

    @property
    def sizes(self) -> Tensor:
        """Rows of training data by client, [n]."""
        return self.train.counts

    def execute(self, call: Call, ids: Tensor) -> Iterator[Replies]:
        """Run a work at these clients, chunk after chunk."""
        size = self.chunk or len(ids)
        run = self._vectorised if self._mode_of(call) == "vmap" else self._one_by_one
        for chunk, result in run(call, ids, size):  # no name for it: an error ends its threads at once
            values, memory = (result, None) if call.memory is None else result
            yield Replies(chunk, values, memory)

    def execute_at_target(self, call: Call) -> Tree:
        """Run a work on the target's shard."""
        if self.target is None:
            raise UsageError(
                "this method asks the target, but the problem has none; give validation data (target=…) "
                "or choose a method that does not learn weights, such as fedavg."
            )
        draw = call.draw.client(self.train.counts.new_tensor(-1))
        shared = mapped(lambda value: self._copied(value, 1)[0], call.shared)
        rows = [part.columns for part in (self.target.train, self.target.valid) if part is not None]
        with explained(call, "the target"), _unwritten([shared, rows], call, "the target"):
            return call.work(self.target, shared, None, call.static, draw)

    def remember(self, memory: Memory, parts: list[tuple[Tensor, Tree]]) -> Memory:
        """The memory with the rows of the clients that replied replaced."""
        return memory.with_rows(parts)

    def _mode_of(self, call: Call) -> Mode:
        # Padded rows would enter the statistics of layers that mix rows (batch norm), so unequal shards go one by one.
        ragged = any(part is not None and part.ragged for part in (self.train, self.valid))
        if self.task is not None and (not self.task.vmaps or (ragged and self.task.mixes_rows)):
            return "sequential"
        if self.train.mapped or (self.valid is not None and self.valid.mapped):  # one client's rows at a time
            return "sequential"
        info = info_of(call.work)
        if info.whole_pass and self._many_rows:
            return "sequential"
        return info.mode or self.mode

    @property
    def _many_rows(self) -> bool:
        """Whether operations on all rows of one client take so long that starting them one by one is nothing; then
        native kernels, one client's numbers in the cache, are quicker than all clients at once."""
        row_bytes = sum(c[:1].nbytes for c in self.train.columns)
        return self.sizes.device.type == "cpu" and self.train.capacity * row_bytes >= MANY

    def _vectorised(self, call: Call, ids: Tensor, size: int) -> Iterator[tuple[Tensor, Tree]]:
        threads = torch.get_num_threads()
        if self._threaded_chunks(threads):  # together they are no larger than one chunk would be
            chunks = torch.split(ids, size // threads)
            results = in_threads(
                lambda i: self._explained_chunk(call, chunks[i]), len(chunks), threads, ahead=lambda _: threads
            )
            yield from zip(chunks, results, strict=True)
            return
        for chunk in torch.split(ids, size):
            yield chunk, self._explained_chunk(call, chunk)

    def _threaded_chunks(self, threads: int) -> bool:
        """Whether chunks are computed in threads of their own: where all clients are more than one chunk, and each
        thread has several clients. By the federation again, and not by the active clients."""
        large = self.chunk is not None and 2 * threads <= self.chunk < len(self.train)
        return large and self._threaded(threads)

    def _explained_chunk(self, call: Call, chunk: Tensor) -> Tree:
        try:
            return self._at_once(call, chunk)
        except CoterieError:
            raise
        except Exception as error:
            for _ in self._one_by_one(call, chunk, 1):  # tells at which client it fails
                pass
            raise WorkError(
                f"{_named(call)} cannot be run for many clients at once: {gist(error)}. Set federation.mode = "
                'sequential (mode="sequential" in Python), or auto.'
            ) from error

    def _at_once(self, call: Call, ids: Tensor) -> Tree:
        lone = len(ids) == 1
        batch = ids.repeat(2) if lone else ids
        sent, fill = _split(call.shared)
        private = [] if call.memory is None else rows(call.memory.payload, batch)
        mine = [v.of(batch) if isinstance(v, Each) else self._copied(v, len(batch)) for v in sent]

        def at_client(key: Tensor, spans: list[_Span], mine: list[Tensor], private_row: Tree) -> Tree:
            # vmap takes no None for an argument, so "no memory" travels as an empty list
            train = self._rows(self.train, spans[0], batch)
            valid = None if self.valid is None else self._rows(self.valid, spans[1], batch)
            shard = Shard(self.task, self._with_masks(train, key), valid)
            private_row = None if call.memory is None else private_row
            return call.work(shard, fill(mine), private_row, call.static, Draw(key))

        stacks = [s for s in (self.train, self.valid) if s is not None]
        spans = [(s.offsets[batch], s.counts[batch], self._views(s, batch)) for s in stacks]
        with counted() as points, _unwritten([mine, private, spans], call, ids):
            out = vmap(at_client)(call.draw.client(batch).key, spans, mine, private)
        touched(points.rows // 2 if lone else points.rows)  # what the copy took is not counted
        return rows(out, slice(1)) if lone else out

    def _rows(self, part: Stack, span: "_Span", batch: Tensor) -> Rows:
        """One client's rows as seen under vmap: where they begin, how many they are, and views of them if there are.

        batch are the clients of the chunk, for the count of points.
        """
        offset, count, whole = span
        total = self._total(part, batch) if part.ragged else len(batch) * part.capacity
        return Rows(part.columns, offset, count, part.capacity, part.ragged, whole, clients=len(batch), total=total)

    def _total(self, part: Stack, batch: Tensor) -> int:
        """Rows of these clients together."""
        return int(part.counts[batch].sum())

    def _views(self, part: Stack, batch: Tensor) -> tuple[Tensor, ...]:
        """All rows of these clients, where they are at hand."""
        return part.views(batch)

    def _copied(self, value: Tensor, count: int) -> Tensor:
        """A shared value, one copy per client."""
        return self._copies.of(value, count)

    def _with_masks(self, rows: Rows, key: Tensor) -> Rows:
        """Training rows that dropout draws its masks for, where the model has dropout."""
        dropout = self.task is not None and self.task.dropout
        return replace(rows, key=Draw(key).phase("dropout").key) if dropout else rows

    def _one_by_one(self, call: Call, ids: Tensor, size: int) -> Iterator[tuple[Tensor, Tree]]:
        results: list[Tree] = []
        for i, result in enumerate(self._results(call, ids), 1):
            results.append(result)
            # large results are handed on at once: a sum over clients need not hold them all
            if i == len(ids) or len(results) >= min(size, _within(LARGE, results[0])):
                yield ids[i - len(results) : i], stack(results)
                results = []

    def _results(self, call: Call, ids: Tensor) -> Iterator[Tree]:
        """The clients' results in their order."""
        threads = torch.get_num_threads()
        return self._beside(call, ids, threads) if self._threaded(threads) else self._in_turn(call, ids)

    def _threaded(self, threads: int) -> bool:
        """Whether clients are computed in threads of their own, each with one intra-op thread. A rule about the
        federation and not about the active clients, because the bits of some kernels depend on their threads."""
        at_once = self.task is None or self.task.concurrent
        in_memory = self.sizes.device.type == "cpu" and not self.train.mapped  # a Dataset may know one reader only
        return 1 < threads <= len(self.train) and at_once and in_memory and seen_by_threads()

    def _in_turn(self, call: Call, ids: Tensor) -> Iterator[Tree]:
        at_client, overwritten = self._at_client(call, ids)
        for i in range(len(ids)):
            result = at_client(i)
            if overwritten():
                raise _writes_in_place(call, ids[i])
            yield result

    def _beside(self, call: Call, ids: Tensor, threads: int) -> Iterator[Tree]:
        at_client, overwritten = self._at_client(call, ids)

        def checked(i: int) -> Tree:
            result = at_client(i)
            if overwritten():
                raise _writes_in_place(call, ids[i])
            return result

        done = 0
        try:
            for result in in_threads(checked, len(ids), threads, ahead=lambda result: _within(LARGE, result)):
                done += 1
                yield result
        except Exception:
            if overwritten():  # by this client or by one beside it: in turn it is seen which
                for _ in self._in_turn(call, ids[done:]):
                    pass
            raise

    def _at_client(self, call: Call, ids: Tensor) -> tuple[Callable[[int], Tree], Callable[[], bool]]:
        """The result of the i-th client as a function; and whether a client has written into what all are given, which
        is a copy: a refused work leaves no trace in the method's state."""
        sent, fill = _split(call.shared)
        private = None if call.memory is None else call.memory.payload
        keys = call.draw.client(ids).key
        given = {j: self._copied(v, 1)[0] for j, v in enumerate(sent) if isinstance(v, Tensor)}

        def at_client(i: int) -> Tree:
            client = int(ids[i])
            shard = Shard(
                self.task,
                self._with_masks(self.train.client(client), keys[i]),
                None if self.valid is None else self.valid.client(client),
            )
            own = {j: v.of(ids[i]).clone() for j, v in enumerate(sent) if isinstance(v, Each)}
            both = given | own
            mine = fill([both[j] for j in range(len(sent))])
            private_row = mapped(torch.clone, row(private, client))
            with explained(call, f"client {client}"), _unwritten([own, private_row], call, ids[i]):
                return call.work(shard, mine, private_row, call.static, Draw(keys[i]))

        columns = [part.columns for part in (self.train, self.valid) if part is not None]
        return at_client, _watched([given, columns])


@contextmanager
def explained(call: Call, holder: str) -> Iterator[None]:
    """Errors inside of a work name it, its phase and its client."""
    try:
        yield
    except CoterieError:
        raise
    except Exception as error:
        raise WorkError(f"{_named(call)} fails at {holder}: {gist(error)}") from error


def _watched(tree: Tree) -> Callable[[], bool]:
    """Whether somebody has written into these tensors since; inference tensors are not watched."""
    known = [TensorVersion.of(tensor) for tensor in tensors(tree) if not tensor.is_inference()]
    return lambda: not all(tensor.unchanged for tensor in known)


@contextmanager
def _unwritten(tree: Tree, call: Call, holder: str | Tensor) -> Iterator[None]:
    """A work that writes into these tensors is refused, in every mode: what it is given is a copy or not, by mode."""
    overwritten = _watched(tree)
    yield
    if overwritten():
        raise _writes_in_place(call, holder)


def _writes_in_place(call: Call, holder: str | Tensor) -> WorkError:
    """The error of the target or of some clients, of which the first is named."""
    who = holder if isinstance(holder, str) else f"client {int(holder.flatten()[0])}"
    return WorkError(
        f"{_named(call)} writes in place into what it is given ({who}), which others use too; "
        "make a new tensor, for example x = x + step instead of x += step."
    )


def _within(limit: int, result: Tree) -> int:
    """How many such results are no larger than the limit, one at least."""
    return max(1, limit // max(1, size_of(result).bytes))


def _named(call: Call) -> str:
    phase = getattr(call.draw, "label", "")
    when = f" in round {call.round}" if call.round else ""
    return f"the work {name_of(call.work)}{f' (phase {phase})' if phase else ''}{when}"


class _Copies:
    """Shared values, one copy per client. A method asks several questions at one point, and clients come in chunks, so
    the last copies are remembered."""

    def __init__(self) -> None:
        self._memo = TensorMemo(LARGE)

    def of(self, value: Tensor, count: int) -> Tensor:
        """[count, …], each row the value."""
        known = self._memo.take(lambda operands, rows: operands[0].is_still(value) and len(rows) == count)
        copies = value.repeat(count, *[1] * value.dim()) if known is None else known
        self._memo.add((value,), copies)
        return copies


_Span = tuple[Tensor, Tensor, tuple[Tensor, ...]]


def _split(shared: Tree) -> tuple[list[Tensor | Each], Callable[[list[Tensor]], Tree]]:
    """What is sent, without what is plain data; the function puts one client's values back in place."""
    leaves, structure = tree_flatten(shared)

    def fill(mine: list[Tensor]) -> Tree:
        supply = iter(mine)
        return tree_unflatten([next(supply) if isinstance(leaf, Tensor | Each) else leaf for leaf in leaves], structure)

    return [leaf for leaf in leaves if isinstance(leaf, Tensor | Each)], fill


def faster_mode(engine: LocalEngine, call: Call, *, sample: int = 8, margin: float = 1.1) -> Mode:
    """Which mode runs a typical work faster, by a short measurement; ties go to vmap.

    The answer is kept in the resolved configuration, so that a resumed run does not measure again.

    Args:
        engine: the engine, in any mode.
        call: a typical call of a work.
        sample: how many clients are timed.
        margin: how many times faster one client after the other must be to be chosen.
    """
    ids = torch.arange(min(sample, len(engine.train)), device=engine.sizes.device)
    # other load on the machine stretches the time on the wall, but threads and other devices are seen there only
    alone = torch.get_num_threads() == 1 and engine.sizes.device.type == "cpu"
    clock = process_time if alone else perf_counter
    trials = {mode: replace(engine, mode=mode) for mode in ("vmap", "sequential")}
    best = {mode: _seconds(trial, call, ids, clock) for mode, trial in trials.items()}
    if min(best.values()) < LONG:  # else warming caches up was a small part of it
        for turn in range(3):
            for mode, trial in trials.items():  # the best is the least disturbed
                took = _seconds(trial, call, ids, clock)
                best[mode] = took if turn == 0 else min(best[mode], took)
    return "sequential" if best["sequential"] * margin < best["vmap"] else "vmap"


def _seconds(engine: LocalEngine, call: Call, ids: Tensor, clock: Callable[[], float]) -> float:
    start = clock()
    list(engine.execute(call, ids))
    return clock() - start
