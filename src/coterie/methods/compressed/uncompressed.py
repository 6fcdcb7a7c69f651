"""Averages of local updates, sent whole: the baseline of compressed training. x ← x + η_g mean(x_k − x).

FedAvg with equal weights and a server step; 2d numbers per client and round.
"""

from coterie.methods.base import Draw, Federation, Method, ModelState, View, start_model, validated
from coterie.methods.shared.works import local_sgd
from coterie.settings import BatchSize, Count, Positive


@validated
def uncompressed(
    *, step: Positive = 0.1, local_steps: Count = 5, batch: BatchSize = 32, server_step: Positive = 1.0
) -> Method:
    """Average local updates that are sent whole, with a server step size: the baseline of compressed training.

    Symbols: η = step, η_g = server_step.

    Cost: 1 round per call of round; d numbers each way per client.

    Args:
        server_step: η_g, by which the mean update is multiplied

    Example:
        >>> from coterie.methods import uncompressed
        >>> uncompressed().name
        'uncompressed'
    """

    def round(fed: Federation, s: ModelState, draw: Draw) -> ModelState:
        mean = fed.mean(local_sgd, s.x, draw=draw.phase("walk"), step=step, steps=local_steps, batch=batch)
        return ModelState(s.x + server_step * (mean - s.x))

    return Method("uncompressed", start_model, round, lambda s: View(s.x))
