"""One run of the grid: files, advice, models on test rows, references. One JSON file per run; what exists is kept."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np

from benchmarks.tables import adapter
from benchmarks.tables.references import (
    better,
    boosted,
    codes_of,
    linear,
    measures,
    pooled,
    single_threaded,
    spread_of_difference,
)
from benchmarks.tables.scenario import Scenario, scenario
from benchmarks.tables.sources import SOURCES, Table

VERSION = 1
FRIENDLY = ("friend", "unit")  # a repaired unit error leaves a friend


class Run(NamedTuple):
    """Which run: table, cell, own rows, the split's seed, the advice's seed."""

    table: str
    cell: str
    own: int
    split: int
    seed: int = 0

    @property
    def file(self) -> str:
        """Where its record is."""
        return f"{self.table}-{self.cell}-{self.own}-{self.split:03d}-{self.seed}.json"


def grid(
    tables: Iterable[str], cells: Iterable[str], own: Iterable[int], splits: Iterable[int], seeds: Iterable[int]
) -> Iterator[Run]:
    """All runs, split after split, so that an unfinished grid holds a little of everything."""
    tables, cells, own, seeds = list(tables), list(cells), list(own), list(seeds)
    for split in splits:
        for rows in own:
            for cell in cells:
                for table in tables:
                    yield from (Run(table, cell, rows, split, seed) for seed in seeds)


def measured(run: Run, *, table: Table | None = None, quick: bool = False) -> dict[str, Any]:
    """The record of one run.

    Args:
        run: which one.
        table: the rows; by default those of `SOURCES`.
        quick: few rounds and placebos, to try the grid itself.
    """
    data = SOURCES[run.table].load(run.table) if table is None else table
    drawn = scenario(data, run.cell, run.own, run.split)
    classes = sorted(set(data.labels)) if data.kind == "classification" else []
    with tempfile.TemporaryDirectory(prefix="coterie-tables-") as name:
        folder = Path(name)
        drawn.write(folder)
        advice = adapter.asked(folder, data.label, run.seed, quick=quick)
        record = {"version": VERSION, **run._asdict(), "kind": data.kind, "classes": len(classes)}
        record |= {"own_rows": drawn.own.rows, "test_rows": drawn.test.rows, "partners": truths(drawn, advice)}
        record |= {"answer": advice.answer, "delivered": advice.delivered, "error": advice.error}
        record |= {"seconds": advice.seconds, "unit_fault": unit_fault(drawn, advice)}
        if advice.error:
            return record
        return record | scored(drawn, advice, classes, folder, run.seed, quick)


def truths(drawn: Scenario, advice: adapter.Advice) -> list[dict[str, Any]]:
    """Each partner with its truth and what the advice says of it; no verdict where the advice does not name it."""
    said = {one.file: one for one in advice.partners}
    partners = []
    for partner in drawn.partners:
        entry: dict[str, Any] = {"file": partner.file, "truth": partner.truth, "rows": partner.rows}
        judged = said.get(partner.file)
        partners.append(entry | (judged._asdict() if judged else {"verdict": None}))
    return partners


def unit_fault(drawn: Scenario, advice: adapter.Advice) -> dict[str, Any] | None:
    """Whether the unit error was questioned, and what else was; None where there is no unit error."""
    wrong = next((one for one in drawn.partners if one.truth == "unit"), None)
    if wrong is None:
        return None
    found = [what for file, what in advice.stopped if file == wrong.file and repr(wrong.column) in what]
    others = [f"{file}: {what}" for file, what in advice.stopped if what not in found]
    return {"column": wrong.column, "found": bool(found), "others": others}


def scored(
    drawn: Scenario, advice: adapter.Advice, classes: Sequence[str], folder: Path, seed: int, quick: bool
) -> dict[str, Any]:
    """Measures on the test rows of what was delivered, of coterie's model alone, and of the references."""
    truth = codes_of(drawn.test.labels, classes)
    model = adapter.delivered_model(folder)
    alone = adapter.alone_model(folder)
    deviation = adapter.label_deviation(model)
    delivered = adapter.predicted(model, folder / "test.csv", classes)
    if not np.isfinite(delivered).all():
        return {"error": "the delivered model predicts no finite numbers"}
    found = {"delivered": delivered, "coterie alone": adapter.predicted(alone, folder / "test.csv", classes)}
    start = process_time()
    gains = single_threaded(lambda: references(drawn, advice, classes, found, truth, deviation))
    scores = {name: measures(one, truth, deviation) for name, one in found.items()}
    single = next(name for name in ("coterie alone", "alone") if name in found and np.isfinite(found[name]).all())
    errors = spread_of_difference(delivered, found[single], truth, deviation)
    main = scores["delivered"]
    return {
        "scores": scores,
        "compared_with": single,
        "partner_gains": gains,
        "reference_seconds": process_time() - start,
        "intervals": [
            {
                "measure": one.measure,
                "gain": one.gain,
                "probability": one.probability,
                "true": better(one.measure, main[one.measure], scores[single][one.measure]),
                "test_error": errors[one.measure],
            }
            for one in advice.compared
            if one.measure in main
        ],
    }


def references(
    drawn: Scenario,
    advice: adapter.Advice,
    classes: Sequence[str],
    found: dict[str, np.ndarray],
    truth: np.ndarray,
    deviation: float,
) -> dict[str, dict[str, float]]:
    """Adds the references' predictions to found; returns what each partner, pooled by hand, adds to the own rows."""
    helpers = {one.file for one in advice.partners if one.verdict == adapter.HELPS}
    chosen = {
        "friends": [one.clean for one in drawn.partners if one.truth in FRIENDLY],
        "helpers": [one.clean for one in drawn.partners if one.file in helpers],
        "all": [one.clean for one in drawn.partners],
    }
    alone = linear(drawn.own, drawn.test, classes)
    found["alone"] = alone.predicted
    for name, tables in chosen.items():
        found[name] = linear(pooled([drawn.own, *tables]), drawn.test, classes).predicted if tables else alone.predicted
    found["boosting alone"] = boosted(drawn.own, drawn.test, classes)
    before = measures(alone.predicted, truth, deviation)
    gains = {}
    for partner in drawn.partners:
        with_it = linear(pooled([drawn.own, partner.clean]), drawn.test, classes, alone.strength).predicted
        after = measures(with_it, truth, deviation)
        gains[partner.file] = {name: better(name, after[name], before[name]) for name in after}
    return gains


def stored(folder: Path) -> list[dict[str, Any]]:
    """All records of a folder, in order of their names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def write(folder: Path, run: Run, record: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    path = folder / run.file
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)


def perform(runs: Iterable[Run], folder: Path, jobs: int = 1, *, quick: bool = False) -> int:
    """All runs that are not stored yet, in so many processes; how many there were."""
    folder.mkdir(parents=True, exist_ok=True)
    left = [run for run in runs if not (folder / run.file).exists()]
    if jobs == 1:
        for number, run in enumerate(left, 1):
            _performed(run, folder, quick)
            print(f"{number} of {len(left)}: {run.file}", flush=True)
        return len(left)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_performed, run, folder, quick): run for run in left}
        for number, done in enumerate(as_completed(waiting), 1):
            done.result()
            print(f"{number} of {len(left)}: {waiting[done].file}", flush=True)
    return len(left)


def _performed(run: Run, folder: Path, quick: bool) -> None:
    import torch

    torch.set_num_threads(1)
    write(folder, run, measured(run, quick=quick))
