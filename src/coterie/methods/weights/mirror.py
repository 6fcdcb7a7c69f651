"""Weights by mirror descent on the target's loss after the step, φ(w) = L_0(x − γ Gᵀw), and exchanges with the target.

Which of its rows judge the weights (`data`):
validation  the held-out rows (its training rows where it holds nothing else)
train       its training rows: those that its shard holds or, where the target is a client, that client's own
fresh       the held-out rows as a stream: in random order, block after block, and none twice before all were seen.
            So the blocks are independent samples of D_0 as long as the rows last
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap

from coterie.errors import UsageError
from coterie.federation import RESULT, Batch, Rows, Shard, Static, Tree, Work, work
from coterie.federation.tree import row
from coterie.methods.base import Draw, Federation, Problem
from coterie.methods.shared.ties import tied
from coterie.methods.shared.works import draw_batch, goal_rows
from coterie.numerics.tracing import assumed, remembered
from coterie.settings import BatchSize

Data = Literal["validation", "train", "fresh"]
Ask = Callable[[Work, Tree, int], Any]
Slope = Callable[[Tensor, int], Tensor]
Averaging = bool | Literal["continue"]
FEW = 500  # up to this many clients a Gram matrix costs no more than a few small operations
COLUMNS = 8  # Hessian products at once: more would only take memory


@dataclass(frozen=True)
class Judge:
    """Which of the target's rows judge the weights, how many at a time, and how many blocks of fresh ones per round."""

    data: Data
    batch: BatchSize
    blocks: int = 1

    def check(self, problem: Problem) -> None:
        """Refuse blocks that the held-out rows cannot fill."""
        if self.data != "fresh" or problem.target is None:
            return
        held_out = goal_rows(problem.target).capacity
        if self.batch == "all" or self.batch > held_out:
            raise UsageError(
                f"method.data = 'fresh' takes blocks of method.mirror_batch = {self.batch} rows, but the target holds "
                f"{held_out}; lower it, or give the target more validation rows."
            )

    def at(self, fed: Federation, rounds: int, draw: Draw) -> Ask:
        """The exchanges with the target after this many rounds: ask(work, shared, i) is the i-th of the round."""

        def ask(what: Work, shared: Tree, i: int) -> Any:
            block = rounds * self.blocks + i % self.blocks
            static: dict[str, Any] = {"data": self.data, "batch": self.batch, "block": block}
            if self.data == "train" and fed.target != "server":
                client = replace(fed, ids=torch.tensor([fed.target], device=fed.sizes.device))
                return row(client.gather(what, shared, draw=draw.step(i), **static).rows, 0)
            return fed.ask_target(what, shared, draw=draw.step(i), **static)

        return ask


def judging_rows(shard: Shard, static: Static) -> Rows:
    """The rows of the target that may be asked."""
    if static.data != "train":
        return goal_rows(shard)
    if shard.train is None:
        raise UsageError(
            "method.data = 'train' needs a target with training rows, and this one holds validation rows only; "
            "say which client it is by federation.target, or set method.data to 'validation' or 'fresh'."
        )
    return shard.train


def judging_batch(rows: Rows, static: Static, draw: Draw) -> Batch:
    """A batch with replacement or, of fresh rows, the next block of the stream."""
    if static.data != "fresh":
        return draw_batch(rows, static.batch, draw)
    passes, place = divmod(static.block, rows.capacity // static.batch)
    order = _order(passes, rows.capacity, rows.offset.device)
    return rows.take(order[place * static.batch : (place + 1) * static.batch])


@remembered(2)
def _order(passes: int, n: int, device: torch.device) -> Tensor:
    """The order of the stream's rows in one pass. It outlives the round, so it is not of the round's draws."""
    return Draw.of(passes, device=device).phase("fresh").permutation(n)


@work("mirror/goal-gradient", update=RESULT)
def goal_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇L_0(x) on the rows that judge."""
    rows = judging_rows(shard, static)
    if static.batch == "all":
        return shard.task.full_gradient(shared, rows)
    return shard.task.gradient(shared, judging_batch(rows, static, draw))


@work("mirror/goal-losses", update=RESULT)
def goal_losses(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """L_0 at several points, on the same rows."""
    rows = judging_rows(shard, static)
    if static.batch == "all":
        return torch.stack([shard.task.full_loss(x, rows) for x in shared])
    batch = judging_batch(rows, static, draw)
    return torch.stack([shard.task.loss(x, batch) for x in shared])


@work("mirror/goal-model", update=RESULT)
def goal_model(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> tuple[Tensor, Tensor]:
    """∇L_0(x) [d] and Q∇²L_0(x)Qᵀ [r, r] for r directions, the rows of Q, on the same rows."""
    (x, Q), task, rows = shared, shard.task, judging_rows(shard, static)
    if static.batch == "all":
        g, times = task.full_gradient(x, rows), lambda v: task.full_hvp(x, v, rows)
    else:
        batch = judging_batch(rows, static, draw)
        g, times = task.gradient(x, batch), lambda v: task.hvp(x, v, batch)
    HQ = vmap(times, chunk_size=COLUMNS if len(Q) > COLUMNS else None)(Q) if len(Q) else Q
    return g, HQ @ Q.T


def mirror_descent(
    w: Tensor, slope: Slope, *, step: float, steps: int, average: Averaging = False, tie: float = 0.0
) -> Tensor:
    """w after some entropic steps along slope(w, i) and the tie penalty's, or the mean of the points they lead to.

    With average = "continue", each step starts from the mean of the points so far instead of the last one.
    """
    mean, absent, logs = torch.zeros_like(w), w == 0.0, w.log()
    for i in range(steps):  # `entropic_step` without leaving the logarithms
        g = tied(slope(w, i), w, tie)
        least = torch.where(absent, torch.inf, g).amin()
        logs = torch.sub(logs, g - least, alpha=step)
        w = torch.softmax(logs, 0)
        if average == "continue":
            mean = mean + (w - mean) / (i + 1)
            w, logs = mean, mean.log()
        elif average:
            mean = mean + w / steps
    return mean if average and steps else w


def first_order(ask: Ask, x: Tensor, G: Tensor, *, step: float) -> Slope:
    """∂φ/∂w_k = −γ⟨∇L_0(x − γGᵀw), g_k⟩. One exchange per call: d numbers down, d up."""

    def slope(w: Tensor, i: int) -> Tensor:
        v = ask(goal_gradient, x - step * w @ G, i)
        return -step * (G @ v)  # not (−γ G) v, which would make another G

    return slope


def second_order(ask: Ask, x: Tensor, G: Tensor, w: Tensor, *, step: float, rank: int | None) -> Slope:
    """∇φ of the second-order model of L_0 around x̂ = x − γGᵀw. One exchange in all: (r + 1)d numbers down, d + r² up.

        ∇φ(u) ≈ −γG∇L_0(x̂) + γ² C∇²L_0(x̂)Cᵀ(u − w),   C = G − 1(Gᵀw)ᵀ,   up to a number that all clients share

    The Hessian is asked for on the r leading right singular vectors Q of C. With r = min(K − 1, d) there is nothing
    beside them and the model is exact for quadratic losses; with r = 0 only the slope at w is left.
    """
    (K, d), C = G.shape, G - w @ G  # u − w sums to 0, so only differences of gradients matter
    r = min(K - 1, d, *([] if rank is None else [rank]))
    if not assumed(torch.isfinite(C).all()):  # the run has diverged, which its model will show
        return lambda u, i: torch.full_like(u, torch.nan)
    Q = torch.eye(d).to(G) if r == d else torch.linalg.svd(C, full_matrices=False).Vh[:r]
    g, A = ask(goal_model, (x - step * w @ G, Q), 0)
    linear, P = -step * (G @ g), step * (C @ Q.T)
    if K > FEW:
        return lambda u, i: linear + P @ (A @ (P.T @ (u - w)))
    gram = P @ A @ P.T
    constant = linear - gram @ w
    return lambda u, i: torch.addmv(constant, gram, u)


def zeroth_order(ask: Ask, x: Tensor, G: Tensor, *, step: float, smoothing: float, draw: Draw) -> Slope:
    """g̃ = n (φ(w + he) − φ(w − he))/2h · e, e uniform on the sphere. One exchange per call: 2d numbers down, 2 up."""
    n = len(G)

    def slope(w: Tensor, i: int) -> Tensor:
        e = draw.step(i).sphere(n, dtype=w.dtype)
        above, below = ask(goal_losses, x - step * torch.stack([w + smoothing * e, w - smoothing * e]) @ G, i)
        return n * (above - below) / (2.0 * smoothing) * e

    return slope
