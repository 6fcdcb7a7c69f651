"""Which rounds of a run are compiled. `run.compile = "auto"` chooses by measurement; config.toml keeps the choice.

A whole round is one program where it can be recorded (methods/shared/compiled.py). Where it cannot, because some
clients do more than others or clients are run in parts, the derivatives of the task are programs
(numerics/compiled.py). Compiling goes on beside the run, in processes of its own.

auto    rounds are timed. Once what is left of the run is long enough for compiling to pay, it begins; programs are used
        from the first round at which they are ready, give the plain values, and are faster
true    from the first round, whatever it costs: the run waits for the compiler
N       from round N: what auto chose, so that the same bits come again and a resumed run has those of the first
false   never
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter, process_time
from typing import Any, Literal

from coterie.errors import CoterieError
from coterie.experiment.build import Parts
from coterie.experiment.config import OWN_DATA
from coterie.federation import Federation, LocalEngine
from coterie.federation.api import Book
from coterie.federation.stages.base import Staged
from coterie.methods import Method
from coterie.methods.registry import METHODS
from coterie.methods.shared.compiled import CompiledRounds
from coterie.numerics import Draw
from coterie.numerics.compiled import Workshop
from coterie.numerics.tracing import Unbuildable, Untraceable
from coterie.problems.tasks.supervised import LOSSES, Supervised

Choice = Literal["auto"] | bool | int
WATCHED = 5  # rounds that are timed before anything is decided
WORTH = 60.0  # seconds that the rest of the run must take as it is: compiling takes about 20 s of the other core
GAIN = 0.95  # programs that take a larger share of the plain time are not worth another rounding


def is_ours(parts: Parts) -> bool:
    """Whether method, problem, model and loss of a run are coterie's, or made of torch's own modules."""
    if parts.config.plugged_in() or parts.config.run.method not in {entry.name for entry in METHODS}:
        return False
    if parts.config.run.problem != OWN_DATA:
        return True
    task = parts.problem.task
    return isinstance(task, Supervised) and task.loss_by_row in LOSSES.values() and not task.model.unknown


class Compiling:
    """The rounds of one run, compiled or not.

    Args:
        method: the method.
        choice: `run.compile`.
        threads: how many threads a program may use.
    """

    def __init__(self, method: Method, choice: Choice, threads: int = 1) -> None:
        self._method, self._threads = method, threads
        self._start: int | None = None if choice == "auto" or choice is False else int(choice)
        self._open = choice == "auto"
        self._compiled: CompiledRounds | None = None
        self._workshop: Workshop | None = None
        self._fused: Any = None
        self._seconds: deque[float] = deque(maxlen=WATCHED)
        self.chosen: int | None = None
        """The round from which programs are used, where auto has chosen one."""
        self.reason = ""
        """Why nothing is compiled, where that was tried."""
        self.notes: list[str] = []
        """What the user should know of stored programs."""

    @property
    def undecided(self) -> bool:
        """Whether it may still choose to compile."""
        return self._open

    def round(self, fed: Federation, state: Any, draw: Draw, left: Callable[[], float] = lambda: 0.0) -> Any:
        """One round of the method.

        Args:
            fed: the federation at the beginning of the round.
            state: the state before it.
            draw: its randomness.
            left: how many rounds are left, at a guess.
        """
        if self._start is not None and fed.round >= self._start:
            self._start = None
            self._now(fed, state, draw)
        elif self._open:
            self._decide(fed, state, draw, left)
        began = perf_counter()
        after = self._run(fed, state, draw)
        if self._open:
            self._seconds.append(perf_counter() - began)
        return after

    def _run(self, fed: Federation, state: Any, draw: Draw) -> Any:
        if self._compiled is not None:
            return self._compiled.round(fed, state, draw)
        return self._method.round(self._at(fed), state, draw)

    def _at(self, fed: Federation) -> Federation:
        """The federation whose task is the one with fused derivatives, where there is one."""
        return fed if self._fused is None else replace(fed, engine=_with_task(fed.engine, self._fused))

    def _now(self, fed: Federation, state: Any, draw: Draw) -> None:
        """Compile and wait for it."""
        try:
            self._begin(fed, state, draw)
            self._finish(fed, state, draw)
        except (Untraceable, OSError) as error:  # a full disk costs no run
            self._give_up(error)

    def _decide(self, fed: Federation, state: Any, draw: Draw, left: Callable[[], float]) -> None:
        """Begin to compile where that will pay; take programs into use where they are ready."""
        try:
            if self._compiled is not None or self._workshop is not None:
                if not (self._compiled or self._workshop).busy:  # type: ignore[union-attr]
                    self._open = False
                    if self._finish(fed, state, draw) <= GAIN:
                        self.chosen = fed.round
                    else:
                        raise Untraceable("programs are not faster here")
            elif len(self._seconds) >= WATCHED:
                recent = sorted(self._seconds)[WATCHED // 2]
                if recent * left() >= WORTH:
                    self._begin(fed, state, draw)
        except (Untraceable, OSError) as error:  # a full disk costs no run
            self._give_up(error)

    def _begin(self, fed: Federation, state: Any, draw: Draw) -> None:
        """Record and start the compiler: the whole round, or else the derivatives."""
        try:
            self._compiled = CompiledRounds(self._method, self._threads, self.notes.append)
            self._compiled.begin(fed, state, draw)
        except Unbuildable:
            raise
        except Untraceable as whole:
            self._compiled = None
            task = fed.task
            if not isinstance(task, Supervised) or task.dropout or task.model.names:
                raise
            self._workshop = Workshop(self._threads, self.notes.append)
            self._fused = task.compiled(self._workshop)
            self._workshop.collecting = True
            try:  # on a book of its own: it only shows which derivatives are asked for
                self._method.round(self._at(replace(fed, book=Book())), state, draw)
            except CoterieError as error:
                raise Untraceable(f"{whole}; and its derivatives: {error}") from error
            finally:
                self._workshop.collecting = False

    def _finish(self, fed: Federation, state: Any, draw: Draw) -> float:
        """Programs into use; their share of the plain time."""
        if self._compiled is not None:
            return self._compiled.finish(fed, state, draw)
        assert self._workshop is not None
        self._workshop.finish()
        clock = process_time if self._threads == 1 else perf_counter  # several threads save time on the wall alone
        took: dict[bool, float] = {}
        for compiled in (True, False, True, False):
            trial = replace(fed, book=Book())
            began = clock()
            self._method.round(self._at(trial) if compiled else trial, state, draw)
            took[compiled] = min(took.get(compiled, float("inf")), clock() - began)
        return took[True] / max(took[False], 1e-9)

    def _give_up(self, why: Exception) -> None:
        self.close()
        self._open, self._compiled, self._workshop, self._fused = False, None, None, None
        self.reason = str(why)

    def close(self) -> None:
        """End a compilation that is under way."""
        if self._compiled is not None:
            self._compiled.close()
        if self._workshop is not None and not self._workshop.using:
            self._workshop.close()


def _with_task(engine: Any, task: Any) -> Any:
    """The engine with other oracles, the target's among them."""
    if isinstance(engine, Staged):
        return replace(engine, engine=_with_task(engine.engine, task))
    if not isinstance(engine, LocalEngine):
        return engine
    target = None if engine.target is None else replace(engine.target, task=task)
    return replace(engine, task=task, target=target)


__all__ = ["Choice", "Compiling", "is_ours"]
