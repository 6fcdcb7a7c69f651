"""The process of a group of clients: a node that starts with its rows, and to which client memory can be restored."""

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.consent import load
from coterie.engines.ray.memory import LIMITS, BundleStore, Bytes, as_array
from coterie.federation.local import LocalEngine, Mode
from coterie.federation.remote import PERMISSIVE, Names, Node
from coterie.federation.remote.node import part_of
from coterie.federation.shards import Rows, Shard, Stack
from coterie.plugins import modules_of
from coterie.problems.base import Problem

Array = NDArray[Any]
LARGE = 100_000  # bytes above which Ray puts what it carries into its store anyway


class GroupSpec(NamedTuple):
    """What an actor starts with. Rows hold arrays for tensors: Ray shares these between processes without a copy."""

    task: Any
    clients: tuple[int, ...]
    train: Any
    valid: Any
    target: tuple[Any, Any] | None
    mode: Mode
    chunk: int
    threads: int


def group_spec(
    problem: Problem, clients: Iterable[int], *, at_target: bool, mode: Mode, chunk: int, threads: int
) -> GroupSpec:
    """The rows of these clients alone, with the engine's mode and chunk."""
    who = tuple(clients)
    train, valid = (_converted(part_of(rows, who), _array) for rows in (problem.train, problem.valid))
    target = None
    if at_target and problem.target is not None:
        target = _converted(problem.target.train, _array), _converted(problem.target.valid, _array)
    return GroupSpec(problem.task, who, train, valid, target, mode, chunk, threads)


class Group:
    """The actor. Ray starts it again after a loss; the transport then gives back what its clients remember.

    Args:
        spec: what it starts with, or a reference to that in a list, which is opened once the plug-ins are there.
        code: the modules and files of plug-ins, which the task may refer to.
    """

    def __init__(self, spec: GroupSpec | list[Any], code: tuple[str, ...] = ()) -> None:
        names = Names().with_modules(*(name for entry in code for name in modules_of(load(entry, "run.engine"))))
        if isinstance(spec, list):
            import ray

            spec = ray.get(spec[0])
        assert isinstance(spec, GroupSpec)
        torch.set_num_threads(spec.threads)
        target = None
        if spec.target is not None:
            target = Shard(spec.task, *(_converted(rows, _tensor) for rows in spec.target))
        train, valid = _converted(spec.train, _tensor), _converted(spec.valid, _tensor)
        engine = LocalEngine(spec.task, train, valid, target, spec.mode, spec.chunk)
        self.store = BundleStore()
        # one owner has the cluster and all rows: the actor does whatever it is asked
        options: dict[str, Any] = {"limits": LIMITS, "store": self.store, "shares_memory": True, "policy": PERMISSIVE}
        self.node = Node(engine, spec.clients, names=names, **options)

    def handle(self, head: bytes, tail: Bytes | None) -> tuple[bytes | Bytes, tuple[str, Bytes] | None, list[str]]:
        """The reply to an order, what clients remember anew, and which bundles of that are still in use."""
        reply = self.node.handle(head if tail is None else b"".join((head, tail.data)))
        news = self.store.news()
        carried = reply if len(reply) < LARGE else as_array(reply)
        return carried, None if news is None else (news[0], as_array(news[1])), self.store.needed()

    def refill(self, bundles: dict[str, Bytes]) -> int:
        """Take back what clients remember; the number of this process, for whoever wants to end it."""
        for name, data in bundles.items():
            self.store.refill(name, data.tobytes(), set(self.node.clients))
        return os.getpid()


def _converted(rows: Stack | Rows | None, convert: Callable[[Any], Any]) -> Any:
    """The same rows with their tensors as arrays, or the other way round."""
    if rows is None:
        return None
    numbers = ("offsets", "counts") if isinstance(rows, Stack) else ("offset", "count")
    columns: Any = tuple(map(convert, rows.columns))
    return replace(rows, columns=columns, **{name: convert(getattr(rows, name)) for name in numbers})


def _array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()


def _tensor(array: Array) -> Tensor:
    with warnings.catch_warnings():
        # rows are only read: works are pure
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(array)
