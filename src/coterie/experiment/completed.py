"""A completed round, and the same as a checkpoint holds it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from coterie.experiment import checkpoint
from coterie.experiment.guard import Best, Guard
from coterie.methods import View


class Completed(NamedTuple):
    """A completed round, all that a checkpoint needs. What the record files hold beyond `lengths` came later.

    Args:
        state: the method's.
        rounds: how many are done.
        seconds: how long they took.
        ledger: what was moved, as plain data.
        lengths: how long the record files are.
        trained: rounds that were not skipped.
        skipped: why the first skipped round was skipped.
        guard: what judges rounds by the validation loss.
        best: the best model so far.
    """

    state: Any
    rounds: int
    seconds: float
    ledger: dict[str, Any]
    lengths: dict[str, int]
    trained: int = 0
    skipped: str = ""
    guard: Guard = Guard()
    best: Best | None = None

    def progress(self) -> checkpoint.Progress:
        """As a checkpoint holds it. A best model that is the state's own is not held twice."""
        more: dict[str, Any] = {"trained": self.trained, "skipped": self.skipped}
        if self.guard.start is not None:
            more["guard"] = list(self.guard)
        tensors: dict[str, Tensor] = {}
        if self.best is not None:
            more["best"] = self.best.line
            if self.best.round != self.rounds:
                tensors = {k: v for k, v in self.best.view._asdict().items() if isinstance(v, Tensor)}
        return checkpoint.Progress(self.rounds, self.seconds, self.ledger, self.lengths, more, tensors)

    @staticmethod
    def of(state: Any, progress: checkpoint.Progress, view: Callable[[Any], View]) -> "Completed":
        """The round of a checkpoint; view is what is seen of a state."""
        more, held = progress.more, progress.tensors
        line = more.get("best")
        kept = View(held["model"], held.get("weights"), held.get("inner")) if held else view(state)
        best = None if line is None else Best(line, kept)
        start, lowest, latest, rejected, rises = more.get("guard", Guard())
        guard = Guard(start, lowest, latest, rejected, tuple(rises))
        return Completed(state, *progress[:4], more["trained"], more["skipped"], guard, best)
