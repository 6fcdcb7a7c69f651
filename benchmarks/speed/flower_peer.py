"""The peer Flower (pip install 'flwr[simulation]'): FedAvg rounds by its simulation runtime, on Ray.

Start-up is not counted: the first round warms the actors up, and the median of the others is taken. A client's rows
lie in a file that is mapped into memory; local steps and averages are those of the plain loop. There are as many nodes
as a round has participants, in favour of Flower. Work is done by other processes, so their time is added up over the
whole family.
"""

import logging
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.speed import loops
from benchmarks.speed.measure import Reading
from benchmarks.speed.scene import Shards, ordinary

ROUNDS = 3


def missing() -> str | None:
    """Why Flower's simulation cannot be run, if so."""
    try:
        import flwr.simulation  # noqa: F401
        import ray  # noqa: F401
    except ImportError as error:
        return f"not installed ({error}); pip install 'flwr[simulation]'"
    return None


def family_seconds() -> float:
    """Processor time of this process and all that descend from it."""
    parents, seconds = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.parent.name, stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[pid] = rest[1]
        seconds[pid] = (int(rest[11]) + int(rest[12])) / os.sysconf("SC_CLK_TCK")
    total = 0.0
    for pid in seconds:
        ancestor = pid
        while ancestor in parents and ancestor != str(os.getpid()):
            ancestor = parents[ancestor]
        total += seconds[pid] if ancestor == str(os.getpid()) else 0.0
    return total


def local_steps(folder: Path, model: str, shape: tuple[int, ...], k: int, start: np.ndarray, step: float) -> np.ndarray:
    """What participant k of a round does: the plain loop's local steps on its own rows."""
    from coterie.problems.models import build

    torch.set_num_threads(1)
    x, y, rows = (np.load(folder / f"{name}.npy", mmap_mode="r")[k] for name in ("x", "y", "rows"))
    net = ordinary(build(model, shape, 10, seed=0))
    mine = [(torch.from_numpy(x.copy()), torch.from_numpy(y.copy()))]
    return loops.fedavg(net, torch.from_numpy(start.copy()), mine, {0: torch.from_numpy(rows.copy())}, step).numpy()


def reading(
    model: str, shape: tuple[int, ...], shards: Shards, rounds: Sequence[tuple[Tensor, dict[int, Tensor]]], step: float
) -> Reading:
    """Rounds, each from a model of its own over the clients of a plan; the result is that of the last."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    times: list[tuple[float, float]] = []
    results: list[Tensor] = []
    count = len(rounds[0][1])
    with TemporaryDirectory() as folder:
        for t, (_, plan) in enumerate(rounds):
            _save(Path(folder) / str(t), shards, plan)
        client, server = ClientApp(), ServerApp()

        @client.train()
        def train(message: Any, context: Any) -> Any:
            at = message.content["model"].to_numpy_ndarrays()[0]
            files = Path(folder) / str(message.content["config"]["round"])
            moved = local_steps(files, model, shape, int(context.node_config["partition-id"]), at, step)
            return Message(RecordDict({"model": ArrayRecord([moved])}), reply_to=message)

        @server.main()
        def main(grid: Any, context: Any) -> None:
            while len(nodes := sorted(grid.get_node_ids())) < count:
                pass
            for t, (start, _) in enumerate(rounds):
                used, began = family_seconds(), perf_counter()
                content = RecordDict({"model": ArrayRecord([start.numpy()]), "config": ConfigRecord({"round": t})})
                orders = [Message(content, dst_node_id=node, message_type="train") for node in nodes]
                replies = list(grid.send_and_receive(orders))
                rows = [reply.content["model"].to_numpy_ndarrays()[0] for reply in replies]
                results.append(torch.from_numpy(np.mean(rows, axis=0)))
                times.append((family_seconds() - used, perf_counter() - began))

        config = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, client, num_supernodes=count, backend_config=config)
    cpu, wall = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return Reading(results[-1], cpu, wall)


def _save(folder: Path, shards: Shards, plan: dict[int, Tensor]) -> None:
    """The rows of a round's participants, and which of them they use."""
    folder.mkdir()
    x, y = zip(*(shards[k] for k in plan), strict=True)
    for name, arrays in (("x", x), ("y", y), ("rows", tuple(plan.values()))):
        np.save(folder / f"{name}.npy", torch.stack(arrays).numpy())
