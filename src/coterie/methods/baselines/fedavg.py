"""FedAvg (McMahan et al. 2017): every client takes local steps from the common model; the server averages.

`server` gives the server a rule of its own for the difference x − mean (Reddi et al. 2021, Algorithm 1): FedAvgM,
FedAdam and FedYogi are such rules (methods/baselines/fedopt.py).

Deviation: batches are drawn with replacement, not by epochs.
"""

from typing import Literal

from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.optimisers import AveragedState, Averaging, ServerRule
from coterie.methods.shared.works import local_sgd
from coterie.settings import BatchSize, Count, Positive


@validated
def fedavg(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    weights: Literal["sizes", "uniform"] = "sizes",
    server: ServerRule = "sgd",
) -> Method:
    """Average the models that clients reach by local steps from the common model.

    Symbols: γ = step.

    Cost: 1 round per call of round; d numbers each way per client.

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
    averaging = Averaging.by(server)

    def init(problem: Problem, n: int) -> AveragedState:
        return averaging.start(problem.start)

    def round(fed: Federation, s: AveragedState, draw: Draw) -> AveragedState:
        w = fed.sizes.to(s.x) if weights == "sizes" else None
        at = draw.phase("walk")
        mean = fed.mean(local_sgd, s.x, weights=w, draw=at, step=step, steps=local_steps, batch=batch)
        return averaging.move(s, mean)

    return Method("fedavg", init, round, lambda s: View(s.x))
