"""What a finished run left, and how a cell is read from it."""

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from coterie.errors import UsageError
from coterie.reproduce.study import Column

MEASURED = ("finished", "diverged")  # outcomes that a cell can be read from
SUMS = {
    "megabytes": ("bytes_up", "bytes_down"),
    "megabytes_up": ("bytes_up",),
    "floats": ("floats_up", "floats_down"),
    "rounds": ("rounds",),
}


class Finished(NamedTuple):
    """What a finished run left."""

    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    weights: dict[int, list[float]]  # by round; empty where there are none, or every client has weights of its own


def finished_run(folder: Path) -> Finished | None:
    """None where there is none, or where it is not finished."""
    path = folder / "summary.json"
    if not path.is_file():
        return None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        weights = _weights(folder / "weights.csv")
        return Finished(summary, lines, weights) if summary["outcome"] in MEASURED and lines else None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder} is damaged ({error}); delete it and run again.") from None


def value_of(run: Finished | None, column: Column) -> float | None:
    """A run's value in a column; None where it has none."""
    value = None if run is None else read(run, column.read)
    return None if value is None else column.times * value


def read(run: Finished, what: str) -> float | None:
    """A value of a run, by words; None where it has no such value.

    final:MEASURE, best:MEASURE (where the accuracy on selection rows was best; on validation rows where there are no
    such), lowest:MEASURE (where the loss was lowest: few rows are soon all right), tail:N:MEASURE (the mean of the last
    N records), at:ROUND:MEASURE, weights:FROM:TO (their sum at the end), most:FROM:TO (the largest of them),
    lowest:weights:… and lowest:most:…, personal:KEY (the mean over clients), personal:by_rows (the mean accuracy over
    all clients' test rows), reach:MEASURE:VALUE (rounds of communication until a record has the measure at or below
    the value; None if none has), megabytes, megabytes_up, floats (moved up and down), rounds (of communication),
    seconds.
    """
    kind, _, rest = what.partition(":")
    if kind == "final":
        final = _number(run.summary["final"].get(rest))  # of the last finite model, where a run diverged after a record
        return _number(run.lines[-1].get(rest)) if final is None else final
    if kind == "best":
        judge = "selection_accuracy" if "selection_accuracy" in run.lines[-1] else "validation_accuracy"
        best = max(run.lines, key=lambda line: _number(line.get(judge)) or 0.0)
        return _number(best.get(rest))
    if kind == "lowest":
        judge = "selection_loss" if "selection_loss" in run.lines[-1] else "validation_loss"
        lowest = min(run.lines, key=lambda line: _or_infinity(line.get(judge)))
        if rest.startswith(("weights:", "most:")):
            return _of_weights(run.weights.get(lowest["round"]), rest)
        return _number(lowest.get(rest))
    if kind == "tail":
        count, _, measure = rest.partition(":")
        found = [v for line in run.lines[-int(count) :] if (v := _number(line.get(measure))) is not None]
        return fmean(found) if found else None
    if kind == "at":
        when, _, measure = rest.partition(":")
        return next((_number(line.get(measure)) for line in run.lines if line["round"] == int(when)), None)
    if kind in ("weights", "most"):
        return _of_weights(run.summary["weights"], what)
    if kind == "personal":
        return _of_clients(run.summary.get("personal", {}), rest)
    if kind == "reach":
        measure, _, value = rest.partition(":")
        reached = (line for line in run.lines if _or_infinity(line.get(measure)) <= float(value))
        return next((float(line["communication"]["rounds"]) for line in reached), None)
    if kind == "seconds":
        return _number(run.summary.get("seconds"))
    moved = run.summary["communication"]
    if kind not in SUMS:
        raise ValueError(f"no way to read {what!r}")
    return sum(moved[key] for key in SUMS[kind]) / (1e6 if kind.startswith("megabytes") else 1.0)


def better_off(run: Finished | None, alone: Finished | None) -> float | None:
    """The share of the clients whose model is right more often, on their own test rows, than in another run.

    Args:
        run: a run with one accuracy per client.
        alone: the run to compare with, in which everybody trains alone.
    """
    if run is None or alone is None:
        return None
    with_others, by_itself = (found.summary.get("personal", {}).get("accuracy") for found in (run, alone))
    if not with_others or not by_itself or len(with_others) != len(by_itself):
        return None
    return fmean(float(a > b) for a, b in zip(with_others, by_itself, strict=True))


def _of_clients(personal: dict[str, list[float]], what: str) -> float | None:
    """The mean of a measure over the clients; by_rows is the accuracy, weighed by the clients' test rows."""
    if what == "by_rows" and "rows" in personal:
        pairs = zip(personal["accuracy"], personal["rows"], strict=True)
        return sum(accuracy * rows for accuracy, rows in pairs) / sum(personal["rows"])
    return fmean(personal[what]) if personal.get(what) else None


def _of_weights(weights: list[float] | None, what: str) -> float | None:
    """weights:FROM:TO or most:FROM:TO."""
    if weights is None:
        return None
    kind, first, last = what.split(":")
    chosen = weights[int(first) : int(last) if last else None]
    return float(sum(chosen)) if kind == "weights" else float(max(chosen))


def _weights(path: Path) -> dict[int, list[float]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not lines or not lines[0].startswith("round,client_0"):
        return {}
    rows = (line.split(",") for line in lines[1:])
    return {int(round_): [float(w) for w in row] for round_, *row in rows}


def _or_infinity(value: Any) -> float:
    found = _number(value)
    return math.inf if found is None else found


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
