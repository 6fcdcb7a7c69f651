"""Local training: the target learns from its own few rows alone. The baseline that collaboration must beat.

Plain mini-batch gradient descent, or SVRG where `refresh`, the probability of a new anchor, is set.
"""

from typing import Any, NamedTuple

from torch import Tensor

from coterie.federation import Federation
from coterie.methods.base import Method, validated
from coterie.methods.local_svrg import Walk, walk_alone
from coterie.methods.works import sgd_walk
from coterie.numerics import Draw
from coterie.problems.parameters import BatchSize, Count, Positive, Probability
from coterie.problems.view import View


class LocalTrainState(NamedTuple):
    """The target's model."""

    x: Tensor


@validated
def local_train(
    *, step: Positive = 0.1, local_steps: Count = 5, batch: BatchSize = 20, refresh: Probability | None = None
) -> Method:
    """local_steps steps on the target's shard. No client is asked."""

    def init(problem: Any, n: int) -> LocalTrainState:
        return LocalTrainState(problem.start)

    def round(fed: Federation, s: LocalTrainState, draw: Draw) -> LocalTrainState:
        at = draw.phase("walk")
        if refresh is None or batch == "all":
            x = fed.ask_target(sgd_walk, s.x, draw=at, step=step, steps=local_steps, batch=batch)
        else:
            walk = Walk(step, local_steps, refresh, local_steps, batch)
            x = fed.ask_target(walk_alone, s.x, draw=at, steps=local_steps, first=0, walk=walk)
        return LocalTrainState(x)

    return Method("local-train", init, round, lambda s: View(s.x), needs=frozenset({"gradient", "target"}))
