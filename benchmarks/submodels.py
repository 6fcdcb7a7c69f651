"""Sub-models: what a client's training step costs by its share of the model, and Table 1 of FedSep at a small size.

    python -m benchmarks.submodels cost --model small-cnn-norm --shape 1,28,28
    python -m benchmarks.submodels table --data fashion-mnist --classes 2,5 --seeds 0,1,2 --out runs/submodels

`cost` times a step of plain PyTorch (forward, backward, update) on one thread with random images: processor time, the
best of a few. Memory is what the backward pass keeps, with the parameters and their gradient.

`table` runs `coterie run` for every method, number of classes and seed, some at a time, each in a result folder of its
own; finished ones are read, so the command can be repeated with more. The accuracy is the mean over the last recorded
rounds. Settings are the same for all methods, untuned.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from coterie.problems.models import build
from coterie.problems.models.submodel import anatomy
from coterie.problems.submodels import SHARES

METHODS: dict[str, tuple[str, list[str]]] = {  # a row of the table: method and what is special about it
    "fedsep-submodel": ("fedsep-submodel", []),
    "fedsep-submodel, refresh 10": ("fedsep-submodel", ["method.refresh=10"]),
    "fedrolex": ("fedrolex", []),
    "heterofl": ("heterofl", []),
    "federated-dropout": ("federated-dropout", []),
    "zerofl": ("zerofl", []),
    "feddst": ("feddst", []),
    "flash": ("flash", []),
    "feddf": ("feddf", []),
    "ds-fl": ("ds-fl", []),
    "fed-et": ("fed-et", []),
    "homogeneous, smallest": ("homogeneous", ["method.size=smallest"]),
    "homogeneous, largest": ("homogeneous", ["method.size=largest"]),
}
PAPER = {  # CIFAR-10, ResNet-18: two classes a client, five
    "fedsep-submodel": (71.13, 84.61),
    "fedrolex": (69.44, 84.45),
    "heterofl": (63.90, 73.19),
    "federated-dropout": (46.64, 76.20),
    "zerofl": (64.61, 83.31),
    "feddst": (67.65, 84.57),
    "flash": (67.08, 84.61),
    "feddf": (73.81, 76.55),
    "ds-fl": (65.27, 68.44),
    "fed-et": (78.66, 81.13),
    "homogeneous, smallest": (38.82, 46.86),
    "homogeneous, largest": (75.74, 84.48),
}
LAST = 3  # recorded rounds that the accuracy is the mean of

Case = tuple[str, int, int]  # row, classes, seed


def kept_bytes(net: nn.Module, step: Callable[[], None]) -> int:
    """Bytes that a step keeps for its backward pass, and of the parameters and their gradient."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    held = sum(size for pointer, size in kept.items() if pointer not in own)
    return held + 2 * sum(p.numel() * p.element_size() for p in net.parameters())


def cost(model: str, width: int | None, shape: tuple[int, ...], batch: int, repeats: int) -> list[str]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cut = anatomy(build(model, shape, 10, 0, width), shape)
    inputs, labels = torch.randn(batch, *shape), torch.randint(10, (batch,))
    lines = ["| share | parameters | MFLOPs an image | ms a step | MB a step |", "|---|---|---|---|---|"]
    for share in SHARES:
        net = cut.carved(share, scaled=True).train()
        rule = torch.optim.SGD(net.parameters(), lr=0.01)

        def step(net: nn.Module = net, rule: Any = rule) -> None:
            rule.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()
            rule.step()

        memory, seconds = kept_bytes(net, step), []
        for _ in range(repeats):
            start = process_time()
            step()
            seconds.append(process_time() - start)
        lines.append(
            f"| {share:g} | {cut.parameters(share):,} | {cut.flops(share) / 1e6:.3f} | {1e3 * min(seconds):.2f} "
            f"| {memory / 1e6:.2f} |"
        )
    return lines


def folder_of(options: argparse.Namespace, case: Case) -> Path:
    row, classes, seed = case
    return options.out / f"{options.data}-{classes}-{seed}-{row.replace(', ', '-').replace(' ', '')}"


def run(options: argparse.Namespace, case: Case) -> None:
    row, classes, seed = case
    method, special = METHODS[row]
    folder = folder_of(options, case)
    if (folder / "config.toml").is_file():
        command = ["resume", str(folder)]
    else:
        values = [f"problem.data={options.data}", f"problem.classes={classes}", f"problem.width={options.width}"]
        values += [f"problem.model={options.model}", f"problem.clients={options.clients}", "problem.test=2000"]
        values += [f"federation.count={options.count}", f"federation.mode={options.mode}", "run.threads=1"]
        values += [f"method.step={options.step}", f"method.local_steps={options.local_steps}", "method.batch=20"]
        values += ["run.baselines=[]", f"run.record={max(1, options.rounds // 30)}", "run.checkpoint=25", *special]
        command = ["run", "--problem", "submodels", "--method", method, "--rounds", str(options.rounds)]
        command += ["--seed", str(seed), "--out", str(folder)] + [word for value in values for word in ("--set", value)]
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *command, "--json"], capture_output=True, text=True, check=False
    )
    print(folder.name, "done" if done.returncode == 0 else done.stderr.strip(), file=sys.stderr, flush=True)


def result(folder: Path) -> tuple[float, float] | None:
    """Accuracy in per cent and megabytes up, if the run is finished."""
    if not (folder / "summary.json").is_file():
        return None
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracy = statistics.mean(line["test_accuracy"] for line in lines[-LAST:])
    return 100 * accuracy, summary["communication"]["bytes_up"] / 1e6


def cell(values: list[float]) -> str:
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def table(options: argparse.Namespace, rows: list[str], classes: list[int], seeds: list[int]) -> list[str]:
    heads = [f"{k} classes" for k in classes] + ["MB up", "seeds", "paper, 2 classes", "paper, 5 classes"]
    lines = ["| method | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for row in rows:
        found = {k: [result(folder_of(options, (row, k, seed))) for seed in seeds] for k in classes}
        got = {k: [value for value in values if value is not None] for k, values in found.items()}
        up = [value[1] for values in got.values() for value in values]
        cells = [cell([value[0] for value in got[k]]) for k in classes]
        cells += [f"{statistics.mean(up):.0f}" if up else "–", str(min(map(len, got.values())))]
        cells += [f"{value:.1f}" for value in PAPER.get(row, ())] or ["–", "–"]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.submodels", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    costs = kinds.add_parser("cost")
    costs.add_argument("--model", default="small-cnn-norm")
    costs.add_argument("--width", type=int)
    costs.add_argument("--shape", default="1,28,28")
    costs.add_argument("--batch", type=int, default=20)
    costs.add_argument("--repeats", type=int, default=10)
    tables = kinds.add_parser("table")
    tables.add_argument("--data", default="fashion-mnist")
    tables.add_argument("--model", default="small-cnn-norm")
    tables.add_argument("--width", type=int, default=16)
    tables.add_argument("--clients", type=int, default=100)
    tables.add_argument("--count", type=int, default=10, help="clients a round")
    tables.add_argument("--classes", default="2")
    tables.add_argument("--seeds", default="0,1,2")
    tables.add_argument("--methods", default=";".join(METHODS), help="rows, separated by ;")
    tables.add_argument("--rounds", type=int, default=200)
    tables.add_argument("--step", type=float, default=0.05)
    tables.add_argument("--local-steps", type=int, default=10)
    tables.add_argument("--mode", default="sequential")
    tables.add_argument("--jobs", type=int, default=2, help="0 runs nothing and prints what is there")
    tables.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.kind == "cost":
        shape = tuple(int(v) for v in options.shape.split(","))
        print("\n".join(cost(options.model, options.width, shape, options.batch, options.repeats)))
        return
    classes, seeds = ([int(v) for v in text.split(",")] for text in (options.classes, options.seeds))
    rows = options.methods.split(";")
    if options.jobs:
        options.out.mkdir(parents=True, exist_ok=True)
        cases = [(row, k, seed) for seed, k, row in product(seeds, classes, rows)]
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda case: run(options, case), cases))
    print("\n".join(table(options, rows, classes, seeds)))


if __name__ == "__main__":
    main()
