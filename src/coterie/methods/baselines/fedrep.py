"""FedRep (Collins et al. 2021, Algorithm 1): clients fit their own head first, then step on the common representation.

    v_k ← v_k − γ∇_v L_k(x, v_k)   head_steps times, x fixed
    x_k ← x_k − γ∇_x L_k(x_k, v_k)   local_steps times, v_k fixed
    x⁺ = mean of the x_k

v_k, the last `personal` layers, stays at the client. FedPer takes both kinds of steps at once.

Deviation: batches are drawn with replacement, not by epochs.
"""

from typing import Literal

from coterie.federation import Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Method, validated
from coterie.methods.shared.parts import Personal, Split, partly_personal
from coterie.methods.shared.works import own_rows, slopes
from coterie.settings import BatchSize, Count, Positive


@work("fedrep/alternating-steps", update=moved_from())
def alternating_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """Steps on the head, then on the representation, which is uploaded; the head is kept."""
    split, rows = Split.of(shard.task.model, static.personal), own_rows(shard)
    x, v = shared, private
    for slope in slopes(rows, shard.task, static.batch, static.head_steps, draw.phase("head")):
        v = v - static.step * slope(split.join(x, v))[split.own]
    for slope in slopes(rows, shard.task, static.batch, static.steps, draw):
        x = x - static.step * slope(split.join(x, v))[split.common]
    return x, v


@validated
def fedrep(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    head_steps: Count = 10,
    batch: BatchSize = 20,
    personal: Personal = 1,
    weights: Literal["sizes", "uniform"] = "uniform",
) -> Method:
    """Average a representation that clients train below heads of their own, which they fit first in every round.

    Symbols: γ = step.

    Cost: 1 round per call of round; one number each way per common parameter and client.

    Args:
        local_steps: steps on the common representation
        head_steps: steps on the client's own head before these

    Example:
        >>> from coterie.methods import fedrep
        >>> fedrep(head_steps=3).settings["head_steps"]
        3
    """
    local = {"step": step, "steps": local_steps, "head_steps": head_steps, "batch": batch}
    return partly_personal("fedrep", alternating_steps, personal, weights, local)
