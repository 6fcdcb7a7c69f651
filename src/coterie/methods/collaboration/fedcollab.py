"""FedCollab (Bao et al. 2023, ICML): coalitions are formed before training, then FedAvg runs within each of them.

    min over partitions of Σ_i [ C/√n_c(i) + Σ_{j∈c(i)} n_j D_ij / n_c(i) ],   n_c = Σ_{j∈c} n_j
    D_ij = P_i(h_ij says i) + P_j(h_ij says j) − 1

The first term bounds how far few rows may lead astray, the second how far the rows of the others do: D_ij is the
divergence between the (inputs, label) pairs of clients i and j, estimated by a discriminator h_ij that the two train
together, each on its own rows, and judge on their validation rows. The server searches the partition: from everyone
alone, client after client moves to the coalition that lowers the sum most, until nobody moves. All of this is done in
the first call of round, with all clients; a client that does not reply stays alone.

Deviations. The discriminator is linear in the inputs for each label, h(x, y) = ⟨a_y, x⟩ + b_y, instead of a network
with a hidden layer; it sees shifts of inputs, of labels and of concepts (labels given the inputs). All pairs are
trained at once, in the same exchanges. Clients move in the order of their numbers. Negative estimates count as 0.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Batch, Each, Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, known, validated
from coterie.methods.shared.works import batches, goal_rows, local_sgd, own_rows
from coterie.settings import BatchSize, Count, Positive


class FedCollabState(NamedTuple):
    """The model of each client's coalition [K, d], the weights inside coalitions [K, K], the coalition's number by
    client [K], the numbers of one row of inputs, and rounds done."""

    X: Tensor
    W: Tensor
    coalitions: Tensor
    inputs: int
    rounds: int


def scores(h: Tensor, batch: Batch, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """What each discriminator [K, C, D + 1] says of each row, [B, K]; the rows with a 1 added, and their labels."""
    x = batch.inputs.reshape(len(batch.inputs), -1).to(h)
    x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    y = torch.nn.functional.one_hot(batch.labels.long(), classes).to(h)
    return torch.einsum("bcd,kcd->bk", torch.einsum("bd,bc->bcd", x, y), h), x, y


@work("fedcollab/discriminator-steps", update=moved_from())
def discriminator_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """All discriminators [K, C, D + 1] after steps of logistic regression; the client's own rows are the positives."""
    h = shared
    for batch in batches(own_rows(shard), static.batch, static.steps, draw):
        said, x, y = scores(h, batch, static.classes)
        wrong = torch.einsum("bk,bc->bkc", torch.sigmoid(-said), y)
        h = h + static.step * torch.einsum("bkc,bd->kcd", wrong, x) / len(x)
    return h


@work("fedcollab/recognised-share", update=None)
def recognised_share(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """The share of the client's validation rows that each discriminator takes for its own, [K]."""
    batch = goal_rows(shard).all()
    right = (scores(shared, batch, static.classes)[0] > 0.0).to(shared)
    return right.mean(0) if batch.weight is None else batch.weight @ right / batch.weight.sum()


@validated
def fedcollab(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    generalisation: Positive = 1.0,
    divergence_rounds: Count = 20,
    divergence_steps: Count = 10,
    divergence_step: Positive = 0.5,
) -> Method:
    """Partition the clients into coalitions by sizes and estimated divergences, then average within each.

    Symbols: γ = step, C = generalisation.

    With K clients, inputs of D numbers and c classes, the first call has divergence_rounds + 1 rounds more, of
    K c (D + 1) numbers each way per client.

    Cost: 1 round per call of round; d numbers each way per client.

    Args:
        generalisation: C, weight of the bound for few rows against the divergence; large values join more clients
        divergence_rounds: exchanges in which the discriminators are trained, before the first round
        divergence_steps: local steps on the discriminators per exchange
        divergence_step: step size of these

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4).repeat(5, 1)
        >>> friend, stranger = (x, (x[:, 0] > 0).long()), (x, (x[:, 0] == 0).long())
        >>> net = torch.nn.Linear(4, 2)
        >>> shards = [friend, friend, stranger]
        >>> problem = coterie.Weighting.on(shards, validation=shards, model=net, loss="cross_entropy")
        >>> coterie.fit(problem, coterie.methods.fedcollab(), rounds=1, mode="vmap").clusters
        [[0, 1], [2]]
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch}

    def init(problem: Problem, n: int) -> FedCollabState:
        if len(problem.train.columns) != 2:
            raise UsageError(
                "fedcollab's discriminators take one array of inputs, and this problem has several; choose a method "
                "that compares models instead, such as pfedgraph or fedfomo."
            )
        eye, inputs = torch.eye(n).to(problem.start), problem.train.columns[0][:1].numel()
        return FedCollabState(problem.start.repeat(n, 1), eye, torch.arange(n, device=eye.device), inputs, 0)

    def divergences(fed: Federation, like: Tensor, inputs: int, draw: Draw) -> Tensor:
        """D, [K, K]; 1 for whoever did not reply."""
        classes = known(fed.task.classes, "classes")
        everyone = replace(fed, ids=torch.arange(fed.n, device=like.device))
        h = like.new_zeros(fed.n, fed.n, classes, inputs + 1)  # row i: h_i1 … h_iK, with h_ji = −h_ij
        settings: dict[str, Any] = {"step": divergence_step, "steps": divergence_steps, "batch": batch}
        for t in range(divergence_rounds):
            at = draw.phase("divergence").step(t)
            moved, ids = everyone.gather(discriminator_steps, Each(h), draw=at, classes=classes, **settings)
            h = h.index_copy(0, ids, moved)
            h = (h - h.transpose(0, 1)) / 2.0
        right, ids = everyone.gather(recognised_share, Each(h), draw=draw.phase("judge"), classes=classes)
        return divergence(torch.ones_like(h[:, :, 0, 0]).index_copy(0, ids, right))

    def round(fed: Federation, s: FedCollabState, draw: Draw) -> FedCollabState:
        coalitions, W = s.coalitions, s.W
        if s.rounds == 0:
            D = divergences(fed, s.X, s.inputs, draw)
            coalitions = partition(D, fed.sizes, generalisation).to(coalitions)
            W = inside(coalitions, fed.sizes).to(W)
        U, ids = fed.gather(local_sgd, Each(s.X), draw=draw.phase("walk"), **local)
        mass = W[:, ids].sum(1, keepdim=True)
        X = torch.where(mass > 0.0, W[:, ids] @ U / torch.where(mass > 0.0, mass, 1.0), s.X)
        return FedCollabState(X, W, coalitions, s.inputs, s.rounds + 1)

    needs = frozenset({"gradient", "everyone", "classes"})
    return Method("fedcollab", init, round, lambda s: View(s.X, s.W), needs=needs)


def divergence(right: Tensor) -> Tensor:
    """D from the shares of rows that the discriminators recognise, [K, K]."""
    return (right + right.T - 1.0).clamp(min=0.0).fill_diagonal_(0.0)


def inside(coalitions: Tensor, sizes: Tensor) -> Tensor:
    """The weights n_j/n_c inside coalitions, [K, K]."""
    rows = (coalitions[:, None] == coalitions) * sizes.double()
    return rows / rows.sum(1, keepdim=True)


def bound(D: Tensor, sizes: Tensor, coalitions: Tensor, generalisation: float) -> float:
    """The sum that the partition minimises."""
    rows = (coalitions[:, None] == coalitions) * sizes.double()
    total = rows.sum(1)
    return float((generalisation * total.rsqrt() + (rows * D.double()).sum(1) / total).sum())


def partition(D: Tensor, sizes: Tensor, generalisation: float) -> Tensor:
    """The coalition of each client, [K], by the number of its first member: a local minimum of the bound."""
    n = len(D)
    D, sizes = D.cpu(), sizes.cpu()
    found = torch.arange(n)
    least, moved = bound(D, sizes, found, generalisation), True
    while moved:
        moved = False
        for k in range(n):
            taken = set(found.tolist())
            for c in [*sorted(taken), min(set(range(n + 1)) - taken)]:  # the last one is empty: k alone
                trial = found.clone()
                trial[k] = c
                value = bound(D, sizes, trial, generalisation)
                if value < least - 1e-12:
                    found, least, moved = trial, value, True
    first = {c: k for k, c in reversed(list(enumerate(found.tolist())))}
    return torch.tensor([first[c] for c in found.tolist()])
