"""MeritFed's mixtures (its sections 4.2 and 4.3): test accuracy on the target's classes, all methods side by side.

    python -m benchmarks.mixture --data cifar10 --shares 0.5,0.9 --seeds 0,1,2 --rounds 300 --out runs/mixture

Runs `coterie run` for every method, share and seed, some at a time, each in a result folder of its own; finished ones
are read and unfinished ones continued, so the command can be repeated with more. All methods take the same steps on
batches of the same size; nothing is tuned by method. The target is client 0, and what it is asked is in the ledger.
`local-train` is SGD on the target's own rows: what the paper calls SGD Ideal.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

METHODS = ("meritfed", "sgd-full", "sgd-ideal", "fedadp", "tawt", "local-train")


class Plan(NamedTuple):
    """Rounds, step and batches of a data set; how clients are run; how often accuracy is measured."""

    rounds: int
    step: float
    batch: int
    target_batch: int
    mode: str
    record: int


PLANS = {
    "digits": Plan(200, 0.1, 20, 30, "vmap", 10),
    "cifar10": Plan(300, 0.1, 75, 90, "sequential", 10),
    "goemotions": Plan(300, 0.05, 40, 30, "vmap", 10),
}


class Case(NamedTuple):
    """One run. Where extra is false there are no validation rows, and where model is empty it is the problem's own."""

    data: str
    share: float
    seed: int
    method: str
    rounds: int
    extra: bool
    model: str

    @property
    def name(self) -> str:
        kind = f"{self.data}{'-' if self.model else ''}{self.model}{'' if self.extra else '-plain'}"
        return f"{kind}-{self.share:g}-{self.rounds}-{self.seed}-{self.method}"


def settings(case: Case, more: list[str]) -> list[str]:
    plan = PLANS[case.data]
    by_method = {
        "meritfed": ["method.mirror=smd", f"method.mirror_batch={plan.target_batch}", "method.mirror_step=0.1"],
        "fedadp": ["method.angle=target", "method.smooth=false", f"method.target_batch={plan.target_batch}"],
        "tawt": [f"method.target_batch={plan.target_batch}"],
        "local-train": ["method.local_steps=1"],
    }
    values = [f"problem.data={case.data}", f"problem.share={case.share}", "run.baselines=[]", "run.threads=1"]
    values += [f"federation.mode={plan.mode}", "federation.target=0", f"run.record={plan.record}", "run.checkpoint=20"]
    values += [f"method.step={plan.step}", f"method.batch={plan.batch}", *by_method.get(case.method, [])]
    values += [f"problem.model={case.model}"] if case.model else []
    return [*values, *([] if case.extra else ["problem.validation=0"]), *more]


def run(out: Path, case: Case, more: list[str]) -> None:
    folder = out / case.name
    if (folder / "config.toml").is_file():
        command = ["resume", str(folder)]
    else:
        command = ["run", "--problem", "mixture", "--method", case.method, "--rounds", str(case.rounds)]
        command += ["--seed", str(case.seed), "--out", str(folder)]
        command += [word for value in settings(case, more) for word in ("--set", value)]
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *command, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    print(case.name, "done" if done.returncode == 0 else done.stderr.strip(), file=sys.stderr, flush=True)


def result(folder: Path) -> dict[str, float] | None:
    """What a finished run ended with."""
    if not (folder / "summary.json").is_file():
        return None
    summary = json.loads((folder / "summary.json").read_text())
    if summary["outcome"] != "finished":
        return None
    weights = summary["weights"]
    own = {} if weights is None else {"own_weight": weights[0]}
    return {**summary["final"], **own, "megabytes": sum(summary["communication"][k] for k in BYTES) / 1e6}


BYTES = ("bytes_up", "bytes_down")
COLUMNS = {
    "test accuracy": ("test_accuracy", 3),
    "test loss": ("test_loss", 3),
    "friends' weight": ("friends_weight", 3),
    "weight of client 0": ("own_weight", 3),
    "MB moved": ("megabytes", 0),
}


def cell(values: list[float], digits: int) -> str:
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 and digits else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def table(out: Path, cases: list[Case]) -> list[str]:
    lines = ["| α | method | " + " | ".join(COLUMNS) + " | seeds |", "|---" * (len(COLUMNS) + 3) + "|"]
    for share, method in dict.fromkeys((case.share, case.method) for case in cases):
        found = [result(out / case.name) for case in cases if (case.share, case.method) == (share, method)]
        got = [one for one in found if one is not None]
        if not got:
            continue
        cells = [cell([one[key] for one in got if key in one], digits) for key, digits in COLUMNS.values()]
        lines.append(f"| {share:g} | {method} | " + " | ".join(cells) + f" | {len(got)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mixture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits", choices=PLANS)
    parser.add_argument("--shares", default="0.9")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, help="default: 200 on digits, 300 elsewhere")
    parser.add_argument("--model", default="", help="for example resnet18-narrow")
    parser.add_argument("--plain", action="store_true", help="no extra validation rows: the goal is the training loss")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of all runs")
    parser.add_argument("--jobs", type=int, default=2, help="0 runs nothing and prints what is there")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shares, seeds = [float(v) for v in options.shares.split(",")], [int(v) for v in options.seeds.split(",")]
    rounds = options.rounds or PLANS[options.data].rounds
    cases = [
        Case(options.data, share, seed, method, rounds, not options.plain, options.model)
        for seed, share, method in product(seeds, shares, options.methods.split(","))
    ]
    if options.jobs:
        options.out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda case: run(options.out, case, options.set), cases))
    print(f"\n{options.data}{' without extra validation' if options.plain else ''}, {rounds} rounds\n")
    print("\n".join(table(options.out, sorted(cases, key=lambda case: case.share))))


if __name__ == "__main__":
    main()
