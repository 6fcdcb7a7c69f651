"""`coterie run --engine ray`: processes on this machine, started and ended here, or an existing cluster.

Ray is imported inside functions: whether it listens on loopback only is decided by the environment when it is imported.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie import machine
from coterie.consent import check_address
from coterie.engines.follow import stderr_logger
from coterie.engines.lifetime import Lifetime, end_left_over
from coterie.engines.ray.group import group_spec
from coterie.errors import UsageError
from coterie.experiment import run as experiment
from coterie.experiment.build import Network, federate
from coterie.experiment.config import Config, EngineTable
from coterie.experiment.records import check
from coterie.experiment.run import Watch
from coterie.problems.base import Problem

if TYPE_CHECKING:
    from coterie.engines.ray.transport import RayTransport

MEMORY = "clients"  # the folder of client memory in a result folder
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # lost actors are reported by their calls; its own lines would spoil the display
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray warns of its own future otherwise
}
ALONE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only, on every system
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # they are the work, not something beside it
}

QUIETLY: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
ROOM = 32  # characters for the folder: Ray's sockets below it may have names of 107, on some systems 103


def launch(
    config: Config, folder: Path, watch: Watch, *, force: bool, resume: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Run or resume a configuration on Ray; the summary."""
    machine.require(config.run.portable)  # before a cluster is started
    if not resume:
        check(folder, force=force)
    if left := end_left_over():
        stderr_logger(options)(left)
    if config.run.threads == "auto":  # the cores are the actors'
        config = config.with_run(threads=1)
    with cluster(config.engine), network(folder / MEMORY) as make:
        if resume:
            return experiment.resume(folder, watch, network=make)
        return experiment.run(config, folder, watch, force=force, network=make)


@contextmanager
def cluster(table: EngineTable) -> Iterator[None]:
    """A cluster, started here or joined; left or ended at the end, whatever happens. One that is there is used."""
    alone = table.address is None
    if table.address is not None:
        check_address(table.address, "engine.address")
    fresh = alone and "ray" not in sys.modules  # a program that has imported Ray has set it up itself
    private = {**ALONE, "RAY_AUTH_TOKEN": secrets.token_hex(32)} if fresh else {}
    for name, value in {**QUIET, **private}.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        yield
        return
    with ExitStack() as stack:
        if alone:
            life = stack.enter_context(Lifetime("ray"))
            stack.callback(ray.shutdown)
            _start(table.workers or machine.cores(), life)
        else:
            stack.callback(ray.shutdown)
            _join(str(table.address))
        yield


def _start(cores: int, life: Lifetime) -> None:
    """Start a cluster on this machine; its files are in the deployment's folder where names of sockets fit."""
    import ray

    folder = {"_temp_dir": str(life.folder)} if len(str(life.folder)) < ROOM else {}
    with life.inherited():
        ray.init("local", num_cpus=cores, include_dashboard=False, **QUIETLY, **folder)
    life.note()


def _join(address: str) -> None:
    """Join an existing cluster."""
    import ray

    try:
        ray.init(address, **QUIETLY)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"there is no Ray cluster at engine.address = {address} ({str(error).splitlines()[0][:120]}); "
            "start one with: ray start --head --disable-usage-stats."
        ) from None


@contextmanager
def network(memory: Path | None) -> Iterator[Network]:
    """What makes the actors of a problem; at the end, and before the next ones are made, they are ended."""
    made: list[RayTransport] = []

    def make(config: Config, problem: Problem) -> "RayTransport":
        while made:
            made.pop().close()
        made.append(actors(config, problem, memory))
        return made[0]

    try:
        yield make
    finally:
        for transport in made:
            transport.close()


def actors(config: Config, problem: Problem, memory: Path | None) -> "RayTransport":
    """One actor per group of clients, with mode and chunk as the local engine would choose them."""
    import ray

    from coterie.engines.ray.transport import RayTransport

    _, chosen = federate(problem, config.federation)
    cores = int(ray.cluster_resources().get("CPU", 1))
    if (config.engine.workers or 1) > cores:
        raise UsageError(
            f"engine.workers = {config.engine.workers} exceeds the {cores} cores of the cluster; lower it."
        )
    workers = config.engine.workers or cores
    if config.federation.chunk == "auto":
        chosen["chunk"] = min(chosen["chunk"], -(-problem.clients // workers))
    at, threads = config.federation.target, 1 if config.run.threads == "auto" else config.run.threads
    specs = [
        group_spec(problem, group, at_target=at in group, threads=threads, **chosen)
        for group in groups(problem.clients, chosen["chunk"], workers)
    ]
    code = tuple(dict.fromkeys(plugin.module for plugin in config.plugged_in()))
    return RayTransport(specs, memory=memory, patience=config.federation.patience, chosen=chosen, code=code)


def groups(clients: int, chunk: int, workers: int) -> list[range]:
    """Consecutive clients, cut between chunks so that these are the local engine's; nobody is alone in a group."""
    chunk = max(chunk, 2)  # a lone client's rows would be multiplied in another order than those of several
    chunks = -(-clients // chunk)
    workers = min(workers, chunks)
    cuts = [min(clients, chunk * (i * chunks // workers)) for i in range(workers)] + [clients]
    if workers > 1 and cuts[-1] - cuts[-2] < 2:
        cuts.pop(-2)
    return [range(first, last) for first, last in pairwise(cuts)]
