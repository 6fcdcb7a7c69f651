"""FedLAW (Li et al. 2023, ICML): weights of the clients' models and a common shrinkage, learned on proxy rows.

    x ← γ_s Σ_k λ_k U_k,   (γ_s, λ) ≈ argmin L_0(γ_s Σ_k λ_k U_k),   λ = softmax(z), γ_s = exp(s), by Adam on (z, s)

U_k is the common model after client k's local steps. L_0 is the loss on proxy rows at the server, for which the
target's validation rows stand here; so the model that is learned is the target's. Every round starts from λ_k in
proportion to the clients' rows and γ_s = 1, and takes `weight_steps` steps on batches of the proxy rows. A shrinkage
γ_s < 1 acts as weight decay at the server.

Deviations. Batches are drawn with replacement, not by epochs. The halving of Adam's step after 20 epochs, the quadratic
parameters instead of exponents, and the averaging of weights in two stages are left out.
"""

from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.federation import Shard, Static, Tree, moved_from, work
from coterie.methods.base import GRADIENTS_AND_TARGET, Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.optimisers import UpdateRule
from coterie.methods.shared.works import batches, goal_rows, local_sgd
from coterie.settings import BatchSize, Count, Positive

MOMENTA = (0.5, 0.999)  # of Adam, as in the authors' code


class FedLAWState(NamedTuple):
    """The common model [d], the client weights λ [K] on the simplex, and the shrinkage γ_s."""

    x: Tensor
    w: Tensor
    shrinkage: Tensor


def fused(U: Tensor, parameters: Tensor) -> Tensor:
    """γ_s Σ_k λ_k U_k, from (z, s)."""
    return parameters[-1].exp() * (parameters[:-1].softmax(0) @ U)


def slopes(U: Tensor, parameters: Tensor, g: Tensor) -> Tensor:
    """The gradient of L_0(γ_s Σ λ_k U_k) in (z, s), where g is that of L_0 at the fused model.

    ∂/∂z_k = γ_s λ_k (⟨g, U_k⟩ − Σ_j λ_j ⟨g, U_j⟩),   ∂/∂s = γ_s Σ_k λ_k ⟨g, U_k⟩
    """
    weights, along = parameters[:-1].softmax(0), U @ g
    mean = weights @ along
    return parameters[-1].exp() * torch.cat([weights * (along - mean), mean[None]])


@work("fedlaw/learn-weights", update=moved_from(1))
def learn_weights(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """(z, s) after steps of Adam on the target's rows."""
    U, parameters = shared
    rule = UpdateRule("adam", static.weight_step, *MOMENTA)

    def slope(at: Tensor, batch: Any) -> Tensor:
        return slopes(U, at, shard.task.gradient(fused(U, at), batch))

    return rule.along(parameters, batches(goal_rows(shard), static.batch, static.weight_steps, draw), slope)


@validated
def fedlaw(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    weight_step: Positive = 0.01,
    weight_steps: Annotated[int, Field(ge=0)] = 20,
) -> Method:
    """Learn client weights and a shrinkage of the averaged model on the target's rows.

    Symbols: γ = step, λ = the weights, γ_s = the shrinkage.

    Cost: 1 round per call of round, and 1 exchange with the target, of K d + K + 1 numbers down and K + 1 up.

    Args:
        weight_step: step size of Adam on the logarithms of weights and shrinkage
        weight_steps: steps of Adam per round; 0 is FedAvg

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4)
        >>> friend, stranger = (x, x.sum(1)), (x, -x.sum(1))
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 1)
        >>> problem = coterie.Weighting.on([friend, stranger], friend, model=net, loss="squared")
        >>> fit = coterie.fit(problem, coterie.methods.fedlaw(weight_step=0.5), rounds=5, mode="vmap")
        >>> bool(fit.weights[0] > 0.9)
        True
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch}

    def init(problem: Problem, n: int) -> FedLAWState:
        sizes = problem.train.counts.to(problem.start)
        return FedLAWState(problem.start, sizes / sizes.sum(), problem.start.new_ones(()))

    def round(fed: Federation, s: FedLAWState, draw: Draw) -> FedLAWState:
        U, ids = fed.gather(local_sgd, s.x, draw=draw.phase("walk"), **local)
        sizes = fed.sizes[ids].to(U)
        start = torch.cat([(sizes / sizes.sum()).log(), U.new_zeros(1)])
        settings: dict[str, Any] = {"weight_step": weight_step, "weight_steps": weight_steps, "batch": "all"}
        after = fed.ask_target(learn_weights, (U, start), draw=draw.phase("target"), **settings)
        w = torch.zeros_like(s.w).index_copy(0, ids, after[:-1].softmax(0))
        return FedLAWState(fused(U, after), w, after[-1].exp())

    def view(s: FedLAWState) -> View:
        return View(s.x, s.w, more={"shrinkage": float(s.shrinkage)})

    return Method("fedlaw", init, round, view, needs=GRADIENTS_AND_TARGET)
