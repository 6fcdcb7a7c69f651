"""FedAWA (Shi et al. 2025, CVPR): weights under which the clients' updates agree with their sum, without any data.

    τ_k = U_k − x,   min over w = softmax(z) of Σ_k w_k (1 − cos(U_k, x)) + Σ_k w_k ‖τ_k − Σ_j w_j τ_j‖
    x ← Σ_k w_k U_k

U_k is the common model after client k's local steps. z starts at the logarithms of the clients' shares of the rows and
is kept from round to round; each round takes `weight_steps` steps of Adam on it, whose moments start anew. The form
with one weight per layer is left out.

The implementation follows the authors' code for the distances (Euclidean between updates, by the cosine between models)
and for Adam's momenta. Deviation: the weights after the last step are used, in that code those before it. With a
partial active set weight moves among the participants only.
"""

from typing import Annotated, Any, NamedTuple

from pydantic import Field
from torch import Tensor
from torch.nn.functional import cosine_similarity

from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.optimisers import UpdateRule
from coterie.methods.shared.works import local_sgd
from coterie.numerics.derivatives import grad
from coterie.settings import BatchSize, Count, Positive

MOMENTA = (0.5, 0.999)  # of Adam, as in the authors' code


class FedAWAState(NamedTuple):
    """The common model [d] and the client weights [K] on the simplex."""

    x: Tensor
    w: Tensor


def disagreement(z: Tensor, moved: Tensor, costs: Tensor) -> Tensor:
    """The sum that the weights softmax(z) minimise; costs are 1 − cos(U_k, x), [K]."""
    w = z.softmax(0)
    return w @ (costs + (moved - w @ moved).norm(dim=1))


@validated
def fedawa(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    weight_step: Positive = 0.001,
    weight_steps: Annotated[int, Field(ge=0)] = 1,
) -> Method:
    """Weight clients by how well their updates agree with the weighted sum of all.

    Symbols: γ = step.

    Cost: 1 round per call of round; d numbers each way per client.

    Args:
        weight_step: step size of Adam on the logarithms of the weights
        weight_steps: steps of Adam per round; 0 is FedAvg

    Example:
        >>> from coterie.methods import fedawa
        >>> fedawa().settings["weight_step"]
        0.001
    """
    rule = UpdateRule("adam", weight_step, *MOMENTA)
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch}

    def init(problem: Problem, n: int) -> FedAWAState:
        sizes = problem.train.counts.to(problem.start)
        return FedAWAState(problem.start, sizes / sizes.sum())

    def round(fed: Federation, s: FedAWAState, draw: Draw) -> FedAWAState:
        U, ids = fed.gather(local_sgd, s.x, draw=draw.phase("walk"), **local)
        active = s.w[ids].sum()
        moved, costs = U - s.x, 1.0 - cosine_similarity(U, s.x[None])
        slope = grad(disagreement)
        z = rule.along((s.w[ids] / active).log(), range(weight_steps), lambda z, _: slope(z, moved, costs))
        w = z.softmax(0)
        return FedAWAState(w @ U, s.w.index_copy(0, ids, active * w))

    return Method("fedawa", init, round, lambda s: View(s.x, s.w))
