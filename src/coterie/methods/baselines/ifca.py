"""IFCA (Ghosh et al. 2020, Algorithm 1, model averaging): clients choose one of k models, and train it together.

    j_i = argmin_j L_i(X_j),   U_i: local steps from X_{j_i},   X_j⁺ = mean of the U_i with j_i = j

L_i is taken on all of client i's training rows. A model that nobody chooses stays as it is, and so does the choice of
absent clients. The personal model of client i is X_{j_i}; as a collaboration matrix, it gives equal weights to all that
chose the same model.

The paper starts from k random models, the best of several trials. Here X_0 is the problem's start and the others are at
random distances from it, `spread` times its root mean square per parameter, the same in every run.
"""

from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.works import local_sgd, own_rows
from coterie.numerics.roots import square_root
from coterie.settings import BatchSize, Count, Positive


class IFCAState(NamedTuple):
    """The k models [k, d], and which of them each client chose last, [n]."""

    X: Tensor
    choice: Tensor


@work("ifca/choose-and-step", update=(RESULT, None))
def choose_and_step(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> tuple[Tensor, Tensor]:
    """U_i − X_{j_i}, and the number j_i."""
    rows = own_rows(shard)
    j = torch.stack([shard.task.full_loss(x, rows) for x in shared]).argmin()
    x = shared[j[None]][0]
    return local_sgd(shard, x, None, static, draw) - x, j


@validated
def ifca(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    clusters: Annotated[int, Field(ge=1)] = 2,
    spread: Positive = 1.0,
) -> Method:
    """Train several models at once; every client joins the one that fits its data best, anew in each round.

    Symbols: γ = step, k = clusters.

    Cost: 1 round per call of round; kd numbers down and d + 1 up per client.

    Args:
        clusters: k, number of models; 1 is FedAvg with equal weights
        spread: how far the first models are from the problem's start, in root mean squares of its parameters

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4)
        >>> friend, stranger = (x, x.sum(1)), (x, -x.sum(1))
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 1)
        >>> shards = [friend, friend, stranger]
        >>> problem = coterie.Weighting.on(shards, validation=shards, model=net, loss="squared")
        >>> coterie.fit(problem, coterie.methods.ifca(), rounds=5, mode="vmap").clusters
        [[0, 1], [2]]
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch}

    def init(problem: Problem, n: int) -> IFCAState:
        x = problem.start
        away = Draw.of(0, device=x.device).phase("ifca").normal(clusters, len(x), dtype=x.dtype)
        away[0] = 0.0
        scale = spread * square_root(x.square().mean())
        return IFCAState(x + scale * away, torch.zeros(n, dtype=torch.int64, device=x.device))

    def round(fed: Federation, s: IFCAState, draw: Draw) -> IFCAState:
        (changes, chosen), ids = fed.gather(choose_and_step, s.X, draw=draw.phase("walk"), **local)
        members = torch.nn.functional.one_hot(chosen, clusters).to(s.X)
        X = s.X + members.T @ changes / members.sum(0).clamp(min=1.0)[:, None]
        return IFCAState(X, s.choice.index_copy(0, ids, chosen))

    def view(s: IFCAState) -> View:
        together = (s.choice[:, None] == s.choice).to(s.X)
        return View(s.X[s.choice], together / together.sum(1, keepdim=True))

    needs, sends = frozenset({"gradient", "everyone"}), ("ifca/choose-and-step",)
    return Method("ifca", init, round, view, needs=needs, whole_numbers=sends)
