"""What the default clip of network engines costs honest runs, and what it saves when clients attack in the last round.

    python -m benchmarks.late honest     methods on problems without attackers, clip = none, 3, 10
    python -m benchmarks.late attack     6 of 15 clients attack in the last round, clip × guard
    --seeds 0,1,2,3,4 --json FILE

Prints markdown tables: means and worst seeds of the test accuracy (validation never sees it).
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds

CLIPS = ("none", 3.0, 10.0)
HONEST: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("friends", {}, {"meritfed": 200, "fedavg": 60, "primal-dual": 200}),
    ("friends", {"problem.model": "logistic"}, {"meritfed": 200, "fedavg": 60, "primal-dual": 200}),
    ("groups", {}, {"meritfed": 40, "fedavg": 40, "primal-dual": 40}),
]
ATTACKS = [("sign-flip", 100), ("sign-flip", 200), ("scaled", 100), ("scaled", 200)]


def accuracy(sets: dict[str, Any], **flags: Any) -> tuple[float, int]:
    """Test accuracy of the last model, and how many events tell of a clipped or rejected update."""
    config = load(sets={**sets, "run.baselines": []}, flags={f"run.{name}": value for name, value in flags.items()})
    result = run_rounds(assemble(config.with_run(record=flags["rounds"], threads=1)), None)
    return float(result.history[-1]["test_accuracy"]), sum(result.summary.get("events", {}).values())


def honest(seeds: list[int]) -> Iterator[dict[str, Any]]:
    """One row per problem, method and clip."""
    for problem, settings, methods in HONEST:
        for method, rounds in methods.items():
            for clip in CLIPS:
                sets = {**settings, "federation.clip": clip}
                values = [accuracy(sets, method=method, problem=problem, rounds=rounds, seed=seed) for seed in seeds]
                name = f"{problem} {settings.get('problem.model', '')}".strip()
                yield {"problem": name, "method": method, "rounds": rounds, "clip": clip, **summary(values)}


def attack(seeds: list[int]) -> Iterator[dict[str, Any]]:
    """One row per attack, number of rounds, clip and guard; all clients are friends until they attack."""
    for name, rounds in ATTACKS:
        for clip in CLIPS:
            for guard in (False, True):
                sets = {
                    "problem.friends": 15,
                    "problem.attack": name,
                    "problem.attackers": 6,
                    "problem.strength": 1000.0,
                    "problem.attack_from": rounds - 1,
                    "federation.clip": clip,
                    "federation.guard": guard,
                }
                values = [accuracy(sets, method="meritfed", problem="friends", rounds=rounds, seed=s) for s in seeds]
                yield {"attack": name, "rounds": rounds, "clip": clip, "guard": guard, **summary(values)}


def summary(values: list[tuple[float, int]]) -> dict[str, Any]:
    """Mean and worst accuracy over the seeds, and the number of events."""
    found = [value for value, _ in values]
    return {
        "accuracy": round(mean(found), 4),
        "worst": round(min(found), 4),
        "events": sum(count for _, count in values),
        "values": [round(value, 4) for value in found],
    }


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("honest", "attack"))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    rows = []
    for row in (honest if options.table == "honest" else attack)(seeds):
        if not rows:
            print("| " + " | ".join(row) + " |\n" + "|---" * len(row) + "|")
        rows.append(row)
        print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
