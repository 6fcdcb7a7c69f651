"""DPFL (Kharrat, Canini and Horváth 2025, AISTATS): a collaboration graph, built greedily by validation, in a budget.

    u_i = x_i after local steps,   S_i ⊆ C_i ∪ {i} by double greedy on R(S) = −L_i(Σ_{j∈S} n_j u_j / Σ_{j∈S} n_j)
    x_i ← the weighted mean of u_j over S_i

C_i are the candidates of client i: all other clients in the first round, whose choice is kept to at most B of them and
becomes C_i for good. L_i is the loss on client i's validation rows. Double greedy goes through the candidates in random
order, with X = {i} and Y = C_i ∪ {i} at first: a = R(X + j) − R(X) and b = R(Y − j) − R(Y); j is added to X with
probability a⁺/(a⁺ + b⁺), and removed from Y otherwise. Where both are 0 it is added.

Deviations. Models go through the server instead of directly from client to client, so that each is uploaded once and
downloaded by those that have it among their candidates. The paper builds C_i in batches of B downloads, so that a
client never holds more; here it downloads all in one exchange, of the same size in all.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Each, Memory, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.collaboration.models import NEEDS
from coterie.methods.shared.works import goal_rows, local_sgd
from coterie.settings import BatchSize, Count, Positive


class DPFLState(NamedTuple):
    """Mixtures and uploads, both [K, d], the weights of the mixtures and the candidates (1 or 0), both [K, K], what
    clients keep (their mixture and their upload), and whether a client has chosen its candidates (1 or 0), [K]."""

    X: Tensor
    U: Tensor
    W: Tensor
    candidates: Tensor
    kept: Memory
    settled: Tensor


@work("dpfl/own-steps", update=RESULT)
def own_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The client's update from its mixture; until it mixes again, its upload is its mixture."""
    x, _ = private
    after = local_sgd(shard, x, None, static, draw)
    return after - x, (after, after)


@work("dpfl/choose-and-mix", update=None)
def choose_and_mix(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """Which of the candidates the client takes (1 or 0); it keeps the mixture."""
    (models, sizes), (_, u) = shared, private
    models, rows = torch.cat([models, u[None]]), goal_rows(shard)

    def reward(taken: Tensor) -> Tensor:
        return -shard.task.full_loss((taken * sizes / (taken @ sizes)) @ models, rows)

    places = torch.arange(len(models), device=sizes.device)
    count = len(models) - 1
    grown, shrunk = (places == count).to(sizes), torch.ones_like(sizes)
    least, most = reward(grown), reward(shrunk)
    chances, order = draw.phase("chances").uniform(count, dtype=sizes.dtype), draw.phase("order").permutation(count)
    for t in range(count):
        mark = (places == order[t]).to(sizes)
        more, fewer = reward(grown + mark), reward(shrunk - mark)
        a, b = (more - least).clamp(min=0.0), (fewer - most).clamp(min=0.0)
        chance = torch.where(a + b > 0.0, a / torch.where(a + b > 0.0, a + b, 1.0), 1.0)
        add = (chances[t] < chance) & (grown.sum() <= static.budget)
        grown, least = torch.where(add, grown + mark, grown), torch.where(add, more, least)
        shrunk, most = torch.where(add, shrunk, shrunk - mark), torch.where(add, most, fewer)
    return grown[:-1], ((grown * sizes / (grown @ sizes)) @ models, u)


@validated
def dpfl(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    budget: Count = 5,
) -> Method:
    """Average, at every client, a set of models that it chooses greedily by its validation loss.

    Symbols: γ = step, B = budget.

    With n_i candidates, a client downloads n_i models with their numbers of rows. These are all other clients in its
    first round, and at most B later.

    Cost: 2 rounds per call of round; n_i (d + 1) + 1 numbers down and d + n_i up per client.

    Args:
        budget: B, largest number of collaborators of a client

    Example:
        >>> from coterie.methods import dpfl
        >>> dpfl(budget=3).settings["budget"]
        3
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch}

    def init(problem: Problem, n: int) -> DPFLState:
        x = problem.start
        eye = torch.eye(n).to(x)
        X = x.repeat(n, 1)
        return DPFLState(X, X, eye, 1.0 - eye, Memory.start((x, x), n), x.new_zeros(n))

    def round(fed: Federation, s: DPFLState, draw: Draw) -> DPFLState:
        (moved, ids), kept = fed.gather(own_steps, memory=s.kept, draw=draw.phase("walk"), **local)
        U, sizes = s.U.index_copy(0, ids, s.X[ids] + moved), fed.sizes.to(s.U)
        taken, candidates, settled = torch.zeros_like(s.W), s.candidates, s.settled
        counts = candidates.sum(1).long()
        groups = {count: (counts == count).nonzero()[:, 0] for count in sorted(set(counts.tolist())) if count}
        for count, view in replace(fed, ids=ids).parts(groups):
            pool = candidates[view.ids].nonzero()[:, 1].reshape(-1, count)
            weights = torch.cat([sizes[pool], sizes[view.ids][:, None]], dim=1)
            shared = (Each(U[pool], view.ids), Each(weights, view.ids))
            at = draw.phase("choice")
            (marks, those), kept = view.gather(choose_and_mix, shared, memory=kept, draw=at, budget=budget)
            taken = taken.index_put((those[:, None], pool[torch.isin(view.ids, those)]), (marks > 0.5).to(marks))
            new = those[settled[those] == 0.0]
            candidates, settled = candidates.index_copy(0, new, taken[new]), settled.index_fill(0, new, 1.0)
        rows = (taken + torch.eye(fed.n).to(U)) * sizes
        W = s.W.index_copy(0, ids, (rows / rows.sum(1, keepdim=True))[ids])
        return DPFLState(s.X.index_copy(0, ids, W[ids] @ U), U, W, candidates, kept, settled)

    return Method("dpfl", init, round, lambda s: View(s.X, s.W), needs=NEEDS)
