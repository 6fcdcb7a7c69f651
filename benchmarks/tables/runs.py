"""One run of the grid: a federation, its advices, references, and the truth about its partners. One JSON file each."""

import json
import os
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from joblib import Parallel, delayed

from benchmarks.tables import adapter
from benchmarks.tables.federations import federation
from benchmarks.tables.models import Task, measure, task_of
from benchmarks.tables.references import references
from benchmarks.tables.sources import SOURCES, Table

VERSION = 2
BLOCKS = 20  # of the jackknife
UNPLANTED = ("heart", "flights", "plebiscite", "exams", "wages")  # small, or of interest for their sites only
SIZES = (60, 150, 400)
PROVEN = ("mix", "friends", "useless", "natural")  # kinds of which gains are told; faults and copies only of names


class Run(NamedTuple):
    """Which federation."""

    table: str
    kind: str
    own: int
    seed: int

    @property
    def file(self) -> str:
        """Where its record is."""
        return f"{self.table}-{self.kind}-{self.own}-{self.seed}.json"


def standard() -> Iterator[Run]:
    """The grid, what matters most first; tables without sites have no natural federation."""
    planted = [name for name in SOURCES if name not in UNPLANTED]
    yield from (Run(name, "mix", own, 0) for own, name in product(SIZES, planted))
    yield from (Run(name, "natural", own, seed) for seed, own, name in product(range(2), SIZES, SOURCES))
    yield from (Run(name, kind, SIZES[k % 3], 0) for kind in ("useless", "friends") for k, name in enumerate(planted))
    yield from (Run(name, "mix", 150, 1) for name in planted)
    yield from (Run(name, kind, own, 0) for kind, own, name in product(("faults", "copies"), SIZES, planted))


@cache
def loaded(name: str) -> Table:
    """A table, once per process."""
    return SOURCES[name](name)


def measured(
    run: Run, *, plain: bool = False, truths: bool = True, table: Table | None = None
) -> dict[str, Any] | None:
    """The record of one run; None where the table has no such federation.

    Args:
        run: which one.
        plain: the advice only, as for a procedure that is compared: no references, no other option, no truth.
        truths: ask again with each partner alone, for what it adds.
        table: the rows; by default those of `SOURCES`.
    """
    drawn = federation(table or loaded(run.table), run.kind, run.own, run.seed)
    if drawn is None:
        return None
    task = task_of(drawn.table, drawn.own)
    y = task.targets(drawn.test)
    answer = adapter.asked(drawn, task, run.seed)
    found, proven = {"veto": answer.predicted, "alone": answer.alone}, not plain and run.kind in PROVEN
    if proven:
        found |= references(drawn)
        found["cautious"] = adapter.asked(drawn, task, run.seed, **adapter.CAUTIOUS).predicted
    known = {name: one for name, one in found.items() if one is not None and np.isfinite(one).all()}
    record = {"version": VERSION, **run._asdict(), "task": task.kind, "test_rows": len(y)}
    record |= {key: getattr(answer, key) for key in ("error", "seconds", "worth_it", "stated")}
    record |= {"scores": {name: measure(task, one, y) for name, one in known.items()}, "partners": []}
    if {"veto", "best alone"} <= known.keys():
        record["test_error"] = jackknife(task, known["veto"], known["best alone"], y)
    for one in drawn.partners:
        entry = {"name": one.name, "truth": one.truth, "fault": one.fault, **answer.said_of(one)}
        if proven and truths and "alone" in known:
            beside = adapter.asked(drawn, task, run.seed, only=one.name).predicted
            entry["adds"] = None if beside is None else measure(task, beside, y) - record["scores"]["alone"]
        record["partners"].append(entry)
    return record


def jackknife(task: Task, one: np.ndarray, other: np.ndarray, y: np.ndarray) -> float:
    """The standard error of the difference of two models' measures on the test rows."""
    block = np.arange(len(y)) % BLOCKS
    left = [block != k for k in range(BLOCKS)]
    gaps = np.array([measure(task, one[kept], y[kept]) - measure(task, other[kept], y[kept]) for kept in left])
    return float(np.sqrt((BLOCKS - 1) * gaps.var()))


def stored(folder: Path) -> list[dict[str, Any]]:
    """All records of a folder, in order of their names."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [one for one in found if one]


def perform(runs: Iterable[Run], folder: Path, jobs: int = 1, *, plain: bool = False, truths: bool = True) -> int:
    """All runs that are not stored yet, in so many processes; how many there were."""
    folder.mkdir(parents=True, exist_ok=True)
    left = [run for run in dict.fromkeys(runs) if not (folder / run.file).exists()]
    Parallel(jobs, verbose=10)(delayed(_performed)(run, folder, plain, truths) for run in left)
    return len(left)


def _performed(run: Run, folder: Path, plain: bool, truths: bool) -> None:
    """The record is written whole or not at all."""
    partial = (folder / run.file).with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(measured(run, plain=plain, truths=truths), indent=1) + "\n")
    partial.replace(folder / run.file)
