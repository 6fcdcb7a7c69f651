"""The peer Flower (pip install 'flwr[simulation]'): FedAvg rounds by its simulation runtime, on Ray.

Start-up is not counted: the first round warms the actors up, and the median of the others is taken. A client's rows
lie in a file that is mapped into memory; local steps and averages are those of the plain loop. There are as many nodes
as a round has participants, in favour of Flower. It runs in a process of its own, because Ray leaves threads behind;
work is done by further processes, so time is added up over the whole family.
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
from benchmarks.speed.processes import apart
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
    with TemporaryDirectory() as name:
        folders = [Path(name) / str(t) for t in range(len(rounds))]
        for folder, (start, plan) in zip(folders, rounds, strict=True):
            _save(folder, start, shards, plan)
        found = apart(simulated, folders, len(rounds[0][1]), model, shape, step)
    cpu, wall = (statistics.median(column) for column in zip(*found["seconds"][1:], strict=True))
    return Reading(torch.from_numpy(found["result"]), cpu, wall)


def _save(folder: Path, start: Tensor, shards: Shards, plan: dict[int, Tensor]) -> None:
    """The model from which a round starts, the rows of its participants, and which of them they use."""
    folder.mkdir()
    x, y = (torch.stack(columns) for columns in zip(*(shards[k] for k in plan), strict=True))
    for name, tensor in (("start", start), ("x", x), ("y", y), ("rows", torch.stack(list(plan.values())))):
        np.save(folder / f"{name}.npy", tensor.numpy())


def simulated(folders: list[Path], count: int, model: str, shape: tuple[int, ...], step: float) -> dict[str, Any]:
    """The rounds of these folders with `count` participants: the last result, and by round the seconds it took."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    seconds: list[tuple[float, float]] = []
    results: list[np.ndarray] = []
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Any, context: Any) -> Any:
        at = message.content["model"].to_numpy_ndarrays()[0]
        folder = folders[int(message.content["config"]["round"])]
        moved = local_steps(folder, model, shape, int(context.node_config["partition-id"]), at, step)
        return Message(RecordDict({"model": ArrayRecord([moved])}), reply_to=message)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        while len(nodes := sorted(grid.get_node_ids())) < count:
            pass
        for t, folder in enumerate(folders):
            start = np.load(folder / "start.npy")
            used, began = family_seconds(), perf_counter()
            content = RecordDict({"model": ArrayRecord([start]), "config": ConfigRecord({"round": t})})
            orders = [Message(content, dst_node_id=node, message_type="train") for node in nodes]
            replies = list(grid.send_and_receive(orders))
            rows = [reply.content["model"].to_numpy_ndarrays()[0] for reply in replies]
            results.append(np.mean(rows, axis=0))
            seconds.append((family_seconds() - used, perf_counter() - began))

    config = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=count, backend_config=config)
    return {"result": results[-1], "seconds": seconds}
