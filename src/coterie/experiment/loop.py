"""The only loop. Methods do not evaluate, log, save or print; all of that happens here."""

import json
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from coterie.errors import NoClients, UsageError
from coterie.experiment import checkpoint
from coterie.experiment.build import Parts, using_threads
from coterie.experiment.files import write_json
from coterie.experiment.records import Records, save_model
from coterie.federation.ledger import Ledger
from coterie.federation.tree import Tree, named_leaves
from coterie.federation.work import Memory, held
from coterie.methods import View
from coterie.numerics import Draw


class Observer(Protocol):
    """Somebody who watches a run: the live display, a logger."""

    def started(self, parts: Parts, done: int) -> None:
        """Rounds are about to begin; `done` were done before."""

    def recorded(self, line: dict[str, Any], view: View) -> None:
        """A round was recorded."""

    def ended(self, summary: dict[str, Any]) -> None:
        """The run is over."""


class Outcome(NamedTuple):
    """How a run ended: finished, diverged or stopped; and what to do about it."""

    name: str
    message: str = ""


class Result(NamedTuple):
    """What a run leaves in memory: the state, what is seen of it, its history and its summary."""

    view: View
    history: list[dict[str, Any]]
    ledger: Ledger
    summary: dict[str, Any]
    state: Any
    weights: list[tuple[int, Tensor]]


class _Done(NamedTuple):
    """A completed round, all that a checkpoint needs."""

    state: Any
    rounds: int
    seconds: float
    ledger: dict[str, Any]


def run_rounds(parts: Parts, folder: Path | None, observer: Observer | None = None, *, resume: bool = False) -> Result:
    """Run, or go on with, the rounds of a configuration; with a folder, records and checkpoints are kept there."""
    state = parts.method.init(parts.problem, parts.fed.n)
    done = _Done(state, 0, 0.0, parts.fed.ledger.as_dict())
    lengths: dict[str, int] | None = None
    notes: list[str] = []
    if folder is not None and resume:
        found = checkpoint.load(folder / "checkpoint", state)
        if found is not None:
            state, progress, notes = found
            done = _Done(state, progress.rounds, progress.seconds, progress.ledger)
            lengths = progress.lengths
            parts.fed.book.ledger = Ledger.from_dict(progress.ledger)
    records = None if folder is None else Records(folder, lengths)
    run = _Run(parts, folder, records, observer, done)
    if observer is not None:
        observer.started(parts, done.rounds)
    try:
        with _terminable(), using_threads(parts.config.run.threads):
            outcome = run.rounds()
    except KeyboardInterrupt:
        outcome = Outcome("stopped", _how_to_resume(folder))
    finally:
        run.save()
    return run.finish(outcome, notes)


class _Run:
    """The loop's own bookkeeping for one run."""

    def __init__(
        self,
        parts: Parts,
        folder: Path | None,
        records: Records | None,
        observer: Observer | None,
        done: _Done,
    ) -> None:
        self.parts, self.folder, self.records, self.observer, self.done = (
            parts,
            folder,
            records,
            observer,
            done,
        )
        self.draw = Draw.of(parts.config.run.seed, device=parts.fed.sizes.device)
        self.history = _history(folder, records) if done.rounds else []
        self.weights: list[tuple[int, Tensor]] = []
        self.lengths = records.flush() if records else {}
        self.clock = perf_counter() - done.seconds
        self.saved = done.rounds if done.rounds else -1

    def rounds(self) -> Outcome:
        if self.done.rounds == 0:
            self.record(self.done.state, 0)
        for t in range(self.done.rounds, self.parts.config.run.rounds):
            outcome = self.round(t)
            if outcome is not None:
                return outcome
        return Outcome("finished")

    def round(self, t: int) -> Outcome | None:
        """One round; an outcome if the run cannot go on."""
        config, fed = self.parts.config, self.parts.fed
        draw = self.draw.round(t)
        try:
            state = self.parts.method.round(fed.begin(t + 1, draw), self.done.state, draw)
        except NoClients as error:
            events = fed.book.drain()
            self.note(events)
            if any(event["reason"] == "not finite" for event in events):
                return self.diverged(t + 1)
            self.note([{"round": t + 1, "event": "skipped", "reason": str(error)}])
            state = self.done.state
        self.note(fed.book.drain())
        if not _finite(state):
            return self.diverged(t + 1)
        self.done = _Done(state, t + 1, perf_counter() - self.clock, fed.ledger.as_dict())
        last = t + 1 == config.run.rounds
        if last or (t + 1) % config.run.record == 0:
            self.record(state, t + 1)
        if last or (t + 1) % config.run.checkpoint == 0:
            self.save()
        return None

    def note(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if self.records:
                self.records.event(event)

    def record(self, state: Any, rounds: int) -> None:
        view = self.parts.method.view(state)
        total = self.done.ledger["total"]
        measures = self.parts.problem.measure(view)
        line = {"round": rounds, **measures, **weight_statistics(view.weights, self.parts.problem.friends)}
        line |= {"seconds": round(self.done.seconds, 3), "communication": total}
        self.history.append(line)
        if view.weights is not None and self.records is None:  # with a folder they are in weights.csv
            self.weights.append((rounds, view.weights))
        if self.records:
            self.records.metrics(line)
            if view.weights is not None:
                self.records.weights(rounds, view.weights)
        if self.observer:
            self.observer.recorded(line, view)

    def save(self) -> None:
        """A checkpoint of the last completed round, unless there is one already."""
        if self.folder is None or self.records is None or self.saved == self.done.rounds:
            return
        self.lengths = self.records.flush()
        progress = checkpoint.Progress(self.done.rounds, self.done.seconds, self.done.ledger, self.lengths)
        checkpoint.save(self.folder / "checkpoint", self.done.state, progress)
        self.saved = self.done.rounds

    def diverged(self, t: int) -> Outcome:
        steps = {k: v for k, v in self.parts.config.method.items() if k.endswith("step") and isinstance(v, float)}
        knobs = " or ".join(f"method.{k} (now {v:g})" for k, v in steps.items()) or "the step size"
        return Outcome(
            "diverged",
            f"the values stopped being finite in round {t}; the model of round {t - 1} is kept. Lower {knobs}.",
        )

    def finish(self, outcome: Outcome, notes: list[str]) -> Result:
        view = self.parts.method.view(self.done.state)
        config = self.parts.config
        final: dict[str, Any] = next((line for line in reversed(self.history) if line["round"] <= self.done.rounds), {})
        known = {"round", "seconds", "communication"}
        ledger = Ledger.from_dict(self.done.ledger)
        summary = {
            "method": config.run.method,
            "problem": config.run.problem,
            "seed": config.run.seed,
            "rounds": self.done.rounds,
            "outcome": outcome.name,
            "message": outcome.message,
            "final": {k: v for k, v in final.items() if k not in known},
            "weights": None if view.weights is None else [float(f"{w:.9g}") for w in view.weights.tolist()],
            "friends": self.parts.problem.friends,
            "communication": ledger.total._asdict(),
            "seconds": round(self.done.seconds, 3),
        }
        if notes:
            summary["notes"] = notes
        if self.folder is not None and self.records is not None:
            self.records.close()
            about = {
                "format": "pt",
                "coterie_method": config.run.method,
                "coterie_problem": config.run.problem,
            }
            save_model(self.folder / "model.safetensors", self.parts.problem.named(view), about)
            write_json(self.folder / "ledger.json", ledger.as_dict())
            write_json(self.folder / "summary.json", summary)
        if self.observer:
            self.observer.ended(summary)
        return Result(view, self.history, ledger, summary, self.done.state, self.weights)


def weight_statistics(weights: Tensor | None, friends: int | None) -> dict[str, float]:
    """How weight is spread: the effective number of clients 1/Σw², the largest weight, the friends' share if known."""
    if weights is None:
        return {}
    w = weights.double()
    statistics = {"effective_clients": float(1.0 / w.square().sum()), "largest_weight": float(w.max())}
    if friends is not None:
        statistics["friends_weight"] = float(w[:friends].sum())
    return statistics


def _finite(state: Tree) -> bool:
    for _, leaf in named_leaves(state):
        inner = [t for _, t in named_leaves(held(leaf))] if isinstance(leaf, Memory) else [leaf]
        for tensor in inner:
            if isinstance(tensor, float) and not math.isfinite(tensor):
                return False
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return False
    return True


def _history(folder: Path | None, records: Records | None) -> list[dict[str, Any]]:
    """The lines recorded before the interruption."""
    if folder is None or records is None:
        return []
    try:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except json.JSONDecodeError as error:
        raise UsageError(f"{folder / 'metrics.jsonl'} is damaged: {error}. Start again in a new folder.") from None


def _how_to_resume(folder: Path | None) -> str:
    return "" if folder is None else f"stopped by the user; go on with: coterie resume {folder}"


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM stops a run as Ctrl-C does, with its state saved."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
