"""Two uses of the validation loss: the best model so far, and a guard against rounds that undo the training.

The guard rejects a round whose validation loss v rises above the lowest one so far, b, by more than

    max(κ · J, ρ · (v_0 − b)),   κ = 4, ρ = 0.1

v_0 is the loss before the first round and J the largest such rise among the last 20 accepted rounds. All of them are
differences of losses, so the rule does not depend on the scale of the loss: a rise must be much larger than what the
run has lately shown, and must undo a tenth of all that training has gained. The guard is silent during the first 20
rounds, in which learned weights are still unsettled and honest rises of any size occur, and while the loss is not below
v_0, because then there is nothing to protect; a run that diverges is therefore still reported as such. After three
rejections in a row the next round is accepted: a rise that comes again and again is the training's own, or it comes
from clients whose weights the method can only lower if it sees them.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from coterie.problems.base import View

MEASURE = "validation_loss"
JUMPS = 4.0  # κ
UNDONE = 0.1  # ρ
WINDOW = 20
IN_A_ROW = 3
MUCH_WORSE = 0.1  # of what training has gained: the summary then says that the last model is not the best


class Guard(NamedTuple):
    """All that the rule knows of a run: losses, the rises of the last accepted rounds, and rejections in a row."""

    start: float | None = None
    lowest: float = math.inf
    last: float = math.inf
    rejected: int = 0
    rises: tuple[float, ...] = ()

    def allows(self, loss: float | None) -> bool:
        """Whether a round that ends with this validation loss is accepted; None is a loss that is not finite."""
        if self.start is None or len(self.rises) < WINDOW or self.last >= self.start or self.rejected >= IN_A_ROW:
            return True
        limit = max(JUMPS * max(self.rises), UNDONE * (self.start - self.lowest))
        return loss is not None and loss - self.lowest <= limit

    def after(self, loss: float | None) -> "Guard":
        """What is known after a round was accepted."""
        if loss is None:
            return self._replace(rejected=0)
        if self.start is None:
            return Guard(loss, loss, loss)
        rises = (*self.rises, max(0.0, loss - self.lowest))[-WINDOW:]
        return Guard(self.start, min(self.lowest, loss), loss, 0, rises)

    def refused(self) -> "Guard":
        """What is known after a round was rejected."""
        return self._replace(rejected=self.rejected + 1)


class Best(NamedTuple):
    """The recorded round with the lowest validation loss: its record, and what is seen of its state."""

    line: dict[str, Any]
    view: View

    @property
    def round(self) -> int:
        """Its number."""
        return int(self.line["round"])


def better(line: dict[str, Any], view: View, best: Best | None) -> Best | None:
    """The best of what was recorded; the earlier one where two are equal, None without a validation loss."""
    loss = line.get(MEASURE)
    if loss is None or (best is not None and loss >= best.line[MEASURE]):
        return best
    return Best(line, view)


def comparison(first: Mapping[str, Any], best: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """A sentence where the last model is much worse than the best one, else nothing."""
    start, low, end = (line.get(MEASURE) for line in (first, best, last))
    if low is None or (end is not None and (start is None or end - low <= MUCH_WORSE * (start - low))):
        return ""
    said = "not finite" if end is None else f"{end:.3g}"
    return (
        f"the last model is much worse than the best one: its validation loss is {said}, that of round "
        f"{best['round']} was {low:.3g}. model-best.safetensors holds the best one."
    )
