"""All clients train the same sub-model: the smallest, which every client can afford, or the largest, which few can.

The bounds between which methods for unequal clients are judged (FedSep, Table 1). The smallest is a network of its own:
it has no scalers, and starts with weights as large as if it had been initialised alone. It is kept as the whole model
with the other kernels at 0, which gives the same outputs.
"""

from typing import Literal

import torch
from torch import Tensor

from coterie.methods.base import Method, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.submodels.carving import LevelledState, Local, alone, carved
from coterie.problems.catalogue.submodels import SubModels
from coterie.problems.models.submodel import Anatomy
from coterie.settings import BatchSize, Count, Positive


@validated
def homogeneous(
    *,
    size: Literal["smallest", "largest"] = "smallest",
    step: Positive = 0.05,
    local_steps: Count = 10,
    batch: BatchSize = 20,
    optimiser: Rule = "sgd",
) -> Method:
    """Let all clients train the same sub-model by FedAvg: the smallest or the largest.

    Symbols: γ = step.

    Cost: 1 round per call of round; a client receives and sends its sub-model.

    Args:
        size: the smallest sub-model, which every client can afford, or the largest
        optimiser: rule of the clients' local steps

    Example:
        >>> from coterie.methods import homogeneous
        >>> homogeneous(size="largest").settings["size"]
        'largest'
    """
    local = Local(step, local_steps, batch, optimiser)

    def start(problem: SubModels) -> LevelledState:
        task = problem.task
        level = len(task.shares) - 1 if size == "smallest" else 0
        return LevelledState(alone(task, level, problem.start), torch.full_like(problem.levels, level))

    def first(cut: Anatomy, share: float, *_: object) -> Tensor:
        return cut.first(share)

    return carved("homogeneous", start, first, local, scaled=False, everyone_alike=True)
