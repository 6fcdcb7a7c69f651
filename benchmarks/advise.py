"""How often `coterie advise` is right about partners: known friends and strangers, over many random splits.

    python -m benchmarks.advise --splits 20 --json advise.json

known     3 friends (rows from the target's distribution) and 3 strangers (labels shuffled): precision and recall of
          "helps"
useless   20 partners with shuffled labels: how often anybody is said to help

Files are written, read and screened as the command does it; only the screening, which gives the verdicts, is run.
"""

import argparse
import json
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

import torch

from coterie.advise.screening import Screened, ScreeningPlan, screen
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.files import load_files
from coterie.problems.files.example import write_example


def one(data: str, seed: int, friends: int, strangers: int, own: int, plan: ScreeningPlan) -> tuple[Screened, set[str]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "example"
        done = write_example(folder, data, seed=seed, friends=friends, strangers=strangers, own=own)
        prepared = load_files(
            Context(seed), clients=f"{folder}/sites/*.csv", target=f"{folder}/mine.csv", label=done.label, orders=1
        )
        return screen(prepared, plan, Draw.of(seed).phase("advise").phase("screening")), set(done.friends)


def known(data: str, splits: range, own: int, plan: ScreeningPlan) -> dict[str, Any]:
    right = said = there = harmful = shown = 0
    for seed in splits:
        screened, friends = one(data, seed, 3, 3, own, plan)
        helpers = {partner.name for partner in screened.partners if partner.verdict == "helps"}
        right, said, there = right + len(helpers & friends), said + len(helpers), there + len(friends)
        harmful += sum(p.verdict == "harms" for p in screened.partners if p.name not in friends)
        shown += sum(p.p_gain <= 0.05 for p in screened.partners if p.name in friends)
        print(f"known {data} {seed}: helps {sorted(helpers)}, friends {sorted(friends)}", flush=True)
    return {
        "data": data,
        "splits": len(splits),
        "first": splits.start,
        "target_rows": own,
        "precision": right / max(1, said),
        "recall": right / there,
        "strangers_said_to_harm": harmful / there,
        "friends_whose_gain_over_alone_is_shown": shown / there,
    }


def useless(data: str, splits: range, own: int, plan: ScreeningPlan, partners: int = 20) -> dict[str, Any]:
    runs = alarms = 0
    for seed in splits:
        screened, _ = one(data, seed, 0, partners, own, plan)
        helpers = [partner.name for partner in screened.partners if partner.verdict == "helps"]
        runs, alarms = runs + bool(helpers), alarms + len(helpers)
        print(f"useless {data} {seed}: helps {helpers}", flush=True)
    return {
        "data": data,
        "splits": len(splits),
        "first": splits.start,
        "partners": partners,
        "runs_with_a_false_alarm": runs / len(splits),
        "partners_falsely_said_to_help": alarms / (len(splits) * partners),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.advise", description=__doc__)
    parser.add_argument("--data", default="breast-cancer", choices=("breast-cancer", "digits"))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--own", type=int, default=60)
    parser.add_argument("--placebos", type=int, default=ScreeningPlan().placebos)
    parser.add_argument("--only", choices=("known", "useless"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = ScreeningPlan(placebos=options.placebos)
    seeds, results = range(options.first, options.first + options.splits), {}
    for name, measure in (("known", known), ("useless", useless)):
        if options.only in (None, name):
            start = process_time()
            results[name] = measure(options.data, seeds, options.own, plan)
            results[name]["cpu_seconds_a_split"] = (process_time() - start) / options.splits
            print(json.dumps(results[name], indent=2), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
