"""Federated Dropout (Caldas et al. 2018): in every round a client trains kernels that are drawn for it.

As many of each layer as its capacity allows, uniformly and independently of other clients and rounds. As in the
comparisons of FedRolex and FedSep, each parameter becomes the mean over the clients that held it.
"""

from typing import NamedTuple

from torch import Tensor

from coterie.methods.base import Draw, Federation, Method, Problem, View, expect, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.submodels.carving import NEEDS, Local, merged, trained
from coterie.problems.catalogue.submodels import SubModels
from coterie.settings import BatchSize, Count, Positive


class FederatedDropoutState(NamedTuple):
    """The whole model, and the clients' levels."""

    x: Tensor
    levels: Tensor


@validated
def federated_dropout(
    *, step: Positive = 0.05, local_steps: Count = 10, batch: BatchSize = 20, optimiser: Rule = "sgd"
) -> Method:
    """Let every client train kernels drawn at random in every round, as many as its capacity allows.

    Symbols: γ = step.

    Cost: 1 round per call of round; a client receives and sends its sub-model.

    Args:
        optimiser: rule of the clients' local steps

    Example:
        >>> from coterie.methods import federated_dropout
        >>> federated_dropout().name
        'federated-dropout'
    """
    local = Local(step, local_steps, batch, optimiser)

    def init(problem: Problem, n: int) -> FederatedDropoutState:
        problem = expect(problem, SubModels)
        return FederatedDropoutState(problem.start, problem.levels)

    def round(fed: Federation, s: FederatedDropoutState, draw: Draw) -> FederatedDropoutState:
        cut = fed.task.anatomy

        def drawn(share: float, ids: Tensor) -> Tensor:
            return cut.top(share, draw.phase("kernels").client(ids).uniform(cut.kernels))

        return s._replace(x=merged(s.x, trained(fed, s.x, s.levels, drawn, draw.phase("learn"), local)))

    return Method("federated-dropout", init, round, lambda s: View(s.x), needs=NEEDS)
