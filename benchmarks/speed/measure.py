"""Timing of sides that do the same thing: they must agree first, then they alternate, and medians are compared.

Other load on the machine hits all sides alike when they take turns, but it stretches the time on the wall. What a
side costs is processor time, of all threads of this process, and ratios are of that. Several threads save time on the
wall alone, so there ratios are of the wall. Both are reported. A short side is run several times a turn, after
one that is not counted: rounds follow each other in a run, and caches are not full of what other sides left there.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter, process_time
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

Side = Callable[[], Tensor]
Clock = Literal["cpu", "wall"]


class Reading(NamedTuple):
    """A result, and the seconds that it took: of processors, and on the wall."""

    result: Tensor
    cpu: float
    wall: float


SHORT = 0.02  # seconds that the counted calls of a turn take together, at least
OURS, PLAIN, LOOP, LIMIT, JAX = "coterie", "coterie, plain", "loop", "limit", "jax"


@dataclass(frozen=True)
class Workload:
    """Sides by name, ours among them; the least ratio to ours that is wanted of a side; and peers that are absent."""

    name: str
    what: str
    sides: Mapping[str, Side]
    wanted: Mapping[str, float] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    once: Mapping[str, Callable[[], Reading]] = field(default_factory=dict)  # sides that take their time themselves
    share: tuple[Side, int] | None = None  # a part of the limit, and how many of it the limit is, to count operations
    tolerance: float = 1e-4  # of the largest difference to ours, relative to how far the result is from 0


def measure(workload: Workload, repeats: int, rate: float, clock: Clock = "cpu") -> dict[str, Any]:
    """Medians in milliseconds and ratios to ours by that clock; `rate` is what this machine multiplies a second.

    The first pass is where the sides must agree. It warms them up, and counts only if no two passes follow.
    """
    cpu: dict[str, list[float]] = {name: [] for name in workload.sides}
    wall: dict[str, list[float]] = {name: [] for name in workload.sides}
    differences: dict[str, float] = {}
    readings: dict[str, Reading] = {}
    for turn in range(repeats):
        results = {}
        for name, side in workload.sides.items():
            reading = timed(side)
            results[name] = reading.result
            cpu[name].append(reading.cpu)
            wall[name].append(reading.wall)
        if turn == 0:
            readings = {name: read() for name, read in workload.once.items()}
            results |= {name: reading.result for name, reading in readings.items()}
            differences = agreed(workload, results)
    warm = slice(1 if repeats > 2 else 0, None)
    medians = {
        name: {"cpu": statistics.median(cpu[name][warm]), "wall": statistics.median(wall[name][warm])}
        for name in workload.sides
    }
    medians |= {name: {"cpu": reading.cpu, "wall": reading.wall} for name, reading in readings.items()}
    sides = {
        name: {
            "cpu_ms": 1e3 * took["cpu"],
            "wall_ms": 1e3 * took["wall"],
            "ratio": took[clock] / medians[OURS][clock],
            "difference": differences[name],
        }
        for name, took in medians.items()
    }
    part, times = workload.share or (workload.sides.get(LIMIT), 1)
    flops = None if part is None else times * counted(part)
    return {
        "workload": workload.name,
        "what": workload.what,
        "repeats": repeats,
        "ratio_of": clock,
        "sides": sides,
        "wanted": dict(workload.wanted),
        "absent": dict(workload.absent),
        "matmul_gflop": None if flops is None else flops / 1e9,
        "matmul_bound_ms": None if flops is None else 1e3 * flops / rate,
    }


def without(workload: Workload, names: Collection[str]) -> Workload:
    """The workload without some sides; ours stays."""

    def kept(table: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in table.items() if name == OURS or name not in names}

    return replace(workload, sides=kept(workload.sides), absent=kept(workload.absent), once=kept(workload.once))


def timed(side: Side) -> Reading:
    """One call, or the mean of as many as fill a turn."""
    reading = _calls(side, 1)
    if reading.wall >= SHORT:
        return reading
    return _calls(side, math.ceil(SHORT / max(reading.wall, 1e-4)))


def _calls(side: Side, count: int) -> Reading:
    began, used = perf_counter(), process_time()
    for _ in range(count):
        result = side()
    return Reading(result, (process_time() - used) / count, (perf_counter() - began) / count)


def agreed(workload: Workload, results: Mapping[str, Tensor]) -> dict[str, float]:
    """Each side's largest difference to ours, relative to the largest entry; more than the tolerance is an error."""
    ours = results[OURS]
    differences = {name: float((result - ours).abs().max() / ours.abs().max()) for name, result in results.items()}
    for name, difference in differences.items():
        if not difference <= workload.tolerance:
            raise SystemExit(
                f"{workload.name}: {name} differs from coterie by {difference:.2g} of the largest entry, more than "
                f"{workload.tolerance:g}; a comparison of times would mean nothing"
            )
    return differences


def counted(side: Side) -> int:
    """Operations of the matrix products and convolutions of a side."""
    with FlopCounterMode(display=False) as counter:
        side()
    return int(counter.get_total_flops())


def matmul_rate(n: int = 768, repeats: int = 5) -> float:
    """Operations a second of a large float32 matrix product, the best of some."""
    a, b = torch.ones(n, n), torch.ones(n, n)
    best = float("inf")
    for _ in range(repeats):
        used = process_time()
        torch.mm(a, b)
        best = min(best, process_time() - used)
    return 2.0 * n**3 / best


def table(results: list[dict[str, Any]]) -> str:
    """What was measured, for people."""
    lines = [f"{'':4} {'side':20} {'CPU ms':>10} {'wall ms':>10} {'ratio':>8}  wanted"]
    for result in results:
        lines.append(f"{result['workload']:4} {result['what']}")
        for name, side in result["sides"].items():
            wanted = result["wanted"].get(name)
            verdict = "" if wanted is None else _verdict(side["ratio"], wanted)
            lines.append(
                f"{'':4} {name:20} {side['cpu_ms']:10.2f} {side['wall_ms']:10.2f} {side['ratio']:8.2f}  {verdict}"
            )
        if result["matmul_bound_ms"] is not None:
            lines.append(f"{'':4} {'products alone':20} {result['matmul_bound_ms']:10.2f}")
        lines += [f"{'':4} {name}: {why}" for name, why in result["absent"].items()]
    return "\n".join(lines)


def _verdict(ratio: float, wanted: float) -> str:
    return f"≥ {wanted:.3g} {'yes' if ratio >= wanted else 'NO'}"
