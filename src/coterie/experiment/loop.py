"""The only loop. Methods do not evaluate, log, save or print; all of that happens here."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol

from torch import Tensor

from coterie import machine
from coterie.errors import NoClients, RunError, Uncomputable, UsageError, clean, client_label, gist, is_arithmetic
from coterie.experiment import checkpoint
from coterie.experiment.build import Parts, using_threads
from coterie.experiment.compiling import Choice, Compiling, is_ours
from coterie.experiment.completed import Completed
from coterie.experiment.config import RunTable, code_changes, platform_of
from coterie.experiment.ending import Interrupted as Interrupted
from coterie.experiment.ending import Models, Outcome, Story, complete_views, seen, summarised, write_results
from coterie.experiment.ending import Result as Result
from coterie.experiment.ending import stored as stored
from coterie.experiment.guard import MEASURE, better
from coterie.experiment.measuring import (
    all_finite,
    finite_or_none,
    is_finite,
    is_number,
    recorded,
    recorded_names,
    sampled,
)
from coterie.experiment.records import RECORD, Records, read_lines, rounds_done
from coterie.experiment.watching import terminable
from coterie.federation.ledger import Ledger
from coterie.federation.screening import NOT_FINITE
from coterie.federation.stages.faults import SPOILS
from coterie.federation.tree import named_leaves
from coterie.federation.work import remote_memories
from coterie.measures import Measure, declared
from coterie.methods import View
from coterie.methods.registry import learns_weights
from coterie.numerics import Draw
from coterie.problems.base import measured
from coterie.stop import Rule, rule
from coterie.storage import write_atomically, write_json

IN_PLACE_CHECKS = 2  # rounds in which a method is watched for writing into its state
INTERVAL = 1.0  # seconds between two checkpoints


class Observer(Protocol):
    """Somebody who watches a run: the live display, a logger."""

    def started(self, parts: Parts, done: int) -> None:
        """Rounds are about to begin; `done` were done before."""

    def recorded(self, line: dict[str, Any], view: View) -> None:
        """A round was recorded."""

    def ended(self, summary: dict[str, Any]) -> None:
        """The run is over."""


@terminable()
def run_rounds(
    parts: Parts,
    folder: Path | None,
    observer: Observer | None = None,
    *,
    resume: bool = False,
    home: Path | None = None,
    stop: Rule | None = None,
    again: str = "",
    notes: Sequence[str] = (),
) -> Result:
    """Run or resume the rounds of a configuration; with a folder, records and checkpoints are kept there.

    Ctrl-C and SIGTERM are raised as `Interrupted` once the last completed round is saved.

    Args:
        parts: the live objects of the run.
        folder: the result folder, if there is one.
        observer: receives every recorded round.
        resume: whether to go on from the last checkpoint.
        home: the folder that the user resumes, where that is not this one but one around it.
        stop: when to end early; by default the rule of run.stop.
        again: how the user resumes an interrupted run; by default with `coterie resume`.
        notes: what the summary shall say.
    """
    if stop is None and parts.config.run.stop is not None:
        stop = rule(parts.config.run.stop)
    done = Completed(parts.method.init(parts.problem, parts.fed.n), 0, 0.0, parts.fed.ledger.as_dict(), {})
    notes = list(notes)
    if folder is not None and resume:
        found = checkpoint.load(folder / "checkpoint", done.state, parts.config.settings())
        if found is not None:
            state, progress, complaints = found
            notes += complaints
            done = Completed.of(state, progress, lambda state: seen(parts, state))
            parts.fed.book.ledger = Ledger.from_dict(progress.ledger)
        elif (lost := rounds_done(folder)) > 0:
            notes += [f"{folder / 'checkpoint'} holds no checkpoint: the run, recorded up to round {lost}, starts over"]
    with nullcontext() if folder is None else Records(folder, done.lengths) as records:
        run = _Run(parts, folder, records, observer, done, stop)
        try:
            with using_threads(parts.config.run.threads):
                file = folder / "config.toml" if folder is not None and resume else None
                other_code = code_changes(parts.config, file) if file else []
                notes += run.concerned([*machine.concerns(platform_of(file) if file else {}), *other_code])
                if resume:
                    run.resumed(notes)
                if observer is not None:
                    observer.started(parts, done.rounds)
                    run.tell("noted", notes)
                outcome = run.rounds()
        except KeyboardInterrupt:
            run.undo()
            outcome = Outcome("stopped", _how_to_resume(home or folder, again))
        finally:
            run.compiling.close()
            run.save()
    result = run.finish(outcome, notes)
    if outcome.name == "stopped":
        raise Interrupted(result)
    return result


@dataclass
class _Run:
    """The loop's own bookkeeping for one run."""

    parts: Parts
    folder: Path | None
    records: Records | None
    observer: Observer | None
    done: Completed
    rule: Rule | None
    weights: list[tuple[int, Tensor]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    stopped: str = ""
    unchecked: int = IN_PLACE_CHECKS

    def __post_init__(self) -> None:
        self.draw = Draw.of(self.parts.config.run.seed, device=self.parts.fed.sizes.device)
        self.names: dict[str, None] = {}  # of the numbers in the record
        self.history: list[dict[str, Any]] = []
        if self.folder is not None and self.done.lengths.get(RECORD):
            for line in read_lines(self.folder / RECORD):
                self.remember(line)
        self.clock = perf_counter() - self.done.seconds
        self.saved = self.done.rounds or -1
        self.written = perf_counter()
        # nodes may forget what nobody here holds any more; a run may have to go back to these
        self.safe = deque([remote_memories(self.done.state)], maxlen=checkpoint.KEEP)
        self.guarded = guarded(self.parts, self.done.state)
        run = self.parts.config.run
        threads = run.threads if isinstance(run.threads, int) else 1
        self.compiling = Compiling(self.parts.method, self.choice(), threads)
        self.quick = sampled(self.parts.problem, self.parts.config.run)  # for records before the last

    def rounds(self) -> Outcome:
        known = self.parts.fed.book.drain()  # before the first round
        if not self.history:
            self.note(known)
            view = seen(self.parts, self.done.state)
            measures = measured(self.quick, view)
            first = self.done._replace(guard=self.done.guard.after(finite_or_none(measures.get(MEASURE))))
            self.complete(self.record(first, view, measures))
            if self.folder is not None:
                write_json(self.folder / "measures.json", [measure.as_dict() for measure in self.measures()])
                if self.parts.problem.names:
                    write_json(self.folder / "clients.json", list(self.parts.problem.names))
        if self.rule is not None:
            self.rule = self.rule.bound(self.measures())
            self.stopped = self.rule(self.history)
        for t in range(self.done.rounds, self.parts.config.run.rounds):
            if self.spent(self.done) or self.stopped:
                break
            try:
                outcome = self.round(t)
            except Uncomputable as error:
                self.undo()
                outcome = Outcome("failed", f"in round {t + 1}: {error}")
            if outcome is not None:
                return outcome
        if self.done.rounds and not self.done.trained:
            return Outcome("failed", f"no round trained anything: {self.done.skipped}.")
        return Outcome("finished")

    def round(self, t: int) -> Outcome | None:
        """One round; an outcome if the run cannot go on."""
        config, fed = self.parts.config, self.parts.fed
        draw = self.draw.round(t)
        skipped = ""
        versions = self.versions()
        try:
            with self.computing():
                state = self.compiling.round(fed.begin(t + 1, draw), self.done.state, draw, self.left)
            events = fed.book.drain()
        except NoClients as error:
            events = fed.book.drain()
            if error.phase is not None and _not_finite(events, error.phase):
                self.note(events)
                return self.diverged(t + 1)
            skipped = _with_first_client(f"in round {t + 1} {error}", events, self.parts.problem.names)
            events.append({"round": t + 1, "event": "skipped", "reason": clean(str(error))})
            state = self.done.state if error.state is None else error.state
        except RunError as error:  # the method or the network found out that it cannot go on, and says what to change
            self.note(fed.book.drain())
            return Outcome("failed", f"in round {t + 1}: {error}")
        self.unwritten(versions)
        self.note(events + self.compiled(t + 1))
        if not all_finite(state):
            return self.diverged(t + 1)
        done = self.done._replace(
            state=state,
            rounds=t + 1,
            seconds=perf_counter() - self.clock,
            ledger=fed.ledger.as_dict(),
            trained=self.done.trained + (not skipped),
            skipped=self.done.skipped or skipped,
        )
        last = t + 1 == config.run.rounds or self.spent(done)
        recorded = last or (t + 1) % config.run.record == 0
        problem = self.parts.problem if last else self.quick
        view, measures = None, None
        if self.guarded and not skipped:
            with self.computing():
                view = seen(self.parts, state)
                measures = measured(problem, view) if recorded else self.parts.problem.validate(view)
            kept = self.judged(done, finite_or_none(measures.get(MEASURE)))
            if kept.state is not state:
                view, measures = None, None
            done = kept
        if recorded:
            with self.computing():
                view = seen(self.parts, done.state) if view is None else view
                measures = measured(problem, view) if measures is None else measures
            done = self.record(done, view, measures)
            self.stopped = self.rule(self.history) if self.rule is not None else ""
            if self.stopped:
                self.note([{"round": t + 1, "event": "early stop", "reason": clean(self.stopped)}])
        self.complete(done)
        if last or self.stopped or self.due():
            self.save()
        return None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, the method or the problem computes: an arithmetic error is an outcome, and no bug of the loop's."""
        try:
            yield
        except Exception as error:
            if not is_arithmetic(error):
                raise
            after, name = self.parts.fed.book.phase or "the start", self.parts.method.name
            raise Uncomputable(
                f"after {after}, {name} met numbers that it cannot compute with ({gist(error)}). Set federation.norm, "
                "so that longer updates are rejected, or lower the step size."
            ) from error

    def choice(self) -> Choice:
        """`run.compile`, where rounds may be recorded at all. A recording runs code on tensors without numbers, and
        code of somebody else might remember them; that is recorded by the user's word only."""
        run = self.parts.config.run
        if run.portable or run.engine != "local" or run.device != "cpu":
            return False
        return run.compile if run.compile != "auto" or is_ours(self.parts) else False

    def left(self) -> float:
        """How many rounds are left, by the number of rounds and by what is spent of the budgets."""
        run, total, done = self.parts.config.run, self.done.ledger["total"], max(1, self.done.rounds)
        spent = {run.exchanges: total["rounds"], run.budget: total["bytes_up"] + total["bytes_down"]}
        by_budget = [done * (limit / max(1, used) - 1.0) for limit, used in spent.items() if limit is not None]
        return min([run.rounds - self.done.rounds, *by_budget])

    def compiled(self, t: int) -> list[dict[str, Any]]:
        """What is to be noted about compiled rounds after round t; config.toml keeps what was chosen."""
        start, reason = self.compiling.chosen, self.compiling.reason
        self.compiling.chosen, self.compiling.reason = None, ""
        events = [{"round": t, "event": "warning", "reason": clean(note)} for note in self.compiling.notes]
        self.compiling.notes.clear()
        if start is not None:
            self.choose(compile=start)
            return [*events, {"round": t, "event": "compiled", "reason": f"rounds are compiled from round {start} on"}]
        wanted = reason and self.parts.config.run.compile not in ("auto", False)
        return [*events, {"round": t, "event": "not compiled", "reason": clean(reason)}] if wanted else events

    def choose(self, **run: Any) -> None:
        """Write down what was chosen by measurement."""
        self.parts = self.parts._replace(config=self.parts.config.with_run(**run))
        if self.folder is not None:
            write_atomically(self.folder / "config.toml", self.parts.config.as_record().encode())

    def due(self) -> bool:
        """Whether it is time for a checkpoint: by rounds, or by seconds: writing can take longer than a round."""
        every = self.parts.config.run.checkpoint
        if every == "auto":
            return perf_counter() - self.written >= INTERVAL
        return self.done.rounds % every == 0

    def versions(self) -> list[tuple[str, Tensor, int]]:
        """The tensors of the state with their numbers of changes; in the first rounds only, because it costs time."""
        if self.unchecked <= 0:
            return []
        self.unchecked -= 1
        found = [(name, leaf) for name, leaf in named_leaves(self.done.state) if isinstance(leaf, Tensor)]
        return [(name, leaf, leaf._version) for name, leaf in found if not leaf.is_inference()]

    def unwritten(self, versions: list[tuple[str, Tensor, int]]) -> None:
        """Refuse a method that wrote into its state: rejected rounds, resumes and records need it as it was."""
        changed = [name for name, leaf, before in versions if leaf._version != before]
        if changed:
            self.saved = self.done.rounds  # what is left of this state is not to be saved
            raise RunError(
                f"{self.parts.method.name} wrote into its state in place ({', '.join(changed)}); a round must return a "
                "new state and leave the old one as it was. Write x = x - step * g instead of x -= step * g or "
                "x.sub_(…), or work on x.clone()."
            )

    def judged(self, done: Completed, loss: float | None) -> Completed:
        """The round, or the state before it where the guard rejects its validation loss."""
        guard = done.guard
        if guard.allows(loss):
            return done._replace(guard=guard.after(loss))
        after = "not finite" if loss is None else f"{loss:.4g}"
        reason = (
            f"the validation loss rose from {guard.last:.4g} to {after}, beyond everything that this run has shown; "
            "the state before the round is kept"
        )
        event = {"round": done.rounds, "event": "rejected round", "reason": reason, "before": guard.last, "after": loss}
        self.note([event])
        kept = self.parts.method.rejected(self.done.state, done.state)
        return done._replace(state=kept, guard=guard.refused())

    def spent(self, done: Completed) -> bool:
        """Whether a budget of bytes or of exchanges, if there is one, is used up."""
        return is_spent(self.parts.config.run, done.ledger["total"])

    def complete(self, done: Completed) -> None:
        """In one assignment, so that an interruption finds a round whole or not at all."""
        self.done = done._replace(lengths=self.records.lengths() if self.records else {})

    def undo(self) -> None:
        """Forget what a round that was interrupted had recorded."""
        done = self.done
        if self.records:
            self.records.cut(done.lengths)
        self.history = [line for line in self.history if line["round"] <= done.rounds]
        self.weights = [(rounds, weights) for rounds, weights in self.weights if rounds <= done.rounds]
        self.events = [event for event in self.events if event["round"] <= done.rounds]

    def measures(self) -> tuple[Measure, ...]:
        """The declared measures of the record, the most important first."""
        return declared(self.parts.problem.declares, self.names)

    def note(self, events: list[dict[str, Any]]) -> None:
        if self.records is None:
            self.events += events
            return
        for event in events:
            self.records.event(event)

    def happened(self) -> dict[str, int]:
        """How often each kind of event happened in the whole run; resumes are no part of it."""
        events = self.events if self.folder is None else read_lines(self.folder / "events.jsonl")
        counts = Counter(event["event"] for event in events)
        return {kind: counts[kind] for kind in sorted(counts.keys() - {"resumed"})}

    def concerned(self, concerns: list[str]) -> list[str]:
        """Record what is to be known about the bits of this run, and report it."""
        self.note([{"round": self.done.rounds, "event": "bits", "reason": concern} for concern in concerns])
        self.tell("warned", concerns)
        return concerns

    def tell(self, kind: Literal["noted", "warned"], texts: Sequence[str]) -> None:
        """Give texts to an observer that listens to them."""
        hear: Callable[[str], None] = getattr(self.observer, kind, lambda text: None)
        for text in texts:
            hear(text)

    def resumed(self, notes: list[str]) -> None:
        self.note([{"round": self.done.rounds, "event": "resumed", "reason": "; ".join(notes)}])
        self.complete(self.done)

    def record(self, done: Completed, view: View, measures: Mapping[str, float]) -> Completed:
        """Write a line of the record; the round with its best model."""
        line = self.line(done, view, measures)
        self.remember(line)
        if self.records:
            self.records.metrics(line)
            if view.weights is not None:
                self.records.weights(done.rounds, view.weights)
        elif view.weights is not None:
            self.weights.append((done.rounds, view.weights))
        if self.observer:
            self.observer.recorded(line, view)
        return done._replace(best=better(line, view, done.best))

    def remember(self, line: dict[str, Any]) -> None:
        """Keep a line of the record; of one that a folder holds, the first, the last two, and what the rule sees."""
        self.names |= {k: None for k, v in line.items() if v is None or is_number(v)}
        self.history.append(line)
        if self.folder is None or len(self.history) <= 3 or (self.rule is not None and self.rule.function):
            return
        if self.rule is None:
            del self.history[1]
        else:
            self.history[-3] = {k: v for k, v in self.history[-3].items() if k in ("round", self.rule.measure)}

    def line(self, done: Completed, view: View, measures: Mapping[str, float] | None = None) -> dict[str, Any]:
        """What is recorded of a round. JSON has no infinity and no NaN: they become null."""
        values = {k: v if is_finite(v) else None for k, v in recorded(self.parts.problem, view, measures).items()}
        total = done.ledger["total"]
        return {"round": done.rounds, **values, "seconds": round(done.seconds, 3), "communication": total}

    def save(self) -> None:
        """A checkpoint of the last completed round, unless there is one already."""
        if self.folder is None or self.records is None or self.saved == self.done.rounds:
            return
        self.records.flush()
        done = self.done
        checkpoint.save(self.folder / "checkpoint", done.state, done.progress(), self.parts.config.settings())
        self.saved = done.rounds
        self.written = perf_counter()
        self.safe.append(remote_memories(done.state))

    def diverged(self, t: int) -> Outcome:
        steps = {k: v for k, v in self.parts.config.method.items() if k.endswith("step") and isinstance(v, float | str)}
        shown = {k: f"{v:g}" if isinstance(v, float) else v for k, v in steps.items()}
        knobs = " or ".join(f"method.{k} (now {v})" for k, v in shown.items()) or "the step size"
        return Outcome(
            "diverged",
            f"the values stopped being finite in round {t}; the model of round {t - 1} is kept. Lower {knobs}.",
        )

    def finish(self, outcome: Outcome, notes: list[str]) -> Result:
        parts, done = self.parts, self.done
        view = seen(parts, done.state)
        whole = self.quick is parts.problem or done.rounds == parts.config.run.rounds or self.spent(done)
        recorded = whole and bool(self.history) and self.history[-1]["round"] == done.rounds
        final = self.history[-1] if recorded else self.line(done, view)
        parts.fed.book.ledger = Ledger.from_dict(done.ledger)
        view, best = complete_views(parts, view, done, notes)
        models = Models(view, best, Ledger.from_dict(parts.fed.ledger.as_dict()))  # with what that has moved
        first = self.history[0] if self.history else {}
        story = Story(first, final, self.measures(), self.happened(), self.stopped, notes)
        summary = summarised(parts, done, outcome, models, story)
        if self.folder is not None:
            write_results(self.folder, parts.problem, models, summary)
        if self.observer:
            self.observer.ended(summary)
        record = self.history if self.folder is None else self.folder / RECORD
        memory = (self.weights, self.events, parts.config)
        return Result(view, record, models.ledger, summary, done.state, *memory, best)


def check_stop(parts: Parts, stop: Rule | None = None) -> None:
    """Refuse a rule of early stopping whose measure the record will not have.

    Args:
        parts: the live objects of the run.
        stop: the rule; by default that of run.stop.
    """
    if stop is None and parts.config.run.stop is not None:
        stop = rule(parts.config.run.stop)
    if stop is not None and stop.function is None:
        names = recorded_names(parts.problem, seen(parts, parts.method.init(parts.problem, parts.fed.n)))
        stop.bound(declared(parts.problem.declares, names))


def guarded(parts: Parts, state: Any) -> bool:
    """Whether rounds are judged by the validation loss: federation.guard, or by default for methods that learn weights.

    The server must hold the validation rows; then judging costs one evaluation on them per round, and no traffic.

    Args:
        parts: the live objects of the run.
        state: any state of the method.
    """
    wanted = parts.config.federation.guard
    learns = parts.method.learns_weights or learns_weights(parts.config.run.method)
    if wanted is False or (wanted == "auto" and not learns):
        return False
    able = parts.fed.target == "server" and MEASURE in parts.problem.validate(parts.method.view(state))
    if wanted is True and not able:
        raise UsageError(
            "federation.guard = true needs validation rows at the server and one model for all, and this run lacks "
            'them; leave it at "auto".'
        )
    return able


def is_spent(run: RunTable, moved: Mapping[str, int]) -> bool:
    """Whether what was moved, up and down, reaches run.budget, or its rounds of communication reach run.exchanges."""
    if run.exchanges is not None and moved["rounds"] >= run.exchanges:
        return True
    return run.budget is not None and moved["bytes_up"] + moved["bytes_down"] >= run.budget


def _not_finite(events: list[dict[str, Any]], phase: str) -> bool:
    """Whether a phase without a sound reply failed because the values diverged: at least half of its clients replied
    with values that are not finite. A reply that was spoilt on its way, or a minority, says nothing of the model."""
    here = [event for event in events if event.get("phase") == phase and "client" in event]
    spoilt = {event["client"] for event in here if event["event"] in SPOILS}
    failed = {event["client"] for event in here} - spoilt
    not_finite = {event["client"] for event in here if event["reason"] in NOT_FINITE} - spoilt
    return bool(not_finite) and 2 * len(not_finite) >= len(failed)


def _with_first_client(why: str, events: list[dict[str, Any]], names: Sequence[str]) -> str:
    """Why a round was skipped, with what kept the first client away."""
    first = next((event for event in events if "client" in event and event.get("reason")), None)
    if first is None:
        return why
    return f"{why} ({client_label(first['client'], names)}: {first['event']}, {first['reason']})"


def _how_to_resume(folder: Path | None, again: str = "") -> str:
    return "" if folder is None else f"stopped by the user; resume with: {again or f'coterie resume {folder}'}"
