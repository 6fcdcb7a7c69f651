"""Top-k with error feedback (Stich et al. 2018), for local updates and in both directions.

    client   v = (x_k − x) + e_k,   sends top_k(v),   e_k ← v − top_k(v)
    server   u = η_g mean top_k(v) + e,   x ← x + top_k(u),   e ← u − top_k(u)

The sum of sparse uploads is hardly sparse, so with `down = "dense"` the whole model is sent down (the usual baseline);
with `down = "top-k"` the server compresses its step as the clients do theirs, and clients keep a copy of the model.
Values and their indices (int32) are sent and billed.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.compressed.replicas import Replicas
from coterie.methods.shared.works import local_sgd
from coterie.numerics.sparse import Sparse
from coterie.numerics.sparse import top_k as largest
from coterie.settings import BatchSize, Count, Positive

SHARE = 40  # parameters per sent entry, by default


class TopKState(NamedTuple):
    """The model, its last change as it is sent, the server's error, and the clients' copies and errors."""

    x: Tensor
    change: Sparse
    error: Tensor
    replicas: Replicas


@work("top-k/sparse-steps", update=(RESULT, None))
def sparse_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The largest entries of the update plus the error so far."""
    copy, error = private
    x = shared if isinstance(shared, Tensor) else copy + shared.dense(len(copy))
    v = local_sgd(shard, x, None, static, draw) - x + error
    sent = largest(v, static.k)
    return sent, (x, v - sent.dense(len(v)) if static.error_feedback else error)


@validated
def top_k(
    *,
    k: Count | None = None,
    down: Literal["top-k", "dense"] = "top-k",
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 32,
    server_step: Positive = 1.0,
    error_feedback: bool = True,
) -> Method:
    """Send the k largest entries of every update, with error feedback.

    Symbols: η = step, η_g = server_step.

    Cost: 1 round per call of round; k values and k indices each way per client (d numbers down with down="dense").

    Args:
        k: entries per update; one fortieth of the parameters if not set
        down: the server sends the k largest entries of its step, or the whole model
        server_step: η_g, by which the mean update is multiplied
        error_feedback: whether clients and server add to their next update what the last one lost

    Example:
        >>> from coterie.methods import top_k
        >>> top_k(k=50).settings["k"]
        50
    """
    knobs = {"step": step, "steps": local_steps, "batch": batch, "error_feedback": error_feedback}

    def init(problem: Problem, n: int) -> TopKState:
        x = problem.start
        kept = checked_k(k, len(x))
        zero = torch.zeros_like(x)
        return TopKState(x, Sparse.nothing(kept, x), zero, Replicas.start((x, zero), n))

    def round(fed: Federation, s: TopKState, draw: Draw) -> TopKState:
        kept, d = len(s.change.values), len(s.x)
        change = s.x if down == "dense" else s.change
        sent, replicas = s.replicas.gather(fed, sparse_steps, change, s.x, draw.phase("walk"), k=kept, **knobs)
        u = server_step * sent.dense(d).mean(0) + s.error
        change = largest(u, kept)
        moved = u if down == "dense" else change.dense(d)
        error = u - moved if error_feedback else s.error
        return TopKState(s.x + moved, change, error, replicas)

    return Method("top-k", init, round, lambda s: View(s.x), whole_numbers=("top-k/sparse-steps",))


def checked_k(k: int | None, dimension: int) -> int:
    """k, by default d/40; more entries than parameters are refused."""
    if k is not None and k > dimension:
        raise UsageError(f"method.k = {k} exceeds the {dimension} parameters; lower it.")
    return k or max(1, dimension // SHARE)
