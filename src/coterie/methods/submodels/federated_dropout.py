"""Federated Dropout (Caldas et al. 2018): in every round a client trains kernels that are drawn for it.

As many of each layer as its capacity allows, uniformly and independently of other clients and rounds. As in the
comparisons of FedRolex and FedSep, each parameter becomes the mean over the clients that held it. Deviation: the public
code of these comparisons draws the channels of each layer independently, so that a residual sum adds different
channels; here layers whose outputs are added keep the same kernels.
"""

from torch import Tensor

from coterie.methods.base import Draw, Method, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.submodels.carving import LevelledState, Local, Output, carved
from coterie.problems.catalogue.submodels import SubModels
from coterie.problems.models.submodel import Anatomy
from coterie.settings import BatchSize, Count, NonNegative, Positive


@validated
def federated_dropout(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    batch: BatchSize = 20,
    optimiser: Rule = "sgd",
    clip: Positive | None = None,
    l2: NonNegative = 0.0,
    output: Output = "clients",
) -> Method:
    """Let every client train kernels drawn at random in every round, as many as its capacity allows.

    Symbols: γ = step.

    Cost: 1 round per call of round; a client receives and sends its sub-model.

    Args:
        optimiser: rule of the clients' local steps
        clip: largest norm of a local gradient; no limit if not set
        l2: weight decay of the local steps
        output: rows of the output layer are averaged over all clients that trained them, or over those with the class

    Example:
        >>> from coterie.methods import federated_dropout
        >>> federated_dropout().name
        'federated-dropout'
    """
    local = Local(step, local_steps, batch, optimiser, clip, l2)

    def start(problem: SubModels) -> LevelledState:
        return LevelledState(problem.start, problem.levels)

    def drawn(cut: Anatomy, share: float, ids: Tensor, draw: Draw) -> Tensor:
        return cut.top(share, draw.phase("kernels").client(ids).uniform(cut.kernels))

    return carved("federated-dropout", start, drawn, local, output=output)
