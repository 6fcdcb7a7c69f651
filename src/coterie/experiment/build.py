"""From a configuration to live objects: problem, method, federation; misfits are explained before the first round."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from coterie.errors import UsageError
from coterie.experiment.config import Config, FederationTable
from coterie.federation import (
    Attack,
    Attacked,
    Call,
    Federation,
    LocalEngine,
    Participation,
    Screening,
    Static,
    faster_mode,
)
from coterie.federation.channel import Compression
from coterie.methods import Method
from coterie.methods.compressed import compressed
from coterie.methods.registry import METHODS, method_entry
from coterie.methods.works import gradient
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.registry import problem_entry
from coterie.problems.task import Supervised

MEGABYTE = 1 << 20
SMALL_WORK = 64 * MEGABYTE
TYPICAL_BATCH = 32
IN_WORDS = {"everyone": "validation rows of every client (problem.everyone=true; in Python, validation=[…])"}


class Parts(NamedTuple):
    """A run's live objects, and the configuration with everything that was chosen by measurement written in."""

    config: Config
    problem: Any
    method: Method
    fed: Federation


def assemble(config: Config) -> Parts:
    """Build what a configuration describes."""
    device = checked_device(config.run.device, config.run.dtype)
    dtype = getattr(torch, config.run.dtype)
    context = Context(config.run.seed, dtype, device)
    problem = problem_entry(config.run.problem).make(context, **config.problem)
    if config.run.compile:
        problem = compiled(problem, config.run.problem)
    method = method_entry(config.run.method).make(**config.method)
    check_needs(method, problem, config.run.problem)
    for name in config.run.baselines or []:  # now, not when the run is over
        check_needs(method_entry(name).make(**config.for_baseline(name).method), problem, config.run.problem)
    threads = config.run.threads if config.run.threads != "auto" else _threads(problem)
    with using_threads(threads):
        fed, chosen = federate(problem, config.federation)
    if config.federation.compress != "none":
        table = config.federation
        method = compressed(method, fed, Compression(config.federation.compress, table.ratio, table.feedback))
    method.init(problem, fed.n)  # settings that do not fit the problem are refused before a folder is touched
    return Parts(config.with_run(threads=threads).with_federation(**chosen), problem, method, fed)


def compiled(problem: Any, name: str) -> Any:
    """The same problem with its derivatives compiled."""
    if not isinstance(problem.task, Supervised):
        raise UsageError(f"run.compile works for problems with a network and a loss by row; {name} is none of them.")
    task = problem.task.compiled()
    target = None if problem.target is None else replace(problem.target, task=task)
    return replace(problem, task=task, target=target)


@contextmanager
def using_threads(count: int | Literal["auto"]) -> Iterator[None]:
    """So many threads inside, as before outside."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count == "auto" else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _threads(problem: Any) -> int:
    """One thread where all clients together are little work: more would only wait for each other.

    A rule, not a measurement, because sums may depend on it in the last bit and two runs must agree.
    """
    work = problem.clients * problem.task.footprint(problem.train.client(0), problem.train.capacity)
    return 1 if work < SMALL_WORK else torch.get_num_threads()


def federate(problem: Any, table: FederationTable) -> tuple[Federation, dict[str, Any]]:
    """The local federation of a problem, and the mode and chunk that were chosen for it."""
    target = problem.target
    if table.target != "server" and table.target >= problem.clients:
        raise UsageError(
            f"federation.target is client {table.target}, but there are clients 0 … {problem.clients - 1} only."
        )
    if table.count is not None and table.count > problem.clients:
        raise UsageError(f"federation.count = {table.count} exceeds the {problem.clients} clients; lower it.")
    chunk = table.chunk if table.chunk != "auto" else _chunk(problem, table.memory)
    engine = LocalEngine(problem.task, problem.train, problem.valid, target, chunk=chunk)
    mode = table.mode if table.mode != "auto" else _mode(problem, engine)
    engine = LocalEngine(problem.task, problem.train, problem.valid, target, mode=mode, chunk=chunk)
    attack: Attack | None = getattr(problem, "attack", None)
    fed = Federation.on(
        engine if attack is None or not attack.on_uploads else Attacked(engine, attack),
        participation=Participation(table.active, table.count),
        screening=Screening(table.norm, table.clip),
        target=table.target,
    )
    return fed, {"mode": mode, "chunk": chunk}


def check_needs(method: Method, problem: Any, problem_name: str) -> None:
    """Refuse a method whose needs the problem does not offer, and say which methods fit."""
    if method.fits(problem.offers):
        return
    missing = [IN_WORDS.get(need, need) for need in sorted(method.needs - problem.offers)]
    fitting = [e.name for e in METHODS if e.make().fits(problem.offers)]
    offers = ", ".join(sorted(problem.offers))
    raise UsageError(
        f"{method.name} needs {' and '.join(missing)}; problem {problem_name} offers {offers}. "
        f"Methods that fit: {', '.join(fitting) or 'none'}."
    )


def checked_device(name: str, dtype: str) -> str:
    """The device, refused with the reason where it is not there."""
    kind, _, index = name.partition(":")
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if kind not in there or (index and not index.isdecimal()):
        raise UsageError(f"run.device {name!r} is none of cpu, cuda, cuda:N, mps.")
    if int(index or 0) >= there[kind]:
        raise UsageError(f"run.device {name} is not available here; set run.device=cpu.")
    if kind == "mps" and dtype == "float64":
        raise UsageError("run.device mps has no float64; set run.dtype=float32 or run.device=cpu.")
    return name


def _chunk(problem: Any, megabytes: int) -> int:
    """As many clients at once as the memory budget allows."""
    each = problem.task.footprint(problem.train.client(0), problem.train.capacity)
    return max(1, min(problem.clients, megabytes * MEGABYTE // max(1, each)))


def _mode(problem: Any, engine: LocalEngine) -> Any:
    """vmap or sequential, by timing a typical gradient."""
    batch = min(TYPICAL_BATCH, int(problem.train.counts.min()))
    draw = Draw.of(0, device=engine.sizes.device)
    return faster_mode(engine, Call(gradient, problem.start, None, Static(batch=batch), draw))
