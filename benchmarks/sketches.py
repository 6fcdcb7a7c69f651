"""Sketches and FedSep: speed and memory, and Figure 2 of the paper (accuracy against bytes, both directions).

    python -m benchmarks.sketches speed
    python -m benchmarks.sketches memory --data digits
    python -m benchmarks.sketches figure --data mnist --rounds 200 --jobs 2 --out runs/figure2

`speed` compares products with the fast sketches and with the dense one within one run: the sides alternate, medians
count. `memory` runs FedSep with p = 20000 and reports the peak memory of its process. `figure` runs `coterie run` for
every partition, size and method, each in a result folder of its own; finished ones are read, so the command can be
repeated with more. At size p every method sends 4p bytes a client a round up and 4p down (k = p/2 entries with their
indices are as many bytes as p numbers), but `uncompressed` and `top-k, dense down`, which is the usual top-k: it sends
the whole model down. It writes figure2.json, from which docs/images/fedsep.py draws, and prints tables.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.numerics.sketches import Gaussian, Hadamard, Sketch, SparseSign

LIMIT = 4 << 30
DENSE = ["method.sketch=gaussian", "method.decode_steps=6", "method.encode_steps=6"]  # p ≪ d is well conditioned

METHODS: dict[str, Callable[[int], tuple[str, list[str]]]] = {
    "fedsep": lambda p: ("fedsep", [f"method.size={p}"]),
    "fedsep, dense sketch": lambda p: ("fedsep", [f"method.size={p}", *DENSE]),
    "fedsep, server step 1": lambda p: ("fedsep", [f"method.size={p}", "method.server_step=1.0"]),
    "fedsep, lasso": lambda p: ("fedsep", [f"method.size={p}", "method.penalty=0.001"]),
    "fedsep-redraw": lambda p: ("fedsep-redraw", [f"method.size={p}"]),
    "top-k": lambda p: ("top-k", [f"method.k={p // 2}"]),
    "top-k, dense down": lambda p: ("top-k", [f"method.k={p // 2}", 'method.down="dense"']),
    "count-sketch": lambda p: ("count-sketch", [f"method.columns={p}", f"method.k={p // 2}", "method.server_step=0.3"]),
    "uncompressed": lambda p: ("uncompressed", []),
}
FIGURE = ("fedsep", "fedsep-redraw", "top-k", "top-k, dense down", "count-sketch")


class Case(NamedTuple):
    data: str
    partition: str
    size: int  # 0 for uncompressed
    method: str
    seed: int


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


def folder_of(out: Path, case: Case) -> Path:
    name = case.method.replace(", ", "-").replace(" ", "-")
    return out / f"{case.data}-{case.partition}-{case.size}-{name}-{case.seed}"


def run(case: Case, options: argparse.Namespace) -> None:
    folder = folder_of(options.out, case)
    method, values = METHODS[case.method](case.size)
    values = [*values, f"problem.data={case.data}", f"problem.partition={case.partition}"]
    values += [f"run.record={options.record}", f"run.checkpoint={options.record}", "run.threads=1"]
    values += ["run.baselines=[]", "federation.mode=sequential"]
    command = ["run", "--problem", "sketch", "--method", method, "--rounds", str(options.rounds)]
    command += ["--seed", str(case.seed), "--out", str(folder)]
    if (folder / "config.toml").is_file():
        command, values = ["resume", str(folder)], []
    said = coterie(command, values)
    print(folder.name, said or "done", file=sys.stderr, flush=True)


def coterie(command: list[str], values: list[str]) -> str:
    """What went wrong, if anything."""
    words = [word for value in values for word in ("--set", value)]
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *command, *words, "--json"], capture_output=True, text=True, check=False
    )
    return done.stderr.strip() if done.returncode else ""


def line(out: Path, case: Case) -> dict[str, Any] | None:
    """What a run recorded: accuracy and bytes moved, by round."""
    folder = folder_of(out, case)
    if not (folder / "summary.json").is_file():
        return None
    records = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    moved = [r["communication"]["bytes_up"] + r["communication"]["bytes_down"] for r in records]
    return {
        **case._asdict(),
        "outcome": json.loads((folder / "summary.json").read_text())["outcome"],
        "round": [r["round"] for r in records],
        "bytes": moved,
        "accuracy": [r["test_accuracy"] for r in records],
        "seconds": records[-1]["seconds"],
    }


def cell(lines: list[dict[str, Any]]) -> str:
    """The mean of the last recorded accuracies, their spread, and whose runs diverged."""
    if not lines:
        return "–"
    last = [one["accuracy"][-1] for one in lines]
    spread = f" ± {statistics.stdev(last):.3f}" if len(last) > 1 else ""
    gone = sum(one["outcome"] == "diverged" for one in lines)
    return f"{statistics.mean(last):.3f}{spread}" + (f" ({gone} diverged)" if gone else "")


def tables(lines: list[dict[str, Any]], partition: str) -> list[str]:
    here = [one for one in lines if one["partition"] == partition]
    methods = [name for name in METHODS if name != "uncompressed" and any(one["method"] == name for one in here)]
    rows = [f"\n{partition}: test accuracy\n", "| p | MB | " + " | ".join(methods) + " |"]
    rows.append("|---" * (len(methods) + 2) + "|")
    for size in sorted({one["size"] for one in here} - {0}):
        of = {name: [one for one in here if one["size"] == size and one["method"] == name] for name in methods}
        equal = [one["bytes"][-1] for name, some in of.items() if "dense down" not in name for one in some]
        megabytes = f"{max(equal) / 1e6:.2f}" if equal else "–"
        rows.append(f"| {size} | {megabytes} | " + " | ".join(cell(of[name]) for name in methods) + " |")
    whole = [one for one in here if one["method"] == "uncompressed"]
    if whole:
        rows.append(f"\nuncompressed: {cell(whole)} after {whole[0]['bytes'][-1] / 1e6:.0f} MB")
    dense = [one for one in here if "dense down" in one["method"]]
    if dense:
        low, high = (f([one["bytes"][-1] / 1e6 for one in dense]) for f in (min, max))
        rows.append(f"top-k with dense download moves {low:.0f} to {high:.0f} MB")
    return rows


def figure(options: argparse.Namespace) -> None:
    names = options.methods.split(";")
    sizes, seeds = ([int(v) for v in text.split(",")] for text in (options.sizes, options.seeds))
    partitions = options.partitions.split(",")
    cases = [
        Case(options.data, partition, 0 if name == "uncompressed" else size, name, seed)
        for seed in seeds
        for partition in partitions
        for name in names
        for size in (sizes[:1] if name == "uncompressed" else sizes)
    ]
    if options.jobs:
        options.out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda case: run(case, options), cases))
    every = [
        Case(options.data, partition, size, name, seed)
        for seed in seeds
        for partition in partitions
        for name in METHODS
        for size in ([0] if name == "uncompressed" else sizes)
    ]
    lines = [one for one in (line(options.out, case) for case in every) if one is not None]
    write(options.out / "figure2.json", {"data": options.data, "lines": lines})
    for partition in partitions:
        print("\n".join(tables(lines, partition)))


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
    curves = parts.add_parser("figure")
    curves.set_defaults(go=figure)
    curves.add_argument("--data", default="mnist")
    curves.add_argument("--partitions", default="iid,classes")
    curves.add_argument("--sizes", default="100,500,1000,2000,5000")
    curves.add_argument("--methods", default=";".join(("uncompressed", *FIGURE)), help="separated by ;")
    curves.add_argument("--seeds", default="0")
    curves.add_argument("--rounds", type=int, default=200)
    curves.add_argument("--record", type=int, default=20)
    curves.add_argument("--jobs", type=int, default=2, help="0 runs nothing and prints what is there")
    curves.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.go(options)


if __name__ == "__main__":
    main()
