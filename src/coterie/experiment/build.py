"""From a configuration to live objects: problem, method, federation; misfits are explained before the first round."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import finalize

import torch

from coterie import machine
from coterie.errors import UsageError, clean
from coterie.experiment.config import DECISIVE, Config, FaultsTable, FederationTable, PrivacyTable
from coterie.experiment.config import ONLY_SIMULATED as ONLY_SIMULATED
from coterie.experiment.privacy import noise_name as noise_name
from coterie.experiment.privacy import privacy_stage, statistics_privacy
from coterie.experiment.rehearsal import check_secure, secure_of
from coterie.federation import (
    Call,
    Engine,
    Federation,
    Ledger,
    LocalEngine,
    Participation,
    Screening,
    Stage,
    Static,
    faster_mode,
    staged,
)
from coterie.federation.remote import PERMISSIVE, Names, Node, Policy, RemoteEngine, Store, Transport, node_for
from coterie.federation.remote.messages import NoiseOrder
from coterie.federation.stages.compression import Compression, SiteCompression
from coterie.federation.stages.faults import Faults
from coterie.federation.work import with_recall
from coterie.methods import Method
from coterie.methods.registry import METHODS, learns_weights, method_entry
from coterie.methods.shared.forfeiting import forfeiting
from coterie.methods.shared.staged import with_stages
from coterie.methods.shared.works import gradient
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.base import Problem, measured
from coterie.problems.catalogue.registry import problem_entry

MEGABYTE = 1 << 20
SMALL_WORK = 64 * MEGABYTE
TYPICAL_BATCH = 64
IN_WORDS = {"everyone": "validation rows of every client (problem.everyone=true; in Python, validation=[…])"}


class Parts(NamedTuple):
    """A run's live objects, and the configuration with everything that was chosen by measurement written in."""

    config: Config
    problem: Problem
    method: Method
    fed: Federation


Network = Callable[[Config, Any], Transport]
"""What makes a transport to the nodes of a problem, for engines other than the local one."""


def make_problem(config: Config) -> Any:
    """The problem that a configuration describes."""
    machine.require(config.run.portable)
    device = machine.checked_device(config.run.device, config.run.dtype)
    dtype = getattr(torch, config.run.dtype)
    context = Context(config.run.seed, dtype, device, statistics_privacy(config))
    return problem_entry(config.run.problem).make(context, **config.problem)


def node_of(config: Config, clients: tuple[int, ...], *, folder: Path | None = None) -> Node:
    """The node of some clients of a configured problem, for trying a network out: it keeps their rows alone.

    What clients remember is kept in the folder too, and shown to the server, for its records. The server has all rows
    itself, so the node does whatever it is asked (`PERMISSIVE`).
    """
    problem = make_problem(config)
    target = problem.target if config.federation.target in clients else None
    options: dict[str, Any] = {"store": Store(folder), "shares_memory": True, "policy": PERMISSIVE}
    names = Names().with_modules(*config.modules())
    return node_for(problem, clients, target=target, mode="sequential", names=names, **options)


def build_problem_and_method(config: Config, problem: Problem | None = None) -> tuple[Any, Method]:
    """The problem, unless it is given, and the method of a configuration, which fit each other and the engine."""
    problem = make_problem(config) if problem is None else problem
    method = method_entry(config.run.method).make(**config.method)
    check_needs(method, problem, config.run.problem)
    check_schedules(method, config.run.rounds)
    for name in config.run.baselines or []:  # now, not when the run is over
        check_needs(method_entry(name).make(**config.for_baseline(name).method), problem, config.run.problem)
    if config.run.engine != "local":
        check_deployable(config, method, problem)
        _check_table(problem, config.federation)
        method.init(problem, problem.clients)  # before anything is started
        check_secure(config, method, problem)
    return problem, method


def assemble(config: Config, network: Network | None = None, problem: Problem | None = None) -> Parts:
    """Build what a configuration describes.

    Args:
        config: the configuration.
        network: makes the transport of an engine other than the local one.
        problem: the problem of the configuration, where it was built before.
    """
    problem, method = build_problem_and_method(config, problem)
    threads = config.run.threads if config.run.threads != "auto" else threads_for(problem)
    config = config.with_run(threads=threads)
    if config.run.engine == "local":
        return assemble_locally(config, problem, method)
    if network is None:
        raise UsageError(f"run.engine = {config.run.engine} is started by: coterie run --engine {config.run.engine}.")
    method, table = with_screened_copies(method, config)
    noise = site_noise(config)
    hiding = [] if noise is None else [privacy_stage(method, problem, config)]
    transport = network(config, problem)
    orders: dict[str, Any] = {"noise": noise, "method": config.run.method}
    fed, chosen = federate_remotely(problem, table, transport, run_name(config), config.modules(), **orders)
    fed = replace(fed, engine=staged(fed.engine, *hiding, *site_compression(table)))
    method = with_stages(method, fed.engine)
    method.view(with_recall(method.init(problem, fed.n), getattr(fed.engine, "recall", None)))  # may be refused
    return Parts(config.with_federation(**chosen), problem, method, fed)


def assemble_locally(config: Config, problem: Problem, method: Method) -> Parts:
    """The live objects of a run whose clients are in this process, with everything that the configuration adds:
    screening, privacy, compression and faults.

    Args:
        config: the configuration of the run.
        problem: what is minimised.
        method: how it is trained.
    """
    check_secure(config, method, problem)
    method, table = with_screened_copies(method, config)
    with using_threads(config.run.threads):
        fed, chosen = federate(problem, table)
    fed = with_simulated_stages(fed, method, problem, config)
    method = with_stages(method, fed.engine)
    state = method.init(problem, fed.n)  # settings that do not fit the problem are refused before a folder is touched
    if problem.declares:  # and so are measures of one's own that return no number
        measured(problem, method.view(state))
    return Parts(config.with_federation(**chosen), problem, method, fed)


def with_screened_copies(method: Method, config: Config) -> tuple[Method, FederationTable]:
    """The method and its [federation], with federation.screen_copies settled: on where the method learns weights.

    The configuration itself keeps "auto", because baselines share it.
    """
    wanted = config.federation.screen_copies
    on = method.learns_weights or learns_weights(config.run.method) if wanted == "auto" else wanted
    return forfeiting(method) if on else method, config.federation.model_copy(update={"screen_copies": on})


@contextmanager
def using_threads(count: int | Literal["auto"]) -> Iterator[None]:
    """So many threads inside, as before outside."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count == "auto" else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(problem: Problem) -> int:
    """One thread where all clients together are little work: more would only wait for each other.

    A rule, not a measurement, because sums may depend on it in the last bit and two runs must agree.
    """
    work = problem.clients * problem.task.footprint(problem.train.client(0), problem.train.capacity)
    return 1 if work < SMALL_WORK else torch.get_num_threads()


def check_deployable(config: Config, method: Method, problem: Problem) -> None:
    """Refuse what only a simulation can do, and say why."""
    engine = config.run.engine
    if known := method.needs & ONLY_SIMULATED:
        raise UsageError(
            f"{method.name} knows the {' and '.join(sorted(known))} in advance, which only a simulation can; "
            f"run it with run.engine = local, or choose another method for {engine}."
        )
    attack = problem.attack
    if attack is not None and attack.on_uploads:
        raise UsageError(
            f"problem.attack = {attack.name} alters replies, which nodes on {engine} do not do of their own accord; "
            "use run.engine = local, or attack = label-flip, which alters data."
        )
    if config.privacy != PrivacyTable() and config.run.problem == "files":
        raise UsageError(
            f"[privacy] on {engine} hides updates and not the statistics of columns, which files exchanges before; "
            "leave it out, use a problem without them, or make a study, whose sites agree on them first."
        )
    if config.faults != FaultsTable():
        raise UsageError(f"[faults] are simulated with run.engine = local; {engine} has real ones. Leave them out.")


def site_noise(config: Config) -> NoiseOrder | None:
    """How nodes shall hide updates, by [privacy]; None where it is off."""
    table = config.privacy
    return None if table.clip is None else NoiseOrder(float(table.clip), float(table.noise))


def site_compression(table: FederationTable) -> list[Stage]:
    """How nodes shall compress updates, by [federation]; nothing where it is off."""
    return [] if table.compress == "none" else [SiteCompression(table.compress, table.ratio, table.feedback)]


def run_name(config: Config) -> str:
    """The name by which nodes know a run; a resumed run has the same, whatever was settled by measurement since."""
    return config.digest(DECISIVE)


def federate_remotely(
    problem: Problem,
    table: FederationTable,
    transport: Transport,
    run: str,
    modules: tuple[str, ...] = (),
    *,
    own_rows: bool = False,
    noise: NoiseOrder | None = None,
    method: str = "",
) -> tuple[Federation, dict[str, Any]]:
    """The federation of a problem whose clients are at nodes, connected.

    Args:
        modules: modules of one's own, with works
        noise: how nodes hide updates; None for not at all
        method: the name of the method, which nodes are told
        own_rows: whether the nodes bring rows of their own; else the server knows how many each client has
    """
    _check_table(problem, table)
    engine = RemoteEngine(
        transport,
        problem.task,
        problem.train,
        problem.valid,
        own_sizes=not own_rows and not getattr(transport, "own_rows", False),
        run=run,
        target=problem.target,
        target_at=table.target,
        policy=Policy(table.timeout, table.retries, table.quorum, table.patience),
        names=Names().with_modules(*modules),
        device=problem.start.device,
        noise=noise,
        method=method,
    )
    engine.connect()
    if problem.spent is not None:  # learning how to scale rows has moved something too
        engine.book.ledger = Ledger(problem.spent.by_cause, engine.book.ledger.wire, problem.spent.seen.copy())
    one_by_one = {"mode": "sequential" if table.mode == "auto" else table.mode, "chunk": 1}
    return _federation(engine, table, book=engine.book), getattr(transport, "chosen", None) or one_by_one


def _federation(engine: Engine, table: FederationTable, **more: Any) -> Federation:
    """The federation of an engine with participation, screening and target as configured."""
    clip = None if table.clip == "none" else table.clip
    screening = Screening(table.norm, clip, table.trust, copies=table.screen_copies is True)
    participation = Participation(table.active, table.count)
    options: dict[str, Any] = {"target": table.target, "secure": secure_of(table), **more}
    return Federation.on(engine, participation=participation, screening=screening, **options)


def _check_table(problem: Problem, table: FederationTable) -> None:
    if table.target != "server" and table.target >= problem.clients:
        raise UsageError(
            f"federation.target is client {table.target}, but there are clients 0 … {problem.clients - 1} only."
        )
    if table.count is not None and table.count > problem.clients:
        raise UsageError(f"federation.count = {table.count} exceeds the {problem.clients} clients; lower it.")


def federate(problem: Problem, table: FederationTable) -> tuple[Federation, dict[str, Any]]:
    """The local federation of a problem, and the mode and chunk that were chosen for it."""
    _check_table(problem, table)
    chunk = table.chunk if table.chunk != "auto" else _chunk(problem, table.memory)
    engine = LocalEngine(problem.task, problem.train, problem.valid, problem.target, chunk=chunk)
    alone = _one_by_one(problem)
    if alone is not None and table.mode == "vmap":
        raise UsageError(f"federation.mode = vmap is impossible: {alone}. Leave it at auto, or set sequential.")
    mode = table.mode if table.mode != "auto" else _mode(problem, engine)
    attacks = [problem.attack] if problem.attack is not None and problem.attack.on_uploads else []
    fed = _federation(staged(replace(engine, mode=mode), *attacks), table)
    if alone is not None and table.mode == "auto":
        reason = f"clients are computed one after the other (mode = sequential): {alone}"
        fed.book.events.append({"round": 0, "event": "warning", "reason": clean(reason)})
    if problem.spent is not None:  # learning how to scale its rows has moved something too
        fed.book.ledger = Ledger(problem.spent.by_cause, seen=problem.spent.seen.copy())
    return fed, {"mode": mode, "chunk": chunk}


def with_simulated_stages(fed: Federation, method: Method, problem: Problem, config: Config) -> Federation:
    """The federation with privacy, faults and compression as configured; an attack is there already.

    Sizes that clients declare falsely are noted as events.
    """
    stages: list[Stage] = []
    if config.privacy.clip is not None:
        stages.append(privacy_stage(method, problem, config))
    faults = Faults(**config.faults.model_dump(), seed=config.run.seed)
    if faults.happen:
        stages.append(faults)
        fed.book.events += [{"round": 0, "phase": "sizes", **lie} for lie in faults.lies(fed.engine.sizes)]
    table = config.federation
    if table.compress != "none":
        stages.append(Compression(table.compress, table.ratio, table.feedback))
    return replace(fed, engine=staged(fed.engine, *stages))


def check_schedules(method: Method, rounds: int) -> None:
    """Refuse steps that end before the run does, or that are not positive in some round."""
    for name, plan in method.schedules.items():
        plan.check(f"method.{name}", rounds)


def check_needs(method: Method, problem: Problem, problem_name: str) -> None:
    """Refuse a method whose needs the problem does not offer, and say which methods fit."""
    if method.fits(problem.offers):
        return
    missing = [IN_WORDS.get(need, need) for need in sorted(method.needs - problem.offers)]
    suitable = [e.name for e in METHODS if e.make().fits(problem.offers)]
    offers = ", ".join(sorted(problem.offers))
    lacks_target = "target" in method.needs - problem.offers
    remedy = " Give the target's validation rows (target=… in Python)." if lacks_target else ""
    raise UsageError(
        f"{method.name} needs {' and '.join(missing)}; problem {problem_name} offers {offers}. "
        f"Methods that fit: {', '.join(suitable) or 'none'}.{remedy}"
    )


def _chunk(problem: Problem, megabytes: int) -> int:
    """As many clients at once as the memory budget allows."""
    each = problem.task.footprint(problem.train.client(0), problem.train.capacity)
    return max(1, min(problem.clients, megabytes * MEGABYTE // max(1, each)))


def _one_by_one(problem: Problem) -> str | None:
    """Why the clients of a problem cannot be computed at once, or should not be; None if they can."""
    if problem.train.mapped:
        return "their rows stay on disk"
    task = problem.task
    if not getattr(task, "vmaps", True):
        return f"vmap cannot run the model or the loss ({task.reason})"
    return None


_MODES: dict[int, str] = {}
"""The measured mode of every living problem, by its id: all runs on it agree to the bit."""


def _mode(problem: Problem, engine: LocalEngine) -> Any:
    """vmap or sequential, by timing a typical gradient once per problem; vmap where every machine shall give the same
    bits; sequential where vmap is impossible."""
    if _one_by_one(problem) is not None:
        return "sequential"
    if machine.wanted():
        return "vmap"
    if id(problem) not in _MODES:
        batch = min(TYPICAL_BATCH, int(problem.train.counts.min()))
        draw = Draw.of(0, device=engine.sizes.device)
        _MODES[id(problem)] = faster_mode(engine, Call(gradient, problem.start, None, Static(batch=batch), draw))
        finalize(problem, _MODES.pop, id(problem))
    return _MODES[id(problem)]
