"""How a FedAvg round grows with clients and with parameters, and how long the command line takes to start.

Every point is measured in a process of its own, so that its peak of memory is its own: above what the bare process
with torch in it takes.
"""

import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed.processes import apart
from benchmarks.speed.scene import ROUND
from coterie.experiment.build import federate
from coterie.experiment.config import FederationTable
from coterie.federation import Stack
from coterie.methods.baselines.fedavg import fedavg
from coterie.problems import Weighting, weighting
from coterie.problems.models import FlatModel, build

CLIENTS = (10, 100, 1_000, 10_000, 100_000)
AGAIN = 10_000  # clients at most whose round is made a second time, in small chunks
FROM = 100  # clients from which growth is fitted: below, the time is that of starting operations
PARAMETERS = (10**3, 10**4, 10**5, 10**6, 10**7)
ROWS, PIXELS = 100, (1, 8, 8)


def problem(clients: int, net: nn.Module) -> Weighting:
    """Clients of 100 rows of noise each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * ROWS, *PIXELS, generator=generator)
    y = torch.randint(0, 10, (clients * ROWS,), generator=generator)
    offsets, counts = ROWS * torch.arange(clients), torch.full((clients,), ROWS)
    return weighting(Stack((x, y), offsets, counts), None, FlatModel(net), "cross_entropy")


def logistic(clients: int) -> Weighting:
    return problem(clients, build("logistic", PIXELS, 10, seed=0))


def perceptron(parameters: int, clients: int = 10) -> Weighting:
    """A hidden layer as wide as it takes to have about so many parameters."""
    width = max(1, (parameters - 10) // 75)
    return problem(clients, nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)))


def round_of(problem: Weighting, steps: int, chunk: int | str) -> Tensor:
    """The model after a FedAvg round of all clients."""
    method = fedavg(local_steps=steps, batch=20)
    fed, _ = federate(problem, FederationTable(mode="vmap", chunk=chunk))
    return method.round(fed.begin(1, ROUND), method.init(problem, fed.n), ROUND).x


def clients_point(clients: int, chunk: int | str = "auto") -> dict[str, Any]:
    return _timed(lambda: logistic(clients), 5, chunk)


def parameters_point(parameters: int) -> dict[str, Any]:
    return _timed(lambda: perceptron(parameters), 1, "auto")


def _timed(make: Callable[[], Weighting], steps: int, chunk: int | str) -> dict[str, Any]:
    one = make()
    round_of(one, 1, chunk)
    began, used = perf_counter(), process_time()
    result = round_of(one, steps, chunk)
    return {
        "cpu_s": process_time() - used,
        "wall_s": perf_counter() - began,
        "peak_mb": _peak_megabytes(),
        "parameters": one.task.model.size,
        "bits": result.view(torch.int32).tolist() if result.numel() < 10_000 else None,
    }


def _peak_megabytes() -> float:
    """Of the whole process, torch included; what getrusage says includes the parent at the time of the start."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1024


def curves(clients: tuple[int, ...] = CLIENTS, parameters: tuple[int, ...] = PARAMETERS) -> dict[str, Any]:
    """Both curves; a large number of clients is run again in small chunks and must give the same bits."""
    by_clients = [{"clients": k, **apart(clients_point, k)} for k in clients]
    known = next(point for point in reversed(by_clients) if point["clients"] <= AGAIN)
    again = apart(clients_point, known["clients"], 97)
    same = again["bits"] == known["bits"]
    by_parameters = [apart(parameters_point, d) for d in parameters]
    for point in (*by_clients, *by_parameters, again):
        point.pop("bits")
    return {
        "clients": by_clients,
        "parameters": by_parameters,
        "exponent": exponent([(point["clients"], point["cpu_s"]) for point in by_clients]),
        "small_chunks": {"clients": known["clients"], "chunk": 97, "identical": same, **again},
    }


def exponent(points: list[tuple[int, float]]) -> float | None:
    """p of seconds ∝ clientsᵖ by least squares in logarithms; None where fewer than two points are large enough."""
    logs = [(math.log(clients), math.log(seconds)) for clients, seconds in points if clients >= FROM]
    if len(logs) < 2:
        return None
    x, y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    return sum((a - x) * (b - y) for a, b in logs) / sum((a - x) ** 2 for a, _ in logs)


def start_up(repeats: int = 3) -> dict[str, float]:
    """Seconds of `coterie --help`, the best of some: of the processor, and on the wall."""
    cpu, wall = [], []
    for _ in range(repeats):
        before, began = os.times(), perf_counter()
        subprocess.run([sys.executable, "-m", "coterie", "--help"], check=True, capture_output=True)
        after = os.times()
        cpu.append(after.children_user - before.children_user + after.children_system - before.children_system)
        wall.append(perf_counter() - began)
    return {"cpu_s": min(cpu), "wall_s": min(wall)}


def text(found: dict[str, Any]) -> str:
    """The curves, for people."""
    lines = [f"{'':12} {'CPU s':>8} {'wall s':>8} {'peak MB':>8}"]
    rows = [(f"{p['clients']:,} clients", p) for p in found["clients"]]
    rows += [(f"d = {p['parameters']:,}", p) for p in found["parameters"]]
    lines += [f"{name:14} {p['cpu_s']:8.3f} {p['wall_s']:8.3f} {p['peak_mb']:8.0f}" for name, p in rows]
    if found["exponent"] is not None:
        lines.append(
            f"processor time grows with clients to the power of {found['exponent']:.2f}, from {FROM} clients on"
        )
    small = found["small_chunks"]
    lines.append(
        f"{small['clients']:,} clients in chunks of {small['chunk']}: {small['cpu_s']:.3f} CPU s, "
        f"{small['peak_mb']:.0f} MB, {'the same bits' if small['identical'] else 'OTHER BITS'}"
    )
    return "\n".join(lines)
