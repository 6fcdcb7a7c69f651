"""FedCE (Jiang et al. 2023, CVPR): weights by each client's contribution, in gradient space and in data space.

    c_k = 1 − cos(τ_k, Σ_{j≠k} w_j τ_j),   e_k = L_k((x − w_k u_k)/(1 − w_k)),   both averaged over rounds
    w_k ∝ ĉ_k ê_k   or   ĉ_k + ê_k,   where ĉ and ê are c and e over their sums, at least 0.001;   x ← x + Σ_k w_k τ_k

τ_k is client k's update. The model without k is what the averaged model x would be without k's upload u_k of the round
before, at the weights w of that round; client k judges it on its validation rows (its training rows where it has no
others). A client whose update points elsewhere than those of the others, and on whose rows the others' model does
badly, adds what the others do not have, and gets more weight: fairness, not friendship.

Deviations. e_k is the loss, where the paper has one minus the Dice score of segmentation; only shares of e_k count. It
is averaged over the rounds in which it was measured, which the first is not. Weights are on the simplex to the last
digit. In the sum over j ≠ k the authors' code keeps its uniform first weights; here they are those of the round before.
With a partial active set weight moves among the participants only, and the model without k is taken at their weights.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from coterie.federation import Each, Memory, Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.works import goal_rows, local_sgd
from coterie.numerics import uniform
from coterie.settings import BatchSize, Count, Positive

LEAST = 1e-3  # smallest share


class FedCEState(NamedTuple):
    """The common model [d], the weights [K], sums over rounds of c_k and e_k with their numbers of terms, [4, K], and
    what clients keep (their last upload, and whether there is one)."""

    x: Tensor
    w: Tensor
    sums: Tensor
    kept: Memory


@work("fedce/steps-and-error", update=(moved_from(0), None))
def steps_and_error(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The model after local steps, the loss of the model without this client, and whether that was measured."""
    (x, w), (upload, uploaded) = shared, private
    without = (x - w * upload) / (1.0 - w).clamp(min=LEAST)
    error = shard.task.full_loss(torch.where(uploaded > 0.0, without, x), goal_rows(shard))
    after = local_sgd(shard, x, None, static, draw)
    return (after, torch.stack([error * uploaded, uploaded])), (after, torch.ones_like(uploaded))


@validated
def fedce(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    combine: Literal["product", "sum"] = "product",
) -> Method:
    """Weight clients by how much their updates and rows add to those of the others.

    Symbols: γ = step.

    Cost: 1 round per call of round; d + 1 numbers down and d + 2 up per client.

    Args:
        combine: multiply the contributions in gradient space and in data space, or add them

    Example:
        >>> from coterie.methods import fedce
        >>> fedce(combine="sum").settings["combine"]
        'sum'
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch}

    def init(problem: Problem, n: int) -> FedCEState:
        x = problem.start
        kept = Memory.start((x, x.new_zeros(())), n)
        return FedCEState(x, uniform(n, like=x), x.new_zeros(4, n), kept)

    def round(fed: Federation, s: FedCEState, draw: Draw) -> FedCEState:
        at = draw.phase("walk")
        ((U, errors), ids), kept = fed.gather(
            steps_and_error, (s.x, Each(s.w[:, None])), memory=s.kept, draw=at, **local
        )
        moved = U - s.x
        active = s.w[ids].sum()
        found = torch.stack([apartness(moved, s.w[ids]), torch.ones_like(errors[:, 0]), *errors.T])
        sums = s.sums.index_add(1, ids, found)
        w = contributions(sums[:, ids], combine)
        return FedCEState(s.x + w @ moved, s.w.index_copy(0, ids, active * w), sums, kept)

    return Method("fedce", init, round, lambda s: View(s.x, s.w))


def apartness(moved: Tensor, w: Tensor) -> Tensor:
    """c_k of updates [K, d] with weights [K]: one minus the cosine to the weighted sum of the others."""
    others = w @ moved - w[:, None] * moved
    return 1.0 - cosine_similarity(moved, others)


def contributions(sums: Tensor, combine: str) -> Tensor:
    """w from the sums of c_k and e_k and their numbers of terms, [4, K]."""
    c, e = (_shares(total, times) for total, times in (sums[:2], sums[2:]))
    both = c * e if combine == "product" else c + e
    return both / both.sum()


def _shares(total: Tensor, times: Tensor) -> Tensor:
    """Means over their sum, at least 0.001; who has no term counts as the others do on average."""
    means = total / times.clamp(min=1.0)
    usual = means.sum() / (times > 0.0).sum().clamp(min=1)
    means = torch.where(times > 0.0, means, usual)
    whole = means.sum()
    even = torch.full_like(means, 1.0 / len(means))
    return torch.where(whole > 0.0, means / torch.where(whole > 0.0, whole, 1.0), even).clamp(min=LEAST)
