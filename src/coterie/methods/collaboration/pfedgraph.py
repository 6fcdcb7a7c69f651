"""pFedGraph (Ye et al. 2023, ICML): a collaboration graph from the similarity of models and the clients' sizes.

    min over x_1 … x_K and W of Σ_i [ L_i(x_i) + ρ Σ_j W_ij S(x_i, x_j) + λ ‖W_i − p‖² ],   rows of W on the simplex
    server   W_i = Π_Δ(p + cos(Δ_i, Δ_·)/(2λ)),   x_i ← Σ_j W_ij u_j,   Δ_j = u_j − x⁰
    clients  u_i = x_i after local steps on L_i(x) − ρ cos(x, m_i),   m_i = Σ_j W_ij u_j/‖u_j‖

S is the negative cosine and p are the clients' shares of the rows, so that the row W_i that minimises the objective for
fixed models is a projection. As in the authors' code, cosines above 0.9 count as 1, and Δ_j is measured from the common
start x⁰.

Deviations. The pull ρ of the local steps is off unless `penalty` is set; then m_i is sent too. Its sign is that of the
objective, so that similar models are drawn together; the authors' code adds the cosine to the loss instead of taking it
away, with a factor of 0.01. Rows of W are solved among the participants of a round.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from coterie.federation import Each, Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.collaboration.models import NEEDS, shares
from coterie.methods.shared.works import batches, local_sgd, own_rows
from coterie.numerics import project_simplex
from coterie.settings import BatchSize, Count, NonNegative, Positive

ALIKE = 0.9  # cosines above this count as 1


class PFedGraphState(NamedTuple):
    """Personal models [K, d], the graph [K, K], the directions m_i [K, d], and the common start [d]."""

    X: Tensor
    W: Tensor
    m: Tensor
    origin: Tensor


@work("pfedgraph/pulled-steps", update=moved_from(0))
def pulled_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """u_i after local steps on L_i(x) − ρ cos(x, m_i)."""
    x, m = shared
    for batch in batches(own_rows(shard), static.batch, static.steps, draw):
        length = x.norm().clamp(min=torch.finfo(x.dtype).tiny)
        unit = x / length
        pull = (m - (m @ unit) * unit) / length
        x = x - static.step * (shard.task.gradient(x, batch) - static.penalty * pull)
    return x


@validated
def pfedgraph(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    graph_penalty: Positive = 0.8,
    penalty: NonNegative = 0.0,
) -> Method:
    """Weight clients by the cosine between their updates so far, close to their shares of the rows.

    Symbols: γ = step, λ = graph_penalty, ρ = penalty.

    Cost: 1 round per call of round; d numbers each way per client, and d more down with a penalty.

    Args:
        graph_penalty: λ, pull of the weights towards the clients' shares of the rows
        penalty: ρ, pull of the local steps towards the models of similar clients, by the cosine; 0 is off

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4)
        >>> friend, stranger = (x, x.sum(1)), (x, -x.sum(1))
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 1)
        >>> shards = [friend, friend, stranger]
        >>> problem = coterie.Weighting.on(shards, validation=shards, model=net, loss="squared")
        >>> coterie.fit(problem, coterie.methods.pfedgraph(), rounds=5, mode="vmap").clusters
        [[0, 1], [2]]
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch}

    def init(problem: Problem, n: int) -> PFedGraphState:
        X = problem.start.repeat(n, 1)
        W = shares(problem.train.counts, X).expand(n, n).contiguous()
        return PFedGraphState(X, W, torch.zeros_like(X), problem.start)

    def round(fed: Federation, s: PFedGraphState, draw: Draw) -> PFedGraphState:
        at = draw.phase("walk")
        if penalty:
            U, ids = fed.gather(pulled_steps, (Each(s.X), Each(s.m)), draw=at, penalty=penalty, **local)
        else:
            U, ids = fed.gather(local_sgd, Each(s.X), draw=at, **local)
        w = graph(U - s.origin, shares(fed.sizes[ids], U), graph_penalty)
        W = s.W.index_copy(0, ids, U.new_zeros(len(ids), fed.n).index_copy(1, ids, w))
        m = s.m.index_copy(0, ids, w @ normalize(U, dim=1)) if penalty else s.m
        return PFedGraphState(s.X.index_copy(0, ids, w @ U), W, m, s.origin)

    return Method("pfedgraph", init, round, lambda s: View(s.X, s.W), needs=NEEDS)


def graph(moved: Tensor, p: Tensor, penalty: float) -> Tensor:
    """W from the clients' updates since the start [K, d] and their shares [K]."""
    unit = normalize(moved, dim=1)
    cosines = unit @ unit.T
    return project_simplex(p + torch.where(cosines > ALIKE, 1.0, cosines) / (2.0 * penalty))
