"""How a run ends: its outcome, the models that it leaves, its summary and their files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from coterie import machine
from coterie.errors import RunError, UsageError, cleaned
from coterie.experiment import checkpoint
from coterie.experiment.build import Parts
from coterie.experiment.completed import Completed
from coterie.experiment.config import Config
from coterie.experiment.guard import Best, comparison
from coterie.experiment.measuring import all_finite, is_finite, rounded, sampled
from coterie.experiment.privacy import budget
from coterie.experiment.records import RECORD, read_lines, save_model
from coterie.federation.ledger import Ledger
from coterie.federation.work import with_recall
from coterie.measures import Measure
from coterie.methods import View
from coterie.numerics import clusters
from coterie.plugins import label
from coterie.problems.base import Problem, measured
from coterie.storage import write_json

KNOWN = {"round", "seconds", "communication"}  # of a record: what is no measure


class Outcome(NamedTuple):
    """How a run ended: finished, diverged, failed or stopped; and what to do about it."""

    name: str
    message: str = ""


class Result(NamedTuple):
    """What a run leaves in memory: the state, what is seen of it, its record and its summary.

    Lines of the record, weights by round and events are kept only where there is no folder for them. The configuration
    has everything that was chosen by measurement during the run.
    """

    view: View
    record: list[dict[str, Any]] | Path
    ledger: Ledger
    summary: dict[str, Any]
    state: Any
    weights: list[tuple[int, Tensor]]
    events: list[dict[str, Any]]
    config: Config
    best: Best | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of the record; those of a folder are read there."""
        return self.record if isinstance(self.record, list) else read_lines(self.record)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during the rounds of a run; `result` is what was trained until then, and is saved."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.summary["message"])
        self.result = result


class Models(NamedTuple):
    """What a run leaves: the last view, the best one, and the ledger of both."""

    view: View
    best: Best | None
    ledger: Ledger


class Story(NamedTuple):
    """What was recorded of a run: its first and last line, measures, events, why it was stopped, and notes."""

    first: Mapping[str, Any]
    final: Mapping[str, Any]
    measures: Sequence[Measure]
    events: dict[str, int]
    stopped: str
    notes: list[str]


def summarised(parts: Parts, done: Completed, outcome: Outcome, models: Models, story: Story) -> dict[str, Any]:
    """The summary of a run.

    Args:
        parts: the live objects of the run.
        done: its last completed round.
        outcome: how it ended.
        models: what it leaves.
        story: what was recorded.
    """
    config, problem, (view, best, ledger) = parts.config, parts.problem, models
    summary: dict[str, Any] = {
        "method": label(config.run.method),
        "problem": label(config.run.problem),
        "seed": config.run.seed,
        "rounds": done.rounds,
        "outcome": outcome.name,
        "message": outcome.message,
        "final": {k: v for k, v in story.final.items() if k not in KNOWN},
        "measures": [measure.as_dict() for measure in story.measures],
        "weights": None if view.weights is None else rounded(view.weights.tolist()),
        "friends": problem.friends,
        "communication": ledger.total._asdict(),
        "seconds": round(done.seconds, 3),
        "platform": {**machine.platform(), "chunk_free": not machine.depends_on_chunk()},
    }
    extra: dict[str, Any] = {  # as far as there is something to say
        "wire": ledger.wire._asdict() if ledger.wire.exchanges else None,
        "names": list(problem.names),
        "personal": problem.by_client(view),
        "clusters": clusters(view.weights) if view.weights is not None and view.weights.dim() == 2 else None,
        "best": None if best is None else {k: v for k, v in best.line.items() if k not in KNOWN - {"round"}},
        "privacy": None if config.privacy.clip is None else budget(parts, done.state, story.events),
        "compile": None if config.run.compile == "auto" else config.run.compile,
        "events": story.events,
        "stopped": story.stopped,
        "data_notes": list(problem.notes),
        "notes": story.notes,
    }
    summary |= {key: value for key, value in extra.items() if value}
    if best is not None and (worse := comparison(story.first, best.line, story.final)):
        summary["best"]["note"] = worse
    return summary


def write_results(folder: Path, problem: Problem, models: Models, summary: dict[str, Any]) -> None:
    """Write the models, the ledger and the summary, which comes last.

    Args:
        folder: the result folder.
        problem: the problem of the run.
        models: what the run leaves.
        summary: its summary.
    """
    about = {"format": "pt", "coterie_method": summary["method"], "coterie_problem": summary["problem"]}
    save_model(folder / "model.safetensors", problem.named(models.view), about)
    if models.best is not None:
        about["coterie_round"] = str(models.best.round)
        save_model(folder / "model-best.safetensors", problem.named(models.best.view), about)
    files = {**problem.artifacts, "ledger.json": models.ledger.as_dict(), "summary.json": summary}
    for name, data in files.items():
        write_json(folder / name, data)


def complete_views(parts: Parts, view: View, done: Completed, notes: list[str]) -> tuple[View, Best | None]:
    """The last view and the best one with what their models need after training."""
    last, best = with_buffers(parts, view, notes), done.best
    if best is None:
        return last, None
    if sampled(parts.problem, parts.config.run) is not parts.problem:  # its record is of a sample of the test rows
        values = measured(parts.problem, best.view)
        best = best._replace(line={**best.line, **{k: v if is_finite(v) else None for k, v in values.items()}})
    return last, best._replace(view=last if best.round == done.rounds else with_buffers(parts, best.view, notes))


def with_buffers(parts: Parts, view: View, notes: list[str]) -> View:
    """The view with what the model needs after training; where clients fail or privacy forbids it, as it is."""
    if parts.config.privacy.clip is not None or not all_finite(view.model):
        return view
    try:
        return parts.problem.finished(parts.fed, view)
    except RunError as error:
        notes.append(f"the model has no running statistics of batch norm: {error}")
        return view
    finally:
        parts.fed.book.drain()


def seen(parts: Parts, state: Any) -> View:
    """What is seen of a state; where that is in client memory elsewhere, it is asked for."""
    return parts.method.view(with_recall(state, getattr(parts.fed.engine, "recall", None)))


def stored(parts: Parts, folder: Path) -> Result:
    """The result of a run that has ended, as its folder holds it.

    Args:
        parts: the live objects of the same run.
        folder: its result folder.
    """
    template = parts.method.init(parts.problem, parts.fed.n)
    found = checkpoint.load(folder / "checkpoint", template, parts.config.settings())
    if found is None:
        raise UsageError(f"{folder} has ended but holds no checkpoint; choose another out=.")
    state, progress, _ = found
    done = Completed.of(state, progress, lambda state: seen(parts, state))
    summary = cleaned(json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    events = read_lines(folder / "events.jsonl")
    ledger = Ledger.from_dict(json.loads((folder / "ledger.json").read_text(encoding="utf-8")))
    view, best = complete_views(parts, seen(parts, state), done, [])
    return Result(view, folder / RECORD, ledger, summary, state, [], events, parts.config, best)
