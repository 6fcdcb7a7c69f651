"""What coterie bears: faults by method, inputs fuzzed, runs killed and resumed, and a long run under faults.

    python -m benchmarks.robustness table            every method under every kind of fault
    python -m benchmarks.robustness huge             every method with one or three clients that reply with huge numbers
    python -m benchmarks.robustness fuzz --cases 500 mutated files and settings, that many a target
    python -m benchmarks.robustness kill --count 30  SIGKILL, SIGTERM and SIGINT at random moments, then compared
    python -m benchmarks.robustness soak             1,000 rounds under 10 % faults beside a run without
    python -m benchmarks.robustness all --json FILE

Prints markdown tables; with --json, writes the figures too. Needs the test extra: cases and targets are the tests' own.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from coterie.experiment.build import assemble
from coterie.experiment.config import FaultsTable, load
from coterie.experiment.loop import run_rounds

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("methods", "experiment", "fuzz", "problems")]

SHARE = 0.3
ROUNDS = 3
COLUMNS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "crash, restart": ({"crash": SHARE / 2, "restart": SHARE / 2}, {}),
    "delay": ({"delay": SHARE, "deadline": 5.0}, {}),
    "duplicate, reorder": ({"duplicate": SHARE / 2, "reorder": SHARE / 2}, {}),
    "truncate, misshape": ({"truncate": SHARE / 2, "misshape": SHARE / 2}, {}),
    "nan, inf": ({"nan": SHARE / 2, "inf": SHARE / 2}, {}),
    "flip": ({"flip": SHARE}, {}),
    "huge": ({"huge": SHARE}, {}),
    "flip, huge with clip": ({"flip": SHARE / 2, "huge": SHARE / 2}, {"clip": 3.0}),
}
MARKS = {"finished": "yes", "diverged": "diverged", "failed": "failed", "error": "ERROR"}


def table(only: list[str] | None) -> dict[str, Any]:
    """Outcome of a short run of every method under every fault; an exception is an ERROR."""
    from test_conformance import FIRST

    cells: dict[str, dict[str, str]] = {}
    events: Counter[str] = Counter()
    for case in [case for case in FIRST if only is None or case.method in only]:
        row = cells.setdefault(case.method, {})
        for name, (faults, federation) in COLUMNS.items():
            config = replace(case.config(rounds=ROUNDS, **federation), faults=FaultsTable(**faults))
            try:
                summary = run_rounds(assemble(config), None).summary
                row[name] = summary["outcome"]
                events.update(summary.get("events", {}))
            except Exception as error:
                row[name] = "error"
                print(f"{case.method} under {name}: {type(error).__name__}: {error}", file=sys.stderr)
    lines = ["| method | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {m} | " + " | ".join(MARKS[row[c]] for c in COLUMNS) + " |" for m, row in cells.items()]
    counts = Counter(outcome for row in cells.values() for outcome in row.values())
    lines += ["", f"{sum(counts.values())} runs of {ROUNDS} rounds, {sum(events.values())} events: {dict(counts)}."]
    print("\n".join(lines), flush=True)
    return {"cells": cells, "outcomes": counts, "events": events}


def huge() -> dict[str, Any]:
    """Outcomes of short runs of every method in which one or three of five clients reply with huge numbers."""
    from huge import EVERY, OUTCOMES, run

    cells: dict[tuple[str, str], Counter[str]] = {}
    for case, size, hostile, dtype in EVERY:
        row = cells.setdefault((size, hostile), Counter())
        try:
            row[run(case, size, hostile, dtype).summary["outcome"]] += 1
        except Exception as error:
            row["tracebacks"] += 1
            print(f"{case.method}, {size}, {hostile}, {dtype}: {type(error).__name__}: {error}", file=sys.stderr)
    kinds = (*OUTCOMES, "tracebacks")
    lines = ["| replies | hostile of 5 | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 2) + "|"]
    lines += [f"| {' | '.join(key)} | " + " | ".join(str(row[k]) for k in kinds) + " |" for key, row in cells.items()]
    total = sum(cells.values(), Counter[str]())
    lines += ["", f"{len(EVERY)} runs: {dict(total)}."]
    print("\n".join(lines), flush=True)
    return {"cells": {", ".join(key): row for key, row in cells.items()}, "outcomes": total}


def fuzz(cases: int, seed: int) -> dict[str, Any]:
    """Mutated inputs by target: how many were refused, the slowest, and how much memory grew."""
    from targets import TARGETS, mutated

    lines = ["| target | cases | accepted | refused | tracebacks | slowest, s | memory, MiB |", "|---" * 7 + "|"]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for target in TARGETS:
            before, slowest, seen = _peak(), 0.0, Counter[str]()
            for number in range(cases):
                data = mutated(target, seed + number)
                start = perf_counter()
                try:
                    seen["accepted" if target.accepts(data, Path(place)) else "refused"] += 1
                except Exception as error:
                    seen["tracebacks"] += 1
                    print(f"{target.name}, case {seed + number}: {type(error).__name__}: {error}", file=sys.stderr)
                slowest = max(slowest, perf_counter() - start)
            one = {**seen, "cases": cases, "slowest": round(slowest, 3), "memory": _peak() - before}
            figures[target.name] = one
            shown = [cases, seen["accepted"], seen["refused"], seen["tracebacks"], one["slowest"], one["memory"]]
            lines.append(f"| {target.name} | " + " | ".join(map(str, shown)) + " |")
    print("\n".join(lines), flush=True)
    return figures


def kill(count: int, seed: int) -> dict[str, Any]:
    """Signals at random moments until the run is through; then file by file against one that was left alone."""
    from folders import assert_same_results
    from test_kill import RUN

    arguments = ["--", *RUN, "--set", "faults.any=0.2"]
    with tempfile.TemporaryDirectory() as place:
        told = {}
        for name, signals in (("calm", 0), ("killed", count)):
            command = [
                ROOT / "tests/experiment/killer.py",
                "signals",
                signals,
                seed,
                120,
                f"{place}/{name}",
                *arguments,
            ]
            done = subprocess.run([sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
            told[name] = json.loads(done.stdout)
        assert_same_results(Path(place) / "calm", Path(place) / "killed")
    codes = Counter(number for number, _ in told["killed"]["codes"])
    kinds = {"SIGKILL": codes[9], "SIGTERM": codes[15], "SIGINT": codes[2]}
    print(f"{count} interruptions ({kinds}), the resumed results are those of the calm run, byte for byte.", flush=True)
    return {"interruptions": count, **kinds, "identical": True}


def soak(rounds: int, share: float) -> dict[str, Any]:
    """The default problem under faults and without; accuracy at the end and memory on the way."""
    figures: dict[str, Any] = {"rounds": rounds, "share": share}
    for name, faults in (("faults", {"faults.any": share}), ("calm", {})):
        sets = {"run.rounds": rounds, "run.record": 100, "run.checkpoint": 100, "run.baselines": [], **faults}
        sets |= {"run.threads": 1, "federation.mode": "vmap", "federation.clip": 3.0}
        watch = Memory((rounds // 10, rounds // 2, rounds))
        with tempfile.TemporaryDirectory() as place:
            parts = assemble(load(sets=sets))
            start = perf_counter()
            summary = run_rounds(parts, Path(place), watch).summary
        figures[name] = {
            "outcome": summary["outcome"],
            "accuracy": summary["final"]["test_accuracy"],
            "friends_weight": summary["final"]["friends_weight"],
            "events": summary.get("events", {}),
            "seconds": round(perf_counter() - start, 1),
            "memory": watch.seen,
        }
    lines = ["| run | outcome | test accuracy | weight of friends | events | MiB at rounds |", "|---" * 6 + "|"]
    for name in ("calm", "faults"):
        one = figures[name]
        memory = ", ".join(f"{t}: {m}" for t, m in one["memory"].items())
        shown = [one["outcome"], f"{one['accuracy']:.4f}", f"{one['friends_weight']:.3f}", sum(one["events"].values())]
        lines.append(f"| {name} | " + " | ".join(map(str, [*shown, memory])) + " |")
    print("\n".join(lines), flush=True)
    return figures


class Memory:
    """An observer that notes the resident memory of this process."""

    def __init__(self, rounds: tuple[int, ...]) -> None:
        self.rounds, self.seen = rounds, {}

    def started(self, parts: Any, done: int) -> None: ...

    def recorded(self, line: dict[str, Any], view: Any) -> None:
        if line["round"] in self.rounds:
            self.seen[line["round"]] = _resident()

    def ended(self, summary: dict[str, Any]) -> None: ...


def _resident() -> int:
    """MiB now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def _peak() -> int:
    """MiB at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["table", "huge", "fuzz", "kill", "soak", "all"])
    parser.add_argument("--methods", type=lambda text: text.split(","), help="table: these only, with commas")
    parser.add_argument("--cases", type=int, default=200, help="fuzz: inputs a target")
    parser.add_argument("--count", type=int, default=15, help="kill: how many signals")
    parser.add_argument("--rounds", type=int, default=1000, help="soak: how long")
    parser.add_argument("--share", type=float, default=0.1, help="soak: how many replies go wrong")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "table": lambda: table(given.methods),
        "huge": huge,
        "fuzz": lambda: fuzz(given.cases, given.seed),
        "kill": lambda: kill(given.count, given.seed),
        "soak": lambda: soak(given.rounds, given.share),
    }
    figures = {name: part() for name, part in parts.items() if given.what in (name, "all")}
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
