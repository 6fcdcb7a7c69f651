"""Works and settings that several methods share."""

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

from torch import Tensor

from coterie.federation import RESULT, Batch, Rows, Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation
from coterie.numerics.memory import stepped


class LocalSteps(NamedTuple):
    """How clients train between two exchanges.

    Args:
        step: step size γ; in FedNest the total one, which is divided by the number of steps.
        steps: the number of steps τ; in FedNest one number, or one per client.
        batch: rows per step, or "all".
    """

    step: float
    steps: int | list[int]
    batch: int | str


def own_rows(shard: Shard) -> Rows:
    """The rows that the holder of a shard trains on: its training rows, or its validation rows if it has no others."""
    return _either(shard.train, shard.valid)


def goal_rows(shard: Shard) -> Rows:
    """The rows that define the target's goal."""
    return _either(shard.valid, shard.train)


def _either(rows: Rows | None, instead: Rows | None) -> Rows:
    if (found := rows if rows is not None else instead) is None:
        raise ValueError("a shard without rows")
    return found


def draw_batch(rows: Rows, size: int | str, draw: Draw) -> Batch:
    """One batch, drawn with replacement, or all rows."""
    if isinstance(size, str):
        return rows.all()
    return rows.take(draw.batches(rows.count, size, 1)[0])


def batches(rows: Rows, size: int | str, steps: int, draw: Draw) -> Iterator[Batch]:
    """One batch per step, drawn with replacement, or all rows every time, each step with its own dropout masks."""
    if not isinstance(size, str):
        return map(rows.take, draw.batches(rows.count, size, steps))
    if rows.key is not None:
        return (rows.step(i).all() for i in range(steps))
    rows.touch(steps - 1)
    return repeat(rows.all(), steps)


def slopes(rows: Rows, task: Any, size: int | str, steps: int, draw: Draw) -> Iterator[Callable[[Tensor], Tensor]]:
    """One function θ ↦ ∇L(θ) per local step: on a batch drawn with replacement, or on all rows."""
    if isinstance(size, str):
        return (_at(task.full_gradient, rows.step(i)) for i in range(steps))
    return (_at(task.gradient, rows.take(index)) for index in draw.batches(rows.count, size, steps))


def _at(oracle: Callable[[Tensor, Any], Tensor], rows: Any) -> Callable[[Tensor], Tensor]:
    return lambda theta: oracle(theta, rows)


def own_loss(shard: Shard, theta: Tensor, size: int | str, draw: Draw) -> Tensor:
    """L_k(θ) on one batch of the holder's rows, or on all of them where size is "all"."""
    rows = own_rows(shard)
    if isinstance(size, str):
        return shard.task.full_loss(theta, rows)
    return shard.task.loss(theta, draw_batch(rows, size, draw))


def own_gradient(shard: Shard, theta: Tensor, size: int | str, draw: Draw) -> Tensor:
    """∇L_k(θ) on one batch of the holder's rows, or on all of them where size is "all"."""
    return gradient_on(own_rows(shard), shard.task, theta, size, draw)


def gradient_on(rows: Rows, task: Any, theta: Tensor, size: int | str, draw: Draw) -> Tensor:
    """∇L(θ) on one batch of these rows, or on all of them where size is "all"."""
    if isinstance(size, str):
        return task.full_gradient(theta, rows)
    return task.gradient(theta, draw_batch(rows, size, draw))


def own_product(shard: Shard, theta: Tensor, v: Tensor, size: int | str, draw: Draw) -> Tensor:
    """∇²L_k(θ) v on one batch of the holder's rows, or on all of them where size is "all"."""
    rows = own_rows(shard)
    if isinstance(size, str):
        return shard.task.full_hvp(theta, v, rows)
    return shard.task.hvp(theta, v, draw_batch(rows, size, draw))


def target_row(fed: Federation, rows: Tensor, ids: Tensor) -> Tensor | None:
    """The target's own row among those of the clients `ids`, or None if it does not take part.

    The target is the client of `federation.target`, or client 0 where its validation rows are at the server.
    """
    own = rows[ids == (0 if fed.target == "server" else fed.target)]
    return own[0] if len(own) else None


@work("shared/gradient", update=RESULT)
def gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """g_k(x): the gradient at x on one batch, or on all rows where static.batch is "all"."""
    return own_gradient(shard, shared, static.batch, draw)


@work("shared/goal-gradient", update=RESULT)
def goal_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇L_0(x) at the target, on one batch or on all its validation rows."""
    return gradient_on(goal_rows(shard), shard.task, shared, static.batch, draw)


@work("shared/local-steps", update=moved_from())
def local_sgd(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """static.steps steps of (mini-batch) gradient descent from x on the holder's own rows."""
    x = shared
    for slope in slopes(own_rows(shard), shard.task, static.batch, static.steps, draw):
        x = stepped(x, slope(x), static.step)
    return x


def proximal_steps(
    slopes: Iterable[Callable[[Tensor], Tensor]], v: Tensor, centre: Tensor, step: float, penalty: float
) -> Tensor:
    """One step of v ← v − γ(∇L(v) + λ(v − x)) per slope, towards the centre x."""
    for slope in slopes:
        v = v - step * (slope(v) + penalty * (v - centre))
    return v


@work("shared/goal-loss-and-gradient", update=RESULT)
def goal_loss_and_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """L_0(x) and ∇L_0(x) at the target, on all its validation rows."""
    return shard.task.full_loss_and_gradient(shared, goal_rows(shard))
