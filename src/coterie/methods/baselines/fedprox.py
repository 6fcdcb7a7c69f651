"""FedProx (Li et al. 2020, Algorithm 2): local steps are held near the common model by a proximal term.

    x_k ≈ argmin_y L_k(y) + (μ/2)‖y − x‖²,   x⁺ = Σ_k p_k x_k

The subproblem is solved inexactly, by `local_steps` gradient steps from x: y ← y − γ(∇L_k(y) + μ(y − x)). With μ = 0
this is FedAvg.

Deviations: the paper draws K clients with probabilities p_k and averages them equally; here the active clients are
averaged with weights p_k, as in FedAvg. The paper's γ-inexactness is a number of steps.
"""

from typing import Any, Literal

from torch import Tensor

from coterie.federation import Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.optimisers import AveragedState, Averaging, ServerRule
from coterie.methods.shared.works import own_rows, proximal_steps, slopes
from coterie.settings import BatchSize, Count, NonNegative, Positive


@work("fedprox/proximal-steps", update=moved_from())
def proximal_sgd(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """Local steps from x on L_k(y) + (μ/2)‖y − x‖²."""
    along = slopes(own_rows(shard), shard.task, static.batch, static.steps, draw)
    return proximal_steps(along, shared, shared, static.step, static.penalty)


@validated
def fedprox(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    penalty: NonNegative = 0.1,
    weights: Literal["sizes", "uniform"] = "sizes",
    server: ServerRule = "sgd",
) -> Method:
    """Average local steps that a proximal term holds near the common model.

    Symbols: γ = step, μ = penalty.

    Cost: 1 round per call of round; d numbers each way per client.

    Args:
        penalty: μ, pull of the local steps towards the common model; 0 is FedAvg

    Example:
        >>> from coterie.methods import fedprox
        >>> fedprox(penalty=1.0).settings["penalty"]
        1.0
    """
    averaging = Averaging.by(server)
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch, "penalty": penalty}

    def init(problem: Problem, n: int) -> AveragedState:
        return averaging.start(problem.start)

    def round(fed: Federation, s: AveragedState, draw: Draw) -> AveragedState:
        w = fed.sizes.to(s.x) if weights == "sizes" else None
        return averaging.move(s, fed.mean(proximal_sgd, s.x, weights=w, draw=draw.phase("walk"), **local))

    return Method("fedprox", init, round, lambda s: View(s.x))
