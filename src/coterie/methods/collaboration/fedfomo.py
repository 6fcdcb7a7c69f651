"""FedFomo (Zhang et al. 2021, ICLR): every client downloads M models and mixes those that lower its validation loss.

    m_n = (L_i(x_i) − L_i(u_n))/‖u_n − x_i‖,   w_n = max(m_n, 0)/Σ_j max(m_j, 0)
    x_i ← x_i + Σ_n w_n (u_n − x_i),   u_i = x_i after local steps,   P_in ← P_in + m_n

u_n are the models that clients uploaded last, x_i is client i's own mixture of the round before, and L_i its loss on
its validation rows. Client i's own upload is always among the candidates, and is not downloaded: it is at hand. It
sends u_i − x_i and m, from which the server, who has the candidates, knows u_i. The server sends the M models with the
largest P_in, which starts at 0; with probability ε = 0.3 it sends random ones.

Deviations. Where no candidate lowers the loss, the client continues from its own upload. The probability of random
downloads is constant; in the paper it falls. Equal P_in are ordered by chance. Absent clients are candidates with the
model that they uploaded last. In the first round the common start is sent once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Each, Memory, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.collaboration.models import NEEDS, on_simplex, validation_losses
from coterie.methods.shared.works import local_sgd
from coterie.settings import BatchSize, Count, Positive

EXPLORE = 0.3  # ε, the probability of random downloads


class FedFomoState(NamedTuple):
    """Uploads [K, d], the weights of the last mixtures and the sums of merits, both [K, K], what clients keep (their
    mixture and their upload), and rounds done."""

    U: Tensor
    W: Tensor
    P: Tensor
    kept: Memory
    rounds: int


def mixture_weights(merits: Tensor) -> Tensor:
    """w from m, [..., 1 + M]; the client's own upload comes first, and has all the weight where nothing helps."""
    own = torch.zeros_like(merits)
    own[..., 0] = 1.0
    return on_simplex(merits, own)


@work("fedfomo/mix-and-train", update=(RESULT, None))
def mix_and_train(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The client's update from its mixture, and the merits m; it keeps its mixture and its upload."""
    x, u = private
    candidates = torch.cat([u[None], shared])
    losses = validation_losses(shard, torch.cat([x[None], candidates]))
    apart = (candidates - x).norm(dim=1)
    merits = torch.where(apart > 0.0, (losses[0] - losses[1:]) / torch.where(apart > 0.0, apart, 1.0), 0.0)
    x = mixture_weights(merits) @ candidates
    after = local_sgd(shard, x, None, static, draw)
    return (after - x, merits), (x, after)


@validated
def fedfomo(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    downloads: Count = 5,
) -> Method:
    """Mix, at every client, the downloaded models that lower its own validation loss.

    Symbols: γ = step, M = downloads.

    Cost: 1 round per call of round; M d numbers down and d + M + 1 up per client (d down in the first).

    Args:
        downloads: M, models that a client downloads per round

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4)
        >>> friend, stranger = (x, x.sum(1)), (x, -x.sum(1))
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 1)
        >>> shards = [friend, friend, stranger]
        >>> problem = coterie.Weighting.on(shards, validation=shards, model=net, loss="squared")
        >>> fit = coterie.fit(problem, coterie.methods.fedfomo(), rounds=5, mode="vmap")
        >>> fit.weights[2].tolist()
        [0.0, 0.0, 1.0]
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch}

    def init(problem: Problem, n: int) -> FedFomoState:
        x = problem.start
        return FedFomoState(x.repeat(n, 1), torch.eye(n).to(x), x.new_zeros(n, n), Memory.start((x, x), n), 0)

    def round(fed: Federation, s: FedFomoState, draw: Draw) -> FedFomoState:
        count = min(downloads if s.rounds else 1, fed.n - 1)
        sent = favourites(s.P, count, EXPLORE, draw.phase("downloads"))
        models = Each(s.U[sent[fed.ids]], fed.ids)
        at = draw.phase("walk")
        ((moved, merits), ids), kept = fed.gather(mix_and_train, models, memory=s.kept, draw=at, **local)
        known, w = torch.cat([ids[:, None], sent[ids]], dim=1), mixture_weights(merits)
        U = s.U.index_copy(0, ids, torch.einsum("im,imd->id", w, s.U[known]) + moved)
        W = s.W.index_copy(0, ids, torch.zeros_like(s.W[ids]).scatter(1, known, w))
        P = s.P.index_put((ids[:, None], sent[ids]), merits[:, 1:], accumulate=True)
        return FedFomoState(U, W, P, kept, s.rounds + 1)

    return Method("fedfomo", init, round, lambda s: View(s.U, s.W), needs=NEEDS)


def favourites(P: Tensor, count: int, explore: float, draw: Draw) -> Tensor:
    """The clients whose models each client is sent, [K, count]: the largest P_in, or random ones; never its own."""
    n = len(P)
    each = draw.client(torch.arange(n, device=P.device))
    scores = torch.where(each.phase("explore").bernoulli(explore)[:, None], 0.0, P).fill_diagonal_(-torch.inf)
    order = each.permutation(n)
    ranked = scores.gather(1, order).argsort(dim=1, descending=True, stable=True)
    return order.gather(1, ranked)[:, :count]
