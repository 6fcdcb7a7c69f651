"""FedRolex (Alam et al. 2022): the window of kernels that a capacity trains moves on by one every round.

In round t a client of capacity p trains the kernels t, t+1, … of each layer, around its end to its beginning, so that
all of them are trained equally often. Each parameter becomes the mean over the clients that held it. The settings of
the authors' code are those of HeteroFL's (see heterofl.py); the defaults deviate likewise.
"""

from typing import NamedTuple

from torch import Tensor

from coterie.methods.base import Draw, Federation, Method, View, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.submodels.carving import NEEDS, Local, Output, levels_of, merged, trained
from coterie.problems.catalogue.submodels import SubModels
from coterie.settings import BatchSize, Count, NonNegative, Positive


class FedRolexState(NamedTuple):
    """The whole model, the clients' levels, rounds done."""

    x: Tensor
    levels: Tensor
    rounds: int


@validated
def fedrolex(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    batch: BatchSize = 20,
    optimiser: Rule = "sgd",
    clip: Positive | None = None,
    l2: NonNegative = 0.0,
    output: Output = "clients",
) -> Method:
    """Let every client train a window of kernels that moves on in every round.

    Symbols: γ = step.

    Cost: 1 round per call of round; a client receives and sends its sub-model.

    Args:
        optimiser: rule of the clients' local steps
        clip: largest norm of a local gradient; no limit if not set
        l2: weight decay of the local steps
        output: rows of the output layer are averaged over all clients that trained them, or over those with the class

    Example:
        >>> from coterie.methods import fedrolex
        >>> fedrolex().name
        'fedrolex'
    """
    local = Local(step, local_steps, batch, optimiser, clip, l2)

    def init(problem: SubModels, n: int) -> FedRolexState:
        return FedRolexState(problem.start, problem.levels, 0)

    def round(fed: Federation, s: FedRolexState, draw: Draw) -> FedRolexState:
        def window(share: float, ids: Tensor) -> Tensor:
            return fed.task.anatomy.window(share, s.rounds)

        levels = levels_of(fed.task, s.levels, draw)
        parts = trained(fed, s.x, levels, window, draw.phase("learn"), local, output=output)
        return FedRolexState(merged(s.x, parts), s.levels, s.rounds + 1)

    return Method("fedrolex", init, round, lambda s: View(s.x), needs=NEEDS)
