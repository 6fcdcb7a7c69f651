"""Everyone finds friends: mean personal accuracy of `collaborate` beside FedAvg, everyone alone, Ditto and pFedMe.

    python -m benchmarks.collaborate --data digits --seeds 0,1,2 --out runs/collaborate

Runs `coterie run` on `groups`, setting 4, every client a target, each in a result folder of its own; finished ones are
read, interrupted ones resumed, so the command can be repeated with more. All clients hold the same number of rows:
`collaborate` learns its weights on a part of them (digits 60 of 160, else 500 of 4500), the others train on all. The
last column, `groups known`, is averaging within the true groups: what no method can know, and nobody's baseline.
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

WALK = ["method.step=0.1"]
SIZES = {  # rows to train on for collaborate, and for the others; local steps and batch; rounds
    "digits": (100, 160, 5, 20, 200),
    "mnist": (4000, 4500, 20, 50, 100),
    "fashion-mnist": (4000, 4500, 20, 50, 100),
}
METHODS = {  # column: method and settings; those that walk as FedAvg does get the same steps and batches
    "collaborate": ("collaborate", WALK),
    "collaborate, trial": ("collaborate", [*WALK, "method.mirror=trial"]),
    "fedavg": ("fedavg", WALK),
    "local-train": ("local-train", WALK),
    "ditto": ("ditto", [*WALK, "method.penalty=0.1"]),
    "ditto, weak pull": ("ditto", [*WALK, "method.penalty=0.01"]),
    "pfedme": ("pfedme", ["method.penalty=15", "method.inner_step=0.1", "method.inner_steps=5"]),
    "groups known": ("collaborate", [*WALK, "method.mirror=off", "method.start=groups"]),
}

Case = tuple[str, int, int, str]  # data, setting, seed, column


def folder_of(out: Path, case: Case) -> Path:
    data, setting, seed, column = case
    return out / f"{data}-{setting}-{seed}-{column.replace(', ', '-').replace(' ', '-')}"


def settings(case: Case) -> list[str]:
    data, setting, _, column = case
    own, all_rows, steps, batch, _ = SIZES[data]
    learns = column.startswith("collaborate")
    walk = (10, 50) if column == "pfedme" else (steps, batch)
    problem = [f"problem.data={data}", f"problem.setting={setting}", "problem.everyone=true"]
    problem += [f"problem.train={own if learns else all_rows}", "run.baselines=[]", "run.threads=1"]
    steps_and_batch = [f"method.local_steps={walk[0]}", f"method.batch={walk[1]}"]
    rest = ["federation.mode=vmap", "run.record=10", "run.checkpoint=20"]
    return [*METHODS[column][1], *steps_and_batch, *problem, *rest]


def run(out: Path, case: Case) -> None:
    folder = folder_of(out, case)
    if (folder / "config.toml").is_file():
        command = ["resume", str(folder)]
    else:
        command = ["run", "--problem", "groups", "--method", METHODS[case[3]][0], "--rounds", str(SIZES[case[0]][4])]
        command += ["--seed", str(case[2]), "--out", str(folder)]
        command += [word for value in settings(case) for word in ("--set", value)]
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *command, "--json"], capture_output=True, text=True, check=False
    )
    print(folder.name, "done" if done.returncode == 0 else done.stderr.strip(), file=sys.stderr, flush=True)


def found(out: Path, case: Case) -> dict | None:
    path = folder_of(out, case) / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else None


def cell(values: list[float], digits: int = 3) -> str:
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def table(out: Path, data: str, setting: int, seeds: list[int]) -> list[str]:
    lines = ["| | mean accuracy | worst client | inside own group, mean | least | clusters right | MB moved | seeds |"]
    lines.append("|---" * 8 + "|")
    for column in METHODS:
        results = [r for seed in seeds if (r := found(out, (data, setting, seed, column))) is not None]
        if not results:
            continue
        finals = [r["final"] for r in results]

        def values(key: str, finals: list[dict] = finals) -> list[float]:
            return [f[key] for f in finals if key in f]

        learns = column.startswith("collaborate")
        right = sum(r.get("clusters") == known(r["friends"], len(r["weights"])) for r in results) if learns else 0
        moved = [(r["communication"]["bytes_up"] + r["communication"]["bytes_down"]) / 1e6 for r in results]
        cells = [cell(values("personal_accuracy")), cell(values("personal_accuracy_worst"))]
        cells += [cell(values(key)) if learns else "" for key in ("group_weight", "group_weight_least")]
        cells += [f"{right} of {len(results)}" if learns else "", f"{statistics.mean(moved):.0f}", str(len(results))]
        lines.append(f"| {column} | " + " | ".join(cells) + " |")
    return lines


def known(friends: int, clients: int) -> list[list[int]]:
    return [list(range(friends)), list(range(friends, clients))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collaborate", description=__doc__)
    parser.add_argument("--data", default="digits", choices=list(SIZES))
    parser.add_argument("--setting", type=int, default=4)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--columns", default=";".join(METHODS), help="separated by ;")
    parser.add_argument("--jobs", type=int, default=1, help="0 runs nothing and prints what is there")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    seeds = [int(v) for v in options.seeds.split(",")]
    cases = list(product([options.data], [options.setting], seeds, options.columns.split(";")))
    if options.jobs:
        options.out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda case: run(options.out, case), cases))
    print(f"\n{options.data}, setting {options.setting}\n")
    print("\n".join(table(options.out, options.data, options.setting, seeds)))


if __name__ == "__main__":
    main()
