"""`make bench`: rounds of coterie beside the same rounds by other code, and how they grow. JSON and a table.

python -m benchmarks [W1 W5 …] [--repeats N] [--threads N] [--quick] [--without SIDE] [--json FILE] [--no-curves]
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed import jax_peer, scaling, workloads
from benchmarks.speed.measure import Clock, Workload, matmul_rate, measure, table, without

WORKLOADS: dict[str, Callable[[bool], Workload]] = {
    "W1": workloads.w1,
    "W1n": partial(workloads.w1, refresh=False),
    "W1o": workloads.w1_outer,
    "W2": workloads.w2,
    "W3": workloads.w3,
    "W4": workloads.w4,
    "W5": workloads.w5,
    "W5b": partial(workloads.w5, pixels=28),
    "W5c": workloads.w5_cnn,
    "W6": workloads.w6,
    "W7": workloads.w7,
}


def machine(threads: int, rate: float) -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "matmul_gflops": round(rate / 1e9, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "jax": jax_peer.version(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Rounds of coterie beside others.")
    parser.add_argument("workloads", nargs="*", metavar="W", help=f"of {', '.join(WORKLOADS)}; all by default")
    parser.add_argument("--repeats", type=int, default=7, help="alternating runs of every side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small sizes: do all sides agree?")
    parser.add_argument("--without", action="append", default=[], metavar="SIDE", help="leave a side out; repeatable")
    parser.add_argument("--no-curves", action="store_true")
    parser.add_argument("--json", type=Path, help="where the figures are written, after every workload")
    options = parser.parse_args(arguments)
    unknown = set(options.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    return options


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = options_of(arguments)
    torch.set_num_threads(options.threads)
    rate = matmul_rate()
    clock: Clock = "cpu" if options.threads == 1 else "wall"
    found: dict[str, Any] = {"machine": machine(options.threads, rate), "workloads": []}
    print(", ".join(f"{what} {value}" for what, value in found["machine"].items()), flush=True)
    for name in options.workloads or WORKLOADS:
        workload = without(WORKLOADS[name](options.quick), options.without)
        result = measure(workload, options.repeats, rate, clock)
        found["workloads"].append(result)
        print(table([result]), flush=True)
        _write(found, options.json)
    if not options.no_curves:
        small = ((10, 20), (10**3,)) if options.quick else (scaling.CLIENTS, scaling.PARAMETERS)
        found["curves"] = scaling.curves(*small)
        found["start_up"] = scaling.start_up(1 if options.quick else 3)
        print(scaling.text(found["curves"]))
        print(
            f"coterie --help: {found['start_up']['cpu_s']:.2f} CPU s, {found['start_up']['wall_s']:.2f} s on the wall"
        )
        _write(found, options.json)
    return found


def _write(found: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
