"""FedAvg (McMahan et al. 2017): every client takes local steps from the common model; the server averages.

Deviation: batches are drawn with replacement, not by epochs.
"""

from typing import Literal

from coterie.methods.base import Draw, Federation, Method, ModelState, View, start_model, validated
from coterie.methods.shared.works import local_sgd
from coterie.settings import BatchSize, Count, Positive


@validated
def fedavg(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    weights: Literal["sizes", "uniform"] = "sizes",
) -> Method:
    """Average the models that clients reach by local steps from the common model.

    Symbols: γ = step.

    Cost: 1 round per call of round; d numbers each way per client.

    Args:
        weights: average in proportion to the clients' numbers of rows, or equally

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4)
        >>> friend, stranger = (x, x.sum(1)), (x, -x.sum(1))
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 1)
        >>> problem = coterie.Weighting.on([friend, stranger], friend, model=net, loss="squared")
        >>> fit = coterie.fit(problem, coterie.methods.fedavg(local_steps=10), rounds=2, mode="vmap")
        >>> fit.history[-1]["communication"]["floats_up"]  # 2 rounds, 2 clients, 5 parameters
        20
    """

    def round(fed: Federation, s: ModelState, draw: Draw) -> ModelState:
        w = fed.sizes.to(s.x) if weights == "sizes" else None
        at = draw.phase("walk")
        return ModelState(fed.mean(local_sgd, s.x, weights=w, draw=at, step=step, steps=local_steps, batch=batch))

    return Method("fedavg", start_model, round, lambda s: View(s.x))
