"""HeteroFL (Diao et al. 2021): a client of capacity p trains the first p of the kernels of every layer.

Small sub-models lie within large ones; each parameter becomes the mean over the clients that hold it. The model is that
of the largest capacity: kernels beyond it are 0. Static batch norm, scalers and the masked loss are the problem's
(`submodels`).

As in the authors' code: problem.masked = "zero", problem.dynamic = true, problem.rounding = "up",
method.output = "holders" (the server knows the clients' classes), method.optimiser = "momentum", method.clip = 1,
method.l2 = 0.0005. The defaults deviate so that all methods on sub-models train alike: plain steps, capacities that
stay, and kernels rounded down, so that no client exceeds its capacity. They test with batch statistics of all training
rows; here norms use the statistics of the test rows.
"""

from coterie.methods.base import Method, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.submodels.carving import LevelledState, Local, Output, carved
from coterie.problems.catalogue.submodels import SubModels
from coterie.settings import BatchSize, Count, NonNegative, Positive


@validated
def heterofl(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    batch: BatchSize = 20,
    optimiser: Rule = "sgd",
    clip: Positive | None = None,
    l2: NonNegative = 0.0,
    output: Output = "clients",
) -> Method:
    """Let a client of capacity p train the first p of the kernels of every layer.

    Symbols: γ = step.

    Cost: 1 round per call of round; a client receives and sends its sub-model.

    Args:
        optimiser: rule of the clients' local steps
        clip: largest norm of a local gradient; no limit if not set
        l2: weight decay of the local steps
        output: rows of the output layer are averaged over all clients that trained them, or over those with the class

    Example:
        >>> from coterie.methods import heterofl
        >>> heterofl().name
        'heterofl'
    """
    local = Local(step, local_steps, batch, optimiser, clip, l2)

    def start(problem: SubModels) -> LevelledState:
        task = problem.task
        return LevelledState(task.anatomy.gated(problem.start, task.anatomy.first(task.shares[0])), problem.levels)

    return carved("heterofl", start, lambda cut, share, *_: cut.first(share), local, output=output)
