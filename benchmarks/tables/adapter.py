"""All that the grid knows of coterie: how an advice is asked for, what it says, and what its model predicts.

If keys of advice.json or keywords of `coterie.advise` change, this is the only module to change.
"""

import json
import re
from collections.abc import Mapping
from time import process_time
from typing import Any, NamedTuple

import numpy as np

import coterie
from benchmarks.tables.federations import Federation, Partner
from benchmarks.tables.models import Task
from benchmarks.tables.sources import Columns
from coterie.experiment.predict import load_model
from coterie.problems.files.findings import BadFiles

CAUTIOUS = {"cautious": True}
DIFFERS, COPY = "differs", "copy"
COPIED = ("copy", "copies", "also in", "same rows")  # words of a finding before training


class Answer(NamedTuple):
    """Predictions for the test rows in the order of the task's classes, and what is said; or the error."""

    predicted: np.ndarray | None = None
    alone: np.ndarray | None = None
    partners: Mapping[str, dict[str, Any]] = {}
    worth_it: str = ""
    stated: float | None = None
    seconds: float = 0.0
    error: str = ""

    def said_of(self, one: Partner) -> dict[str, Any]:
        """What is said of a partner, and whether its planted fault is named; nothing where it is not spoken of."""
        said = self.partners.get(one.name, {})
        return {**said, "fault_named": one.fault in said["named"]} if said else {}


def asked(drawn: Federation, task: Task, seed: int, only: str = "", **options: Any) -> Answer:
    """The advice on a federation; where files are questioned, once more with every proposal accepted.

    Args:
        drawn: the federation.
        task: what is predicted.
        seed: of the advice.
        only: the name of the one partner that takes part; by default all do.
        options: keywords of `coterie.advise`.
    """
    partners = {one.name: one.columns for one in drawn.partners if only in ("", one.name)}
    more = options | ({"event": task.event} if task.event else {"kind": "regression"} if task.kind == "numbers" else {})
    questioned: list[tuple[str, str]] = []
    start = process_time()
    try:
        try:
            advice = coterie.advise(drawn.own, partners, task.label, seed=seed, **more)
        except BadFiles as error:
            questioned = [(one.file, one.what) for one in error.findings]
            advice = coterie.advise(drawn.own, partners, task.label, seed=seed, repair=True, **more)
        predicted = outputs(advice, task, drawn.test)
        alone = alone_outputs(advice, task, drawn.test)
    except Exception as error:  # whatever ends an advice is a result of the grid
        return Answer(seconds=process_time() - start, error=f"{type(error).__name__}: {error}"[:500])
    data, seconds = advice.data, process_time() - start
    said = {entry["name"]: judged(entry, drawn, questioned) for entry in data["partners"]}
    return Answer(predicted, alone, said, str(data["worth_it"]), _value(data["delivered"]["gain"]), seconds)


def alone_outputs(advice: Any, task: Task, rows: Columns) -> np.ndarray | None:
    """As `outputs`, by the model of the own rows alone; None where the advice stores none."""
    if not (folder := advice.folder / "alone").is_dir() or not hasattr(advice, "hold"):
        return None
    advice.hold(*load_model(folder))
    return outputs(advice, task, rows)


def outputs(advice: Any, task: Task, rows: Columns) -> np.ndarray:
    """Probabilities in the order of the task's classes; numbers; of times a number that is larger the later."""
    features = {name: values for name, values in rows.items() if name not in (task.label, task.event)}
    if task.kind != "classes":
        found = np.asarray(advice.predict(features), dtype=float)
        return -found if task.kind == "times" else found  # of times it is a risk
    shares, known = advice.predict_proba(features), [str(name) for name in advice.classes]
    return np.stack([shares[:, known.index(k)] if k in known else np.zeros(len(shares)) for k in task.classes], 1)


def judged(entry: Mapping[str, Any], drawn: Federation, questioned: list[tuple[str, str]]) -> dict[str, Any]:
    """What advice.json and the questions before it say of a partner: named are columns that are said to differ."""
    before = " ".join(what for file, what in questioned if entry["name"] in file)
    differs = entry["verdict"] == DIFFERS or "differs" in entry
    said = f"{before} {json.dumps({key: entry[key] for key in entry if key != 'name'})}" if differs else before
    columns = [*drawn.table.features, drawn.table.label]
    named = [column for column in columns if re.search(rf"(?<!\w){re.escape(column)}(?!\w)", said)]
    copy = entry["verdict"] == COPY or any(word in before for word in COPIED)
    told = {"verdict": entry["verdict"], "probability": entry.get("probability"), "gain": _value(entry.get("gain"))}
    return {**told, "named": named, "copy": copy}


def _value(given: Any) -> float | None:
    return given.get("value") if isinstance(given, Mapping) else given
