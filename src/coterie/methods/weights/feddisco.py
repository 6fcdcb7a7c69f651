"""FedDisco (Ye et al. 2023, ICML): weights by the clients' sizes and by how far their class shares are from even ones.

    w_k ∝ max(n_k/Σ_j n_j − a d_k + b, 0),   d_k = ‖D_k − T‖₂,   x ← Σ_k w_k U_k

U_k is the common model after client k's local steps, D_k are the shares of the classes among its training rows, and T
is the even distribution 1/C. A client sends d_k, one number, when it first participates. Where no weight is positive,
the clients' sizes alone are taken.

Deviation: the paper also takes T from the clients' counts of classes, and other distances; here T is even and the
distance that of its experiments.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.errors import NoClients
from coterie.federation import Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, known, validated
from coterie.methods.shared.works import local_sgd, own_rows
from coterie.settings import BatchSize, Count, NonNegative, Positive


class FedDiscoState(NamedTuple):
    """The common model [d], the client weights [K], the discrepancies d_k [K], and whether they are known (1 or 0)."""

    x: Tensor
    w: Tensor
    discrepancies: Tensor
    asked: Tensor


@work("feddisco/discrepancy", update=None)
def discrepancy(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """d_k: the distance of the client's class shares from even ones."""
    batch = own_rows(shard).all()
    marks = torch.nn.functional.one_hot(batch.labels.long(), static.classes).to(shard.task.model.start)
    found = marks.mean(0) if batch.weight is None else batch.weight @ marks / batch.weight.sum()
    return (found - 1.0 / static.classes).norm()


@validated
def feddisco(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    severity: NonNegative = 0.5,
    margin: NonNegative = 0.1,
) -> Method:
    """Weight clients by their sizes, less for clients whose classes are far from evenly distributed.

    Symbols: γ = step, a = severity, b = margin.

    Cost: 1 round per call of round, and 1 round more for 1 number of each client that participates for the first time.

    Args:
        severity: a, how much weight a discrepancy costs
        margin: b, weight that every client gets beside its share of the rows

    Example:
        >>> import torch
        >>> from coterie.methods.weights.feddisco import disco_weights
        >>> disco_weights(torch.tensor([10.0, 10.0]), torch.tensor([0.0, 0.6]), 0.5, 0.1)
        tensor([0.6667, 0.3333])
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch}

    def init(problem: Problem, n: int) -> FedDiscoState:
        sizes, zeros = problem.train.counts.to(problem.start), problem.start.new_zeros(n)
        return FedDiscoState(problem.start, sizes / sizes.sum(), zeros, zeros)

    def round(fed: Federation, s: FedDiscoState, draw: Draw) -> FedDiscoState:
        d, asked = s.discrepancies, s.asked
        new = replace(fed, ids=fed.ids[asked[fed.ids] == 0.0])
        if len(new.ids):
            classes = known(fed.task.classes, "classes")
            with suppress(NoClients):  # noted by the federation; they are asked again in the next round
                found, ids = new.gather(discrepancy, draw=draw.phase("discrepancy"), classes=classes)
                d, asked = d.index_copy(0, ids, found.to(d)), asked.index_fill(0, ids, 1.0)
        w = torch.zeros_like(s.w).index_copy(
            0, fed.ids, disco_weights(fed.sizes[fed.ids], d[fed.ids], severity, margin)
        )
        x = fed.mean(local_sgd, s.x, weights=w, draw=draw.phase("walk"), **local)
        return FedDiscoState(x, w, d, asked)

    needs = frozenset({"gradient", "classes"})
    return Method("feddisco", init, round, lambda s: View(s.x, s.w), needs=needs)


def disco_weights(sizes: Tensor, discrepancies: Tensor, severity: float, margin: float) -> Tensor:
    """w from sizes and discrepancies, both [K]."""
    share = sizes.to(discrepancies) / sizes.to(discrepancies).sum()
    positive = (share - severity * discrepancies + margin).clamp(min=0.0)
    return positive / positive.sum() if bool(positive.any()) else share
