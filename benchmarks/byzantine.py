"""Byzantine clients against learned weights and robust means: test accuracy, attack by method.

    python -m benchmarks.byzantine --seeds 0,1,2 --out runs/byzantine

`friends` on digits, 15 clients of which the last 6 (40 %) attack, in two cases: 5 friends and 10 strangers, of whom 6
attack; and friends only, of whom 6 attack. Every method gets one full gradient a client a round, the same step and the
same number of rounds; the robust ones are told the share of attackers. What was run before is read from `--out`, so the
command can be repeated with more; `--dry` only prints what is there.
"""

import argparse
import json
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds

ROUNDS = 200
STEP = {"step": 0.5, "batch": "all"}
WALK = {**STEP, "local_steps": 1}
METHODS: dict[str, dict[str, Any]] = {
    "meritfed": {**STEP, "mirror_step": 0.2, "mirror_steps": 10, "cut": 100},
    "primal-dual": {**STEP, "dual_step": 0.1, "outer_step": 0.005},
    "sgd-full": STEP,
    "krum": {**WALK, "attackers": 0.4},
    "multi-krum": {**WALK, "attackers": 0.4},
    "coordinate-median": WALK,
    "trimmed-mean": {**WALK, "attackers": 0.4},
    "geometric-median": WALK,
}
LEARNED = ("meritfed", "primal-dual")
CASES = {"friends and strangers": 5, "friends only": 15}
ATTACKS = ("none", "silent", "sign-flip", "noise", "label-flip", "scaled", "alie", "ipm")
ROWS = [(attack, 3.0) for attack in ATTACKS] + [("noise", None), ("scaled", None)]
AVERAGING = (*LEARNED, "sgd-full")  # what clipping is for: the others bear long updates by themselves

Cell = tuple[str, str, float | None, str, int]  # case, attack, clip, method, seed


def run(cell: Cell) -> dict[str, Any]:
    """One run; what is kept of it."""
    case, attack, clip, method, seed = cell
    problem = {"friends": CASES[case], "validation": 300, "attack": attack}
    tables = {"problem": problem, "method": METHODS[method], "federation": {"mode": "vmap"}}
    if clip is not None:
        tables["federation"]["clip"] = clip
    sets = {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}
    names = {"run.method": method, "run.problem": "friends", "run.seed": seed, "run.rounds": ROUNDS}
    loop = {"run.record": ROUNDS, "run.baselines": [], "run.threads": 1}
    result = run_rounds(assemble(load(sets=sets, flags={**names, **loop})), None)
    final = result.summary["final"]
    weights = result.summary["weights"]
    return {
        "cell": list(cell),
        "outcome": result.summary["outcome"],
        "accuracy": final["test_accuracy"],
        "attackers_weight": None if weights is None else sum(weights[9:]),
    }


def known(file: Path) -> dict[Cell, dict[str, Any]]:
    """What was run before."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else []
    return {tuple(line["cell"]): line for line in lines}


def table(found: dict[Cell, dict[str, Any]], case: str, seeds: list[int]) -> list[str]:
    lines = ["| attack | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 1) + "|"]
    for attack, clip in ROWS:
        cells = [[found.get((case, attack, clip, method, seed)) for seed in seeds] for method in METHODS]
        lines.append(f"| {label(attack, clip)} | " + " | ".join(map(text, cells)) + " |")
    return lines


def label(attack: str, clip: float | None) -> str:
    return attack if clip is not None else f"{attack}, no clipping"


def text(runs: list[dict[str, Any] | None]) -> str:
    got = [one["accuracy"] for one in runs if one is not None]
    if not got:
        return "–"
    return f"{statistics.mean(got):.3f}" + (f" ± {statistics.stdev(got):.3f}" if len(got) > 1 else "")


def worst(found: dict[Cell, dict[str, Any]], case: str, seeds: list[int], reference: str) -> list[str]:
    """By how much learned weights fall behind a run without attack: of the mean over seeds, and of one seed."""
    lines = []
    for method in LEARNED:
        gaps: dict[str, list[float]] = {}
        for attack in ATTACKS[2:]:
            runs = [[found.get((case, a, 3.0, method, seed)) for a in (reference, attack)] for seed in seeds]
            both = [(a, b) for a, b in runs if a is not None and b is not None]
            gaps[attack] = [100 * (a["accuracy"] - b["accuracy"]) for a, b in both]
        means = {attack: statistics.mean(gap) for attack, gap in gaps.items() if gap}
        if means:
            most = max(means, key=lambda attack: means[attack])
            single = max(max(gap) for gap in gaps.values() if gap)
            behind = f"{means[most]:.1f} points behind at most ({most}), {single:.1f} in one run"
            lines.append(f"{method} against {reference}: {behind}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.byzantine", description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--dry", action="store_true", help="run nothing, print what is there")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "runs.jsonl"
    found = known(file)
    wanted = product(options.cases.split(","), ROWS, options.methods.split(","), seeds)
    for case, (attack, clip), method, seed in () if options.dry else wanted:
        cell = (case, attack, clip, method, seed)
        if cell in found or (clip is None and method not in AVERAGING):
            continue
        found[cell] = run(cell)
        with file.open("a") as lines:
            lines.write(json.dumps(found[cell]) + "\n")
        print(*cell, found[cell]["outcome"], found[cell]["accuracy"], file=sys.stderr, flush=True)
    for case in CASES:
        print(f"\n{case}\n")
        print("\n".join(table(found, case, seeds)))
        print("\n" + "\n".join(line for ref in ATTACKS[:2] for line in worst(found, case, seeds, ref)))


if __name__ == "__main__":
    main()
