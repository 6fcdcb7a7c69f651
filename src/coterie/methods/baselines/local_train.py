"""Local training: the target learns from its own few rows alone. The baseline that collaboration must beat.

Plain mini-batch gradient descent, or SVRG where `refresh`, the probability of a new anchor, is set. With `everyone`
each client trains a model of its own on its training rows, by plain steps, and keeps it.
"""

from typing import NamedTuple

from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Memory, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, personal_models, validated
from coterie.methods.baselines.local_svrg import SVRGSteps, steps_alone
from coterie.methods.shared.works import local_sgd
from coterie.settings import BatchSize, Count, Positive, Probability


class LocalTrainState(NamedTuple):
    """The target's model, or the models that the clients keep."""

    x: Tensor | Memory


@work("local-train/own-steps", update=())
def own_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """A client's own model after more local steps; nothing is uploaded."""
    return (), local_sgd(shard, private, None, static, draw)


@validated
def local_train(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    refresh: Probability | None = None,
    everyone: bool = False,
) -> Method:
    """Train on the target's own rows alone, or every client on its own.

    Symbols: γ = step.

    Cost: 0 rounds per call of round and 1 exchange with the target; with everyone 1 round without any upload.

    Args:
        refresh: probability per step of a new anchor; then the steps are those of SVRG
        everyone: every client trains a model of its own and keeps it

    Example:
        >>> from coterie.methods import local_train
        >>> sorted(local_train(everyone=True).needs)
        ['everyone', 'gradient']
    """
    if everyone and refresh is not None:
        raise UsageError("local-train for everyone takes plain steps; leave method.refresh or method.everyone out.")

    def init(problem: Problem, n: int) -> LocalTrainState:
        return LocalTrainState(Memory.start(problem.start, n) if everyone else problem.start)

    def round(fed: Federation, s: LocalTrainState, draw: Draw) -> LocalTrainState:
        at = draw.phase("walk")
        if isinstance(s.x, Memory):
            _, x = fed.gather(own_steps, memory=s.x, draw=at, step=step, steps=local_steps, batch=batch)
            return LocalTrainState(x)
        if refresh is None or batch == "all":
            x = fed.ask_target(local_sgd, s.x, draw=at, step=step, steps=local_steps, batch=batch)
        else:
            svrg = SVRGSteps(step, local_steps, refresh, local_steps, batch)
            x = fed.ask_target(steps_alone, s.x, draw=at, steps=local_steps, first=0, svrg=svrg)
        return LocalTrainState(x)

    needs = frozenset({"gradient", "everyone" if everyone else "target"})
    return Method("local-train", init, round, lambda s: View(personal_models(s.x)), needs=needs)
