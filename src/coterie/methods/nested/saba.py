"""SABA (Dagréou et al. 2022, Alg. 1): SOBA's three directions, with SAGA's variance reduction. Here over clients.

Client i keeps the directions d̃_i = (D_y, D_v, D_x) that it computed last, the server their mean A over all n clients:

    active clients S, all at (x, y, v):      δ_i = d_i − d̃_i,   d̃_i ← d_i                    at the client
                                             D = A + mean_{i ∈ S} δ_i,   A ← A + |S|/n mean_{i ∈ S} δ_i
    y ← y − ρ D_y          v ← v − ρ D_v     x ← x − γ D_x

D is unbiased over the draw of S, and its variance vanishes where the iterates converge: SABA reaches the solution with
constant steps although only some clients take part. With all clients D is their mean, and SABA is SOBA.

Deviations: the paper's tables have one entry per row; here one per client, which a federation can afford. A client's
directions use all its rows by default; with batches their noise stays. Tables start at 0 instead of a pass over all
clients. A client whose reply is lost or rejected keeps its entry, and the server cannot tell what the mean is then: all
tables start again at 0. With failures in every round SABA is SOBA, and its directions are never biased. x
and y are projected where they have a set.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Memory, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, View, validated
from coterie.methods.nested.steps import NESTED, SUPPORTS, Curvature, Step, StepRule, indirect
from coterie.methods.nested.works import directions
from coterie.problems.nested import NestedProblem
from coterie.settings import BatchSize

Directions = tuple[Tensor, Tensor, Tensor]
PARTIAL = 1 / 3  # of the steps where not all clients take part, as SAGA needs it


class SabaState(NamedTuple):
    """SOBA's state, the share of the steps that is taken, A, and the tables, which stay at the clients."""

    x: Tensor
    y: Tensor
    v: Tensor
    kind: str
    curvature: Curvature
    share: float
    mean: Directions
    tables: Memory


@work("saba/changed-directions", update=RESULT)
def changed_directions(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """δ_i = d_i − d̃_i at the shared (x, y, v), and d_i for the table."""
    x, y, v = shared
    found = directions(shard, x, y, v, static.batch, draw)
    return tuple(new - old for new, old in zip(found, private, strict=True)), found


@validated
def saba(*, step: Step = "auto", outer_step: Step = "auto", batch: BatchSize = "all") -> Method:
    """Run SOBA with SAGA's variance reduction over clients, for rounds in which only some of them take part.

    Symbols: ρ = step, γ = outer_step.

    Cost: 1 round per call of round, with 2 d_y + d_x numbers per client up and down; as many stay at the client.
    Steps "auto" take at most 43 rounds more, in the first call.

    Args:
        step: ρ, step size of y and v; "auto" takes 1/L, with the curvature L of the inner loss, and a third of it
            where not all clients take part
        outer_step: γ, step size of x; "auto" chooses it by a small model of the problem, and takes a third of it
            where not all clients take part
        batch: rows per direction and level; 'all' uses every row of the client

    Example:
        >>> from coterie.methods import saba
        >>> saba(step=0.1, outer_step=0.01).name
        'saba'
    """

    def rule(share: float) -> StepRule:
        return StepRule(step, outer_step, share=share)

    def init(problem: NestedProblem, n: int) -> SabaState:
        x, y, kind = problem.start, problem.inner_start, problem.task.kind
        v = indirect(kind, y)
        return SabaState(x, y, v, kind, Curvature(), 1.0, *_empty_tables(x, y, v, n))

    def round(fed: Federation, s: SabaState, draw: Draw) -> SabaState:
        part = len(fed.ids) / fed.n
        share = s.share if part == 1.0 else PARTIAL
        curvature = rule(share).estimated(fed, s)
        rho, gamma = rule(share).sizes(curvature)
        noted, at = len(fed.book.events), draw.phase("directions")
        change, tables = fed.mean(changed_directions, (s.x, s.y, s.v), memory=s.tables, draw=at, batch=batch)
        d_y, d_v, d_x = _sum(s.mean, change)
        x, y = fed.task.x.project(s.x - gamma * d_x), fed.task.y.project(s.y - rho * d_y)
        v = s.v - rho * d_v
        if len(fed.book.events) > noted:  # not every active client has renewed its table
            return SabaState(x, y, v, s.kind, curvature, share, *_empty_tables(x, y, v, fed.n))
        return SabaState(x, y, v, s.kind, curvature, share, _sum(s.mean, change, part), tables)

    def view(s: SabaState) -> View:
        return rule(s.share).view(s)

    return Method("saba", init, round, view, NESTED, SUPPORTS)


def _sum(a: Directions, change: Directions, share: float = 1.0) -> Directions:
    """a + share · change."""
    return a[0] + share * change[0], a[1] + share * change[1], a[2] + share * change[2]


def _empty_tables(x: Tensor, y: Tensor, v: Tensor, n: int) -> tuple[Directions, Memory]:
    """A = 0 and d̃_i = 0."""
    zeros = (torch.zeros_like(y), torch.zeros_like(v), torch.zeros_like(x))
    return zeros, Memory.start(zeros, n)
