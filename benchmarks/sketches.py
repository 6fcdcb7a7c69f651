"""Sketches and FedSep: speed and memory.

    python -m benchmarks.sketches speed
    python -m benchmarks.sketches memory --data digits

`speed` compares products with the fast sketches and with the dense one within one run: the sides alternate, medians
count. `memory` runs FedSep with p = 20000 and reports the peak memory of its process. Figure 2 of the paper is
`coterie reproduce fedsep-figure2`.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from coterie.numerics.sketches import Gaussian, Hadamard, Sketch, SparseSign

LIMIT = 4 << 30


def product(S: Sketch, v: Tensor) -> Callable[[], Tensor]:
    """One apply and one adjoint, for a batch of vectors."""
    return lambda: S.adjoint(S.apply(v))


def speed(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    p, d = options.size, options.dimension
    v = torch.randn(options.clients, d, generator=torch.Generator().manual_seed(0))
    sides: dict[str, Sketch] = {
        "hadamard": Hadamard(p, d),
        "sign, 4 entries a column": SparseSign(p, d),
        "sign, 1 entry a column": SparseSign(p, d, nonzeros=1),
        "gaussian, kept whole": Gaussian(p, d, kept=1 << 40),
        "gaussian, made anew": Gaussian(p, d, kept=0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for S in sides.values():
        S.apply(v)  # to warm up, and to make what is kept
    for repeat in range(options.repeats):
        for name, S in sides.items():
            if name == "gaussian, made anew" and repeat:
                continue  # it takes minutes and varies little
            run, start = product(S, v), perf_counter()
            run()
            seconds[name].append(perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"SᵀSv, d = {d}, p = {p}, {options.clients} vectors at once, one thread, float32\n")
    print("| sketch | ms | times faster than dense, kept | than dense, made anew |\n|---|---|---|---|")
    for name, median in medians.items():
        kept, anew = (medians[f"gaussian, {how}"] / median for how in ("kept whole", "made anew"))
        print(f"| {name} | {1e3 * median:.2f} | {kept:.1f} | {anew:.0f} |")
    ratio = medians["gaussian, made anew"] / medians["hadamard"]
    print(f"\nhadamard is {ratio:.0f} times faster than a dense sketch in bounded memory (at least 20 wanted)")
    write(options.json, {"size": p, "dimension": d, "clients": options.clients, "seconds": medians})


def memory(options: argparse.Namespace) -> None:
    """FedSep with a large sketch, in a process of its own."""
    values = [f"problem.data={options.data}", f"method.size={options.size}", f"method.sketch={options.sketch}"]
    values += ["run.threads=1", "method.decode_steps=2", "method.encode_steps=2", "federation.mode=sequential"]
    command = ["run", "--problem", "sketch", "--method", "fedsep", "--rounds", str(options.rounds), "--force"]
    start = perf_counter()
    said = coterie([*command, "--out", str(options.out)], values)
    if said:
        raise SystemExit(said)
    peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    moved = json.loads((options.out / "ledger.json").read_text())["total"]
    print(
        f"fedsep on {options.data}, p = {options.size}, {options.sketch}, {options.rounds} rounds: "
        f"peak {peak / 2**30:.2f} GiB (limit 4), {perf_counter() - start:.0f} s, {moved['bytes_up']} bytes up"
    )
    write(options.json, {"data": options.data, "size": options.size, "sketch": options.sketch, "peak_bytes": peak})
    if peak > LIMIT:
        raise SystemExit("above 4 GiB")


def coterie(command: list[str], values: list[str]) -> str:
    """What went wrong, if anything."""
    words = [word for value in values for word in ("--set", value)]
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *command, *words, "--json"], capture_output=True, text=True, check=False
    )
    return done.stderr.strip() if done.returncode else ""


def write(path: Path | None, content: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sketches", description=__doc__)
    parts = parser.add_subparsers(required=True)
    fast = parts.add_parser("speed")
    fast.set_defaults(go=speed)
    fast.add_argument("--size", type=int, default=2000)
    fast.add_argument("--dimension", type=int, default=100_000)
    fast.add_argument("--clients", type=int, default=1)
    fast.add_argument("--repeats", type=int, default=11)
    fast.add_argument("--json", type=Path)
    large = parts.add_parser("memory")
    large.set_defaults(go=memory)
    large.add_argument("--size", type=int, default=20_000)
    large.add_argument("--data", default="digits")
    large.add_argument("--sketch", default="hadamard")
    large.add_argument("--rounds", type=int, default=2)
    large.add_argument("--out", type=Path, default=Path("runs/memory"))
    large.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.go(options)


if __name__ == "__main__":
    main()
