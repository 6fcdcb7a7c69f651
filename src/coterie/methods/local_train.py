"""Local training: the target learns from its own few rows alone. The baseline that collaboration must beat."""

from typing import Any, NamedTuple

from torch import Tensor

from coterie.federation import Federation
from coterie.methods.base import Method, validated
from coterie.methods.works import sgd_walk
from coterie.numerics import Draw
from coterie.problems.parameters import BatchSize, Count, Positive
from coterie.problems.view import View


class LocalTrainState(NamedTuple):
    """The target's model."""

    x: Tensor


@validated
def local_train(*, step: Positive = 0.1, local_steps: Count = 5, batch: BatchSize = 20) -> Method:
    """Gradient descent on the target's shard. No client is asked."""

    def init(problem: Any, n: int) -> LocalTrainState:
        return LocalTrainState(problem.start)

    def round(fed: Federation, s: LocalTrainState, draw: Draw) -> LocalTrainState:
        walk = draw.phase("walk")
        return LocalTrainState(fed.ask_target(sgd_walk, s.x, draw=walk, step=step, steps=local_steps, batch=batch))

    return Method("local-train", init, round, lambda s: View(s.x), needs=frozenset({"gradient", "target"}))
