"""FedPer (Arivazhagan et al. 2019): the last layers of the model stay at the client, the base layers are averaged.

θ_k = (x, v_k), x the base and v_k the last `personal` layers. Each client takes local steps on both at once and uploads
its base alone: x⁺ = Σ_k p_k x_k. With nothing personal this would be FedAvg, with everything local training.

Deviation: batches are drawn with replacement, not by epochs.
"""

from typing import Literal

from coterie.methods.base import Method, validated
from coterie.methods.shared.parts import Personal, partly_personal, steps_on_both
from coterie.settings import BatchSize, Count, Positive


@validated
def fedper(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    personal: Personal = 1,
    weights: Literal["sizes", "uniform"] = "sizes",
) -> Method:
    """Average all layers but the last, which every client trains and keeps for itself.

    Symbols: γ = step.

    Cost: 1 round per call of round; one number each way per common parameter and client.

    Example:
        >>> from coterie.methods import fedper
        >>> fedper(personal=2).settings["personal"]
        2
    """
    local = {"step": step, "steps": local_steps, "batch": batch}
    return partly_personal("fedper", steps_on_both, personal, weights, local)
