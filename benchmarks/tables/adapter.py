"""All that the grid knows of coterie: how an advice is asked for, what its file says, and what its models predict.

If keys of advice.json change, this is the only module to change.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np

from benchmarks.tables.references import aligned
from coterie.advise.advise import Effort, advise, prepare_files
from coterie.errors import CoterieError
from coterie.experiment import config as configuration
from coterie.experiment.predict import predict
from coterie.problems.files.findings import BadFiles

HELPS, HARMS = "helps", "harms"
VERDICTS = ("helps", "may help", "no use", "cannot tell", "harms")
MEASURES = {"squared_error": "mse"}  # where the grid has another name
QUICK_ROUNDS = 5


class Judged(NamedTuple):
    """What an advice says of one partner; probability that it helps is None where none is given."""

    file: str
    verdict: str
    gain: tuple[float, float, float]
    probability: float | None
    weight: float | None


class Compared(NamedTuple):
    """What is delivered against training alone: the measure, and the gain with its interval, positive where better."""

    measure: str
    gain: tuple[float, float, float]
    probability: float | None


class Advice(NamedTuple):
    """An advice, or why there is none. `stopped` holds what was questioned before: (file, what)."""

    partners: tuple[Judged, ...]
    answer: str
    delivered: str
    compared: tuple[Compared, ...]
    stopped: tuple[tuple[str, str], ...]
    seconds: float
    error: str = ""


def asked(folder: Path, label: str, seed: int, *, quick: bool = False) -> Advice:
    """The advice on a scenario's folder; where files are questioned, once more with every proposal accepted."""
    settings: dict[str, Any] = {}
    start = process_time()
    stopped: tuple[tuple[str, str], ...] = ()
    try:
        try:
            found = _advised(folder, label, seed, settings, quick)
        except BadFiles as error:
            stopped = tuple((one.file, one.what) for one in error.findings)
            settings = {"problem.repair": True}
            found = _advised(folder, label, seed, settings, quick)
    except Exception as error:  # whatever ends an advice is a result of the grid
        return Advice((), "", "", (), stopped, process_time() - start, f"{type(error).__name__}: {error}")
    seconds = process_time() - start
    return read(found)._replace(stopped=stopped, seconds=seconds)


def _advised(folder: Path, label: str, seed: int, settings: Mapping[str, Any], quick: bool) -> Mapping[str, Any]:
    effort = Effort(1, 99, 0) if quick else Effort()
    return advise(_configured(folder, label, seed, settings, quick), folder / "advice", effort, force=True)


def _configured(folder: Path, label: str, seed: int, settings: Mapping[str, Any], quick: bool) -> configuration.Config:
    """As `coterie advise` makes it."""
    from coterie.cli.advise import ROUNDS

    flags = {
        "run.rounds": QUICK_ROUNDS if quick else ROUNDS,
        "run.problem": "files",
        "run.seed": seed,
        "problem.clients": f"{folder}/sites/*.csv",
        "problem.target": f"{folder}/mine.csv",
        "problem.label": label,
    }
    return configuration.load(None, dict(settings), flags)


def questioned(folder: Path, label: str, seed: int) -> list[tuple[str, str]]:
    """(file, what) of all that is found in a scenario's files before training; nothing is trained."""
    try:
        prepared = prepare_files(_configured(folder, label, seed, {}, True), 1)
    except BadFiles as error:
        return [(one.file, one.what) for one in error.findings]
    except CoterieError as error:
        return [("", str(error))]
    known = [(one.file, one.what) for one in prepared.findings]
    return known + [("", note) for note in prepared.notes if not any(what in note for _, what in known)]


def read(found: Mapping[str, Any]) -> Advice:
    """What advice.json says."""
    partners = tuple(
        Judged(one["name"], one["verdict"], _interval(one["gain"]), one.get("probability"), _value(one.get("weight")))
        for one in found["partners"]
    )
    return Advice(partners, str(found["worth_it"]), found["delivered"]["strategy"], _compared(found), (), 0.0)


def _compared(found: Mapping[str, Any]) -> tuple[Compared, ...]:
    """The comparison of what is delivered with training alone, in the advice's own measure."""
    own, name = found["delivered"], str(found["measure"]["name"])
    return (Compared(MEASURES.get(name, name), _interval(own["gain"]), own["probability"]),)


def _interval(given: Mapping[str, float]) -> tuple[float, float, float]:
    return given["value"], given["low"], given["high"]


def _value(given: Any) -> float | None:
    found: float | None = given["value"] if isinstance(given, Mapping) else given
    return found


def predicted(folder: Path, file: Path, classes: Sequence[str]) -> np.ndarray:
    """Probabilities [n, classes] or numbers [n] for a file's rows by a stored model."""
    table = predict(folder, file)
    if not classes:
        return np.array([float(row[1]) for row in table.rows])
    found = [name[2:-1] for name in table.header[2:]]
    return aligned(np.array([[float(share) for share in row[2:]] for row in table.rows]), found, classes)


def delivered_model(folder: Path) -> Path:
    """The model that the advice on a scenario's folder delivered."""
    return folder / "advice" / "model"


def alone_model(folder: Path) -> Path:
    """The model of the own rows alone that the advice stored beside the one it delivered."""
    return folder / "advice" / "alone"


def label_deviation(model: Path) -> float:
    """What a number's error is divided by in an advice's own measure; 1 for classes."""
    stored = json.loads((model / "preprocess.json").read_text())
    return float(stored.get("label_deviation") or 1.0)
