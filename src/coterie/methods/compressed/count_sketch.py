"""FetchSGD (Rothchild et al. 2020): sketches up, momentum and error in sketch space, the k heaviest entries down.

    client   sends S(x_k − x), a table of `rows` × `columns`
    server   U ← ρU + mean S(x_k − x),   E ← E + η_g U,   Δ = top_k(estimate(E)),   x ← x + Δ

What Δ takes is cancelled in E: by subtracting S(Δ) as Algorithm 1 prints it, or by setting the buckets that Δ falls
into to zero, in U as well, which is the default because subtracting amplifies the estimates' errors once k is not small
against the table. Deviations: the update is that of local steps, not one gradient; clients keep a copy of the model so
that k entries bring them up to date; coordinates are dealt to buckets evenly.
"""

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.compressed.fedsep import Seed
from coterie.methods.compressed.replicas import Replicas
from coterie.methods.compressed.top_k import checked_k
from coterie.methods.shared.works import local_sgd
from coterie.numerics.sketches import count_table
from coterie.numerics.sparse import Sparse, top_k
from coterie.settings import BatchSize, Count, Positive

SHARE = 20  # parameters per number of the table, by default


class CountSketchState(NamedTuple):
    """The model, its last change as it is sent, momentum and error tables, and the clients' copies."""

    x: Tensor
    change: Sparse
    momentum: Tensor
    error: Tensor
    replicas: Replicas


@work("count-sketch/sketched-steps", update=RESULT)
def sketched_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The table of the update, from the copy brought up to date."""
    x = shared if isinstance(shared, Tensor) else private + shared.dense(len(private))
    moved = local_sgd(shard, x, None, static, draw)
    return count_table(static.rows, static.columns, len(x), static.sketch_seed).apply(moved - x), x


@validated
def count_sketch(
    *,
    rows: Count = 1,
    columns: Count | None = None,
    k: Count | None = None,
    sketch_seed: Seed = 0,
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0,
    cancel: Literal["zero", "subtract", "never"] = "zero",
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 32,
    server_step: Positive = 1.0,
) -> Method:
    """Send count sketches of the updates up and the k heaviest entries down (FetchSGD).

    Symbols: η = step, ρ = momentum, η_g = server_step.

    Cost: 1 round per call of round; rows · columns numbers up per client, k values and k indices down.

    Args:
        rows: rows of the table
        columns: columns of the table; one twentieth of the parameters in all if not set
        k: entries that the server applies per round; one fortieth of the parameters if not set
        momentum: ρ, momentum in sketch space
        cancel: what the applied entries leave in the error table: zero empties their buckets, subtract takes out their
            sketch (as Algorithm 1 prints it), never leaves it

    Example:
        >>> from coterie.methods import count_sketch
        >>> count_sketch().name
        'count-sketch'
    """
    knobs = {"step": step, "steps": local_steps, "batch": batch, "rows": rows, "sketch_seed": sketch_seed}

    def init(problem: Problem, n: int) -> CountSketchState:
        x, d = problem.start, len(problem.start)
        width = columns or max(1, d // (SHARE * rows))
        if rows * width >= d:
            raise UsageError(
                f"a table of {rows} × {width} numbers for {d} parameters saves nothing; lower method.columns."
            )
        table = x.new_zeros(rows * width)
        return CountSketchState(x, Sparse.nothing(checked_k(k, d), x), table, table, Replicas.start(x, n))

    def round(fed: Federation, s: CountSketchState, draw: Draw) -> CountSketchState:
        S = count_table(rows, len(s.error) // rows, len(s.x), sketch_seed)
        tables, replicas = s.replicas.gather(
            fed, sketched_steps, s.change, s.x, draw.phase("walk"), columns=S.columns, **knobs
        )
        u = momentum * s.momentum + tables.mean(0)
        e = s.error + server_step * u
        change = top_k(S.estimate(e), len(s.change.values))
        moved = change.dense(len(s.x))
        if cancel == "subtract":
            e = e - S.apply(moved)
        elif cancel == "zero":
            hit = S.apply(moved) != 0.0
            u, e = torch.where(hit, 0.0, u), torch.where(hit, 0.0, e)
        return CountSketchState(s.x + moved, change, u, e, replicas)

    return Method("count-sketch", init, round, lambda s: View(s.x))
