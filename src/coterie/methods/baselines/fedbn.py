"""FedBN (Li et al. 2021): the parameters of batch norm stay at the client, all others are averaged.

For clients whose inputs differ in scale or style. Each client takes local steps on the whole model and uploads all but
scale and offset of its normalisation. Here batch norm uses the statistics of the batch at hand, so there are no running
statistics to share either; those that a saved model needs are computed after the last round.

Deviation: batches are drawn with replacement, not by epochs.
"""

from typing import Literal

from coterie.methods.base import Method, validated
from coterie.methods.shared.parts import Personal, partly_personal, steps_on_both
from coterie.settings import BatchSize, Count, Positive


@validated
def fedbn(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    personal: Personal = "norm",
    weights: Literal["sizes", "uniform"] = "uniform",
) -> Method:
    """Average everything but batch norm, which every client trains and keeps for itself.

    Symbols: γ = step.

    Cost: 1 round per call of round; one number each way per common parameter and client.

    Example:
        >>> from coterie.methods import fedbn
        >>> fedbn().settings["personal"]
        'norm'
    """
    local = {"step": step, "steps": local_steps, "batch": batch}
    return partly_personal("fedbn", steps_on_both, personal, weights, local)
