"""Clients in several threads: bits, ledger, order and errors are those of one thread."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from queue import Empty
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from coterie.errors import WorkError
from coterie.federation import RESULT, Federation, LocalEngine, groups, pack, work
from coterie.federation.groups import in_threads, seen_by_threads
from coterie.federation.points import counted, touched
from coterie.federation.work import Memory
from coterie.methods.shared.works import gradient, local_sgd
from coterie.numerics import Draw
from coterie.numerics.compiled import Workshop
from coterie.numerics.memo import TensorMemo
from coterie.problems.models import FlatModel
from coterie.problems.models.probing import probe
from coterie.problems.tasks.supervised import Supervised

DRAW = Draw.of(3)
IMAGE = (1, 8, 8)
SIZES = (6, 3, 9, 5, 12, 4, 7)


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def network(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "dropout":
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        if name == "attention":
            layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)
            return nn.Sequential(nn.Flatten(1, 2), layer, nn.Flatten(), nn.Linear(64, 3))
        norm = [nn.BatchNorm2d(4)] if name == "batch norm" else []
        return nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), *norm, nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)),
        )


@pytest.fixture
def federation(shards: Callable[..., Any]) -> Callable[..., Federation]:
    """A federation of unequal shards, client after client."""

    def make(name: str = "convolutions", sizes: tuple[int, ...] = SIZES, **options: Any) -> Federation:
        model = FlatModel(network(name))
        task = Supervised.of(model, "cross_entropy", l2=0.01, classes=3)
        train = pack(shards(sizes, IMAGE))
        probe([model], lambda: task.outputs(model.start, train.client(0).all()))
        return Federation.on(LocalEngine(task, train, None, None, **{"mode": "sequential", **options}))

    return make


@work(update=(RESULT, None))
def remembering(shard, shared, private, static, draw):
    """A gradient step from what the client remembers, which it then remembers instead."""
    batch = shard.train.take(draw.batches(shard.train.count, 4, 1)[0])
    moved = private - 0.1 * shard.task.gradient(shared + private, batch)
    return (moved, shard.train.count), moved


@work(update=RESULT)
def failing(shard, shared, private, static, draw):
    if int(shard.train.count) in static.sizes:
        raise ValueError(f"no luck with {int(shard.train.count)} rows")
    return shard.task.full_gradient(shared, shard.train)


@work(update=RESULT)
def writing(shard, shared, private, static, draw):
    if int(shard.train.count) == static.size:
        shared += 1.0
    return shared.clone()


@work(update=RESULT)
def forgetting(shard, shared, private, static, draw):
    """Returns no memory, though it has some."""
    return shared


@work(update=None)
def who_computes(shard, shared, private, static, draw):
    return torch.tensor([torch.is_grad_enabled(), torch.get_num_threads(), threading.get_ident()])


def asked(fed: Federation) -> list[Any]:
    """What several verbs reply, and the ledger."""
    model = fed.engine.task.model
    memory = Memory.start(torch.zeros(model.size), fed.n)
    mean = fed.mean(local_sgd, model.start, weights=fed.sizes, draw=DRAW, batch=4, steps=3, step=0.1)
    (rows, ids), kept = fed.gather(remembering, model.start, memory=memory, draw=DRAW)
    (average, size), again = fed.mean(remembering, model.start, memory=kept, draw=DRAW.round(1))
    few = fed.sample(count=3, draw=DRAW).gather(gradient, model.start, draw=DRAW, batch="all")
    found = [mean, *rows, ids, average, size, kept.payload, again.payload, *few]
    return [*(t.tolist() for t in found), fed.ledger.as_dict()]


@pytest.mark.parametrize("name", ["convolutions", "batch norm", "dropout", "attention"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_threads_change_neither_bits_nor_the_ledger(federation, name, chunk):
    with threads(1):
        expected = asked(federation(name, chunk=chunk))
    for number in (2, 3) if chunk is None else (2,):
        with threads(number):
            assert asked(federation(name, chunk=chunk)) == expected


@pytest.mark.parametrize("sizes", [SIZES, (5,) * 7], ids=["unequal", "equal"])
def test_chunks_in_threads_change_neither_bits_nor_the_ledger(federation, sizes):
    with threads(1):
        expected = asked(federation("dropout", sizes, mode="vmap", chunk=6))
    with threads(2):
        fed = federation("dropout", sizes, mode="vmap", chunk=6)
        assert fed.engine._threaded_chunks(2)
        assert asked(fed) == expected


def test_the_client_that_fails_in_a_chunk_of_a_thread_is_named(federation):
    found = []
    for number in (1, 2):
        with threads(number):
            fed = federation(mode="vmap", chunk=6)
            found.append(error_of(fed, failing, fed.task.model.start, sizes=[3, 4]))
    assert "client 1: ValueError" in found[0][0]
    assert found[1] == found[0]


def test_large_results_are_handed_on_before_the_last_is_there(federation, monkeypatch):
    monkeypatch.setattr("coterie.federation.local.LARGE", 1)
    with threads(1):
        expected = asked(federation())
    with threads(2):
        assert asked(federation()) == expected


def error_of(fed: Federation, function: Any, shared: Tensor, **static: Any) -> tuple[str, dict[str, Any]]:
    with pytest.raises(WorkError) as caught:
        fed.gather(function, shared, draw=DRAW, **static)
    return str(caught.value), fed.ledger.as_dict()


@pytest.mark.parametrize("chunk", [None, 2])
def test_the_first_client_that_fails_is_named(federation, chunk):
    found = []
    for number in (1, 2, 3):
        with threads(number):
            fed = federation(chunk=chunk)
            found.append(error_of(fed, failing, fed.task.model.start, sizes=[5, 4]))
    assert "client 3: ValueError: no luck with 5 rows" in found[0][0]
    assert found[1:] == found[:1] * 2


def test_the_client_that_writes_in_place_is_named(federation):
    found = []
    for number in (1, 3):
        with threads(number):
            found.append(error_of(federation(), writing, torch.zeros(1 << 12), size=9)[0])
    assert "writes in place" in found[0]
    assert "(client 2)" in found[0]
    assert found[1] == found[0]


def test_threads_compute_as_the_caller_does_and_leave_its_settings(federation):
    with threads(2):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                rows = federation().gather(who_computes, torch.zeros(1), draw=DRAW).rows
            assert rows[:, 0].tolist() == [grad] * len(SIZES)
            assert set(rows[:, 1].tolist()) == {1}
            assert threading.get_ident() not in rows[:, 2].tolist()
        fresh: list[int] = []
        thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert [torch.get_num_threads(), *fresh] == [2, 2]


def test_where_there_are_fewer_clients_than_threads_each_has_all(federation):
    with threads(len(SIZES) + 1):
        rows = federation().gather(who_computes, torch.zeros(1), draw=DRAW).rows
    assert set(rows[:, 2].tolist()) == {threading.get_ident()}


def test_compiled_derivatives_and_rows_on_disk_are_computed_in_this_thread(federation, monkeypatch):
    fed = federation()
    with threads(2):
        assert fed.engine._threaded(2)
        assert not replace(fed.engine, task=fed.task.compiled(Workshop()))._threaded(2)
        monkeypatch.setattr(type(fed.engine.train), "mapped", True)
        assert not fed.engine._threaded(2)


def test_what_surrounds_a_call_keeps_it_in_its_thread():
    inside: list[bool] = []

    def note(x: Tensor) -> Tensor:
        inside.append(seen_by_threads())
        return x

    assert seen_by_threads()
    torch.func.vmap(note)(torch.zeros(2))
    with FlopCounterMode(display=False):
        note(torch.zeros(2))
    with torch.autocast("cpu"), torch.no_grad():
        note(torch.zeros(2))
    assert inside == [False] * 3
    assert seen_by_threads()


def forever(number: int) -> int:
    """Result 0, and work without end instead of others: it takes rows again and again."""
    while number:
        time.sleep(1e-3)
        touched(1)
    return number


def test_points_are_counted_where_results_are_handed_on():
    def touching(number: int) -> int:
        touched(10**number)
        return number

    results = in_threads(touching, 4, 2, ahead=lambda _: 9)
    seen = []
    for _ in range(4):
        with counted() as points:
            next(results)
        seen.append(points.rows)
    assert seen == [1, 10, 100, 1000]


def test_results_wait_for_the_caller_within_bounds():
    started = count()
    results = in_threads(lambda number: next(started), 100, 2, ahead=lambda _: 1)
    assert next(results) in range(5)
    results.close()
    assert next(started) < 10


def test_threads_end_when_nobody_waits_for_them():
    before = set(threading.enumerate())
    results = in_threads(forever, 5, 2, ahead=lambda _: 1)
    assert next(results) == 0
    results.close()
    assert set(threading.enumerate()) <= before  # a thread of another test may end meanwhile


def test_an_abandoned_work_leaves_what_it_has_entered_in_its_own_thread():
    """An exception from outside would come as soon as it has entered: what it leaves then is left by somebody else."""
    entered, left, busy = [], [], threading.Event()
    enter = partial(time.sleep, 0.2)  # not a function of Python, as the entry into a vmap

    def scoped(number: int) -> None:
        if number == 0:
            busy.wait()
            raise ValueError("no luck")
        entered.append(threading.get_ident())
        busy.set()
        enter()
        try:
            forever(1)
        finally:
            left.append(threading.get_ident())

    with pytest.raises(ValueError, match="no luck"):
        next(in_threads(scoped, 2, 2, ahead=lambda _: 1))
    assert left == entered != []


@pytest.mark.parametrize("mode", ["vmap", "sequential"])
def test_threads_end_with_an_error_of_their_caller(federation, mode):
    before = set(threading.enumerate())
    with threads(2):
        fed = federation(mode=mode, chunk=4)
        memory = Memory.start(torch.zeros(1), fed.n)
        with pytest.raises(ValueError, match="unpack"):
            fed.mean(forgetting, torch.zeros(3), memory=memory, draw=DRAW)
        assert torch.get_num_threads() == 2
        assert set(threading.enumerate()) <= before  # a thread of another test may end meanwhile


def test_an_interruption_ends_the_threads():
    main, before = threading.main_thread().ident, set(threading.enumerate())
    assert main is not None
    assert threading.current_thread() is threading.main_thread()

    def interrupting(number: int) -> int:
        if number == 0:
            signal.pthread_kill(main, signal.SIGINT)
        return forever(1)

    with pytest.raises(KeyboardInterrupt):
        next(in_threads(interrupting, 2, 2, ahead=lambda _: 1))
    assert set(threading.enumerate()) <= before  # a thread of another test may end meanwhile


def test_the_caller_waits_in_parts_so_that_no_signal_is_missed():
    waits = []

    class Late:
        def get(self, timeout):
            waits.append(timeout)
            if len(waits) < 3:
                raise Empty
            return "outcome"

    assert groups._next_of(Late()) == "outcome"
    assert waits == [groups.PATIENCE] * 3


def test_a_memory_is_kept_right_by_several_threads():
    memo = TensorMemo(1000)
    operands = [torch.full((3,), float(i)) for i in range(20)]

    def use(number: int) -> bool:
        for i in range(50):
            x = operands[(number + i) % 20]
            known = memo.take(lambda keys, value, x=x: keys[0].equals(x))
            memo.add((x,), 2.0 * x if known is None else known)
            if known is not None and not torch.equal(known, 2.0 * x):
                return False
        return True

    assert all(in_threads(use, 40, 4, ahead=lambda _: 40))
    assert memo._bytes == sum(entry.bytes for entry in memo._entries) <= 1000
