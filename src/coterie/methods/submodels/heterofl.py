"""HeteroFL (Diao et al. 2021): a client of capacity p trains the first p of the kernels of every layer.

Small sub-models lie within large ones; each parameter becomes the mean over the clients that hold it. The model is that
of the largest capacity: kernels beyond it are 0. Static batch norm, scalers and the masked loss are the problem's
(`submodels`). Deviations: the number of kernels is rounded down, so that no client exceeds its capacity; the rows
of the output layer are averaged over all clients, not only over those that have the class.
"""

from coterie.methods.base import Method, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.submodels.carving import LevelledState, Local, carved
from coterie.problems.catalogue.submodels import SubModels
from coterie.settings import BatchSize, Count, Positive


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

    def start(problem: SubModels) -> LevelledState:
        task = problem.task
        return LevelledState(task.anatomy.gated(problem.start, task.anatomy.first(task.shares[0])), problem.levels)

    return carved("heterofl", start, lambda cut, share, *_: cut.first(share), local)
