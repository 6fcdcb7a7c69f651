"""HeteroFL (Diao et al. 2021): a client of capacity p trains the first p of the kernels of every layer.

Small sub-models lie within large ones; each parameter becomes the mean over the clients that hold it. The model is that
of the largest capacity: kernels beyond it are 0. Static batch norm, scalers and the masked loss are the problem's
(`submodels`). Deviations: the number of kernels is rounded down, so that no client exceeds its capacity; the rows
of the output layer are averaged over all clients, not only over those that have the class.
"""

from typing import NamedTuple

from torch import Tensor

from coterie.methods.base import Draw, Federation, Method, Problem, View, expect, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.submodels.carving import NEEDS, Local, merged, trained
from coterie.problems.catalogue.submodels import SubModels
from coterie.settings import BatchSize, Count, Positive


class HeteroFLState(NamedTuple):
    """The whole model, and the clients' levels."""

    x: Tensor
    levels: Tensor


@validated
def heterofl(
    *, step: Positive = 0.05, local_steps: Count = 10, batch: BatchSize = 20, optimiser: Rule = "sgd"
) -> Method:
    """Let a client of capacity p train the first p of the kernels of every layer.

    Symbols: γ = step.

    Cost: 1 round per call of round; a client receives and sends its sub-model.

    Args:
        optimiser: rule of the clients' local steps

    Example:
        >>> from coterie.methods import heterofl
        >>> heterofl().name
        'heterofl'
    """
    local = Local(step, local_steps, batch, optimiser)

    def init(problem: Problem, n: int) -> HeteroFLState:
        problem = expect(problem, SubModels)
        task = problem.task
        return HeteroFLState(task.anatomy.gated(problem.start, task.anatomy.first(task.shares[0])), problem.levels)

    def round(fed: Federation, s: HeteroFLState, draw: Draw) -> HeteroFLState:
        cut = fed.task.anatomy
        parts = trained(fed, s.x, s.levels, lambda share, _: cut.first(share), draw.phase("learn"), local)
        return s._replace(x=merged(s.x, parts))

    return Method("heterofl", init, round, lambda s: View(s.x), needs=NEEDS)
