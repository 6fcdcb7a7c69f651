"""Ditto (Li et al. 2021, Algorithm 2), personalised for the target.

All clients walk r steps from the global model x, which the server averages; the target walks s proximal steps
v ← v − γ(∇L_0(v) + λ(v − x)) on its own rows. The target's v is the model that is judged; clients' own personal
models do not enter it and are not kept.
"""

from typing import Any, NamedTuple

from torch import Tensor

from coterie.federation import Federation, Shard, Static, work
from coterie.federation.tree import Tree
from coterie.methods.base import Method, validated
from coterie.methods.works import goal_rows, sgd_walk
from coterie.numerics import Draw
from coterie.problems.parameters import Count, Positive
from coterie.problems.view import View


class DittoState(NamedTuple):
    """The global model and the target's own."""

    x: Tensor
    v: Tensor


@work
def proximal_walk(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """s steps of v ← v − γ(∇L_0,B(v) + λ(v − x))."""
    x, v = shared
    rows = goal_rows(shard)
    for index in draw.batches(rows.count, static.batch, static.steps):
        v = v - static.step * (shard.task.gradient(v, rows.take(index)) + static.penalty * (v - x))
    return v


@validated
def ditto(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    personal_steps: Count = 25,
    penalty: Positive = 0.1,
    batch: Count = 50,
) -> Method:
    """r = local_steps, s = personal_steps, λ = penalty. One round; one exchange with the target."""

    def init(problem: Any, n: int) -> DittoState:
        return DittoState(problem.start, problem.start)

    def round(fed: Federation, s: DittoState, draw: Draw) -> DittoState:
        own = draw.phase("personal")
        v = fed.ask_target(
            proximal_walk, (s.x, s.v), draw=own, step=step, steps=personal_steps, batch=batch, penalty=penalty
        )
        walk = draw.phase("walk")
        return DittoState(fed.mean(sgd_walk, s.x, draw=walk, step=step, steps=local_steps, batch=batch), v)

    return Method("ditto", init, round, lambda s: View(s.v), needs=frozenset({"gradient", "target"}))
