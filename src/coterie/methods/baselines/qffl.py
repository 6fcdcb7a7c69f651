"""q-FFL (Li et al. 2020, q-FedAvg, Algorithm 2): clients with a larger loss count more, so that accuracies become even.

The objective is Σ_k L_k(x)^(q+1)/(q+1). With x_k after local steps from x, and L = 1/γ for the Lipschitz constant:

    Δ_k = L_k(x)^q L(x − x_k),   h_k = q L_k(x)^(q−1) ‖L(x − x_k)‖² + L L_k(x)^q,   x⁺ = x − Σ_k Δ_k / Σ_k h_k

L_k(x) is taken on all of the client's rows. q = 0 is FedAvg with equal weights; as q grows, only the worst client
counts, as in AFL.

Deviations: clients participate as the federation is set up, not with probabilities by size; a loss counts as 1e-10 at
least.
"""

from typing import Any

from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, ModelState, View, start_model, validated
from coterie.methods.shared.works import local_sgd, own_rows
from coterie.settings import BatchSize, Count, NonNegative, Positive

LEAST = 1e-10


@work("qffl/weighted-steps", update=(RESULT, None))
def weighted_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> tuple[Tensor, Tensor]:
    """Δ_k and h_k."""
    x, q = shared, static.fairness
    loss = shard.task.full_loss(x, own_rows(shard)).clamp(min=LEAST)
    change = (x - local_sgd(shard, x, None, static, draw)) / static.step
    return loss**q * change, q * loss ** (q - 1) * (change @ change) + loss**q / static.step


@validated
def qffl(*, step: Positive = 0.1, local_steps: Count = 5, batch: BatchSize = 20, fairness: NonNegative = 1.0) -> Method:
    """Average local steps so that clients with a larger loss count more.

    Symbols: γ = step, q = fairness.

    Cost: 1 round per call of round; d numbers down and d + 1 up per client.

    Args:
        fairness: q, power of the losses; 0 is FedAvg with equal weights

    Example:
        >>> from coterie.methods import qffl
        >>> qffl(fairness=2.0).settings["fairness"]
        2.0
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch, "fairness": fairness}

    def round(fed: Federation, s: ModelState, draw: Draw) -> ModelState:
        change, scale = fed.mean(weighted_steps, s.x, draw=draw.phase("walk"), **local)
        return ModelState(s.x - change / scale)

    return Method("qffl", start_model, round, lambda s: View(s.x))
