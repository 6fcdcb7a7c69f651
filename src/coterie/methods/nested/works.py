"""Works of the nested methods: the client's part of FedInn, FedIHGP, FedOut and their light variants, and directions.

Client i takes τ_i local steps of size step/τ_i, as in Theorem 3.1. Where the τ_i differ, each client receives its own;
all clients run the largest number, and steps beyond a client's own change nothing. g is evaluated on the client's own
(train) rows, f on its goal (validation) rows. Every step ends with the projection onto the variable's set, if any.

Every work is given (x, y, …). Where x or y is the client's own (`PerClient`), that entry is None, and the client's
memory holds the value (`keeps_own`).
"""

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from coterie.federation import RESULT, Batch, Each, Rows, Shard, Static, Tree, Work, moved_from, work
from coterie.methods.base import Draw
from coterie.methods.shared.works import batches, draw_batch, goal_rows, own_rows

Pace = int | list[int]
HUGE = 1e30  # stands for infinity, which the screening would reject before the error could be explained


def pace(steps: Pace, like: Tensor) -> tuple[Each | None, int]:
    """τ as a payload (None where it is common, one row per client where it differs), and the largest τ."""
    if isinstance(steps, int):
        return None, steps
    return Each(torch.tensor(steps, device=like.device)), max(steps)


def step_size(static: Static, tau: Tensor | None, like: Tensor) -> Any:
    """step/τ_i."""
    return static.step / static.steps if tau is None else static.step / tau.to(like)


def within(nu: int, tau: Tensor | None, moved: Tensor, before: Tensor) -> Tensor:
    """The point after step ν, if the client takes that step."""
    return moved if tau is None else torch.where(nu < tau, moved, before)


def keeps_own(function: Work) -> Work:
    """A work on (x, y, …) that also runs where x or y is in the client's memory, which it leaves as it is."""

    @wraps(function)
    def run(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
        if private is None:
            return function(shard, shared, None, static, draw)
        x, y, *more = shared
        filled = (private, y, *more) if x is None else (x, private, *more)
        return function(shard, filled, None, static, draw), private

    return run


@work("fednest/inner-gradient", update=RESULT)
@keeps_own
def inner_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """q_i = ∇_y g_i(x, y)  (Alg. 4, line 4)."""
    x, y = shared
    return shard.task.inner_gradient(x, y, draw_batch(own_rows(shard), static.batch, draw))


@work("fednest/inner-svrg-steps", update=moved_from(1))
@keeps_own
def inner_svrg_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """y_i ← y_i − β_i (∇_y g_i(x, y_i; ζ) − ∇_y g_i(x, y; ζ) + q), the same ζ in both terms  (Alg. 4, lines 8–11)."""
    x, y, q, tau = shared
    beta = step_size(static, tau, y)
    project = shard.task.y.project
    y_i = project(y - beta * q)  # at ν = 0 the two terms are the same
    task, rows = _at_fixed_x(shard, x, static.batch, static.steps - 1)
    for nu, batch in enumerate(batches(rows, static.batch, static.steps - 1, draw), 1):
        y_i = within(nu, tau, project(y_i - beta * (_inner_difference(task, x, y_i, y, batch) + q)), y_i)
    return y_i


@work("fednest/inner-sgd-steps", update=moved_from(1))
@keeps_own
def inner_sgd_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """y_i ← y_i − β_i ∇_y g_i(x, y_i; ζ)  (Alg. 6)."""
    x, y, tau = shared
    beta = step_size(static, tau, y)
    task, rows = _at_fixed_x(shard, x, static.batch, static.steps)
    for nu, batch in enumerate(batches(rows, static.batch, static.steps, draw)):
        y = within(nu, tau, task.y.project(y - beta * task.inner_gradient(x, y, batch)), y)
    return y


@work("fednest/outer-y-gradient", update=RESULT)
@keeps_own
def outer_y_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇_y f_i(x, y)  (Alg. 3, line 4)."""
    x, y = shared
    return shard.task.outer_gradient(x, y, draw_batch(goal_rows(shard), static.batch, draw))


@work("fednest/hessian-product", update=RESULT)
@keeps_own
def hessian_product(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇²_yy g_i(x, y) v  (Alg. 3, line 13)."""
    x, y, v = shared
    return shard.task.inner_hvp(x, y, v, draw_batch(own_rows(shard), static.batch, draw))


@work("fednest/hypergradient", update=RESULT)
@keeps_own
def hypergradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """h_i = ∇_x f_i(x, y) − ∇²_xy g_i(x, y) p, without the second term where p is None  (Alg. 2, lines 5–6).

    Where f is at the server, there is no first term.
    """
    x, y, p = shared
    if shard.task.at_server:
        h = torch.zeros_like(x)
    else:
        h = shard.task.direct_gradient(x, y, draw_batch(goal_rows(shard), static.batch, draw.phase("outer")))
    if p is None:
        return h
    return h - shard.task.cross(x, y, p, draw_batch(own_rows(shard), static.batch, draw.phase("inner")))


@work("fednest/direct-gradient", update=RESULT)
def direct_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇_x f(x, y), where f is at the server."""
    x, y = shared
    return shard.task.direct_gradient(x, y, draw_batch(goal_rows(shard), static.batch, draw))


@work("fednest/own-outer-steps", update=None)
def own_outer_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """x_i ← Π(x_i − α_i h_i(x_i)) at the client whose own x_i it is; x_i is remembered, and nothing is sent back."""
    _, y, p, tau = shared
    alpha = step_size(static, tau, y)
    for nu in range(static.steps):
        h = hypergradient(shard, (private, y, p), None, static, draw.step(nu))
        private = within(nu, tau, shard.task.x.project(private - alpha * h), private)
    return y.new_zeros(0), private


@work("fednest/outer-svrg-steps", update=moved_from(0))
def outer_svrg_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """x_i ← x_i − α_i (∇_x f_i(x_i, y; ξ) − ∇_x f_i(x, y; ξ) + h), the same ξ in both terms  (Alg. 2, lines 10–13)."""
    x, y, h, tau = shared
    alpha = step_size(static, tau, x)
    x_i = shard.task.x.project(x - alpha * h)
    for nu, batch in enumerate(batches(goal_rows(shard), static.batch, static.steps - 1, draw), 1):
        d_i, d_0 = (shard.task.direct_gradient(point, y, batch) for point in (x_i, x))
        x_i = within(nu, tau, shard.task.x.project(x_i - alpha * (d_i - d_0 + h)), x_i)
    return x_i


@work("fednest/local-outer-steps", update=(moved_from(0), None))
def local_outer_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """x_i ← x_i − α_i h_i with the client's own hypergradient  (Alg. 5); and the statistics of its series."""
    x, y, tau = shared
    alpha = step_size(static, tau, x)
    worst = x.new_zeros(2)
    for nu, batch in enumerate(batches(goal_rows(shard), static.batch, static.steps, draw)):
        h, series_stats = _local_hypergradient(shard, x, y, batch, static, draw.step(nu))
        x = within(nu, tau, shard.task.x.project(x - alpha * h), x)
        worst = torch.where(series_stats[0] > worst[0], series_stats, worst)
    return x, worst


@work("fednest/local-nested-steps", update=(moved_from(0), moved_from(1), None))
def local_nested_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The client's own y_i, then its own x_i at that y_i: nested optimisation in isolation (LFedNest-NonAlt)."""
    x, y, tau, outer_tau = shared
    inner = Static(step=static.inner_step, steps=static.inner_steps, batch=static.batch)
    y = inner_sgd_steps(shard, (x, y, tau), None, inner, draw.phase("inner"))
    x, series_stats = local_outer_steps(shard, (x, y, outer_tau), None, static, draw.phase("outer"))
    return x, y, series_stats


@work("fednest/own-nested-steps", update=(moved_from(0), None))
def own_nested_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The same where y_i is the client's own: it is remembered, and only x_i is sent back."""
    x, _, tau, outer_tau = shared
    x, y, series_stats = local_nested_steps(shard, (x, private, tau, outer_tau), None, static, draw)
    return (x, series_stats), y


@work("fednest/simultaneous-steps", update=(moved_from(0), moved_from(1)))
def simultaneous_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """(x_i, y_i) ← (x_i − α_i ∇_x f_i, y_i + β_i ∇_y f_i), both at the old point  (FedAvg-S)."""
    x, y, tau = shared
    alpha, inner = step_size(static, tau, x), Static(step=static.inner_step, steps=static.steps)
    beta = step_size(inner, tau, y)
    for nu, batch in enumerate(batches(goal_rows(shard), static.batch, static.steps, draw)):
        down, up = shard.task.direct_gradient(x, y, batch), shard.task.outer_gradient(x, y, batch)
        x_next, y_next = shard.task.x.project(x - alpha * down), shard.task.y.project(y + beta * up)
        x, y = within(nu, tau, x_next, x), within(nu, tau, y_next, y)
    return x, y


def directions(
    shard: Shard, x: Tensor, y: Tensor, v: Tensor, batch: int | str, draw: Draw
) -> tuple[Tensor, Tensor, Tensor]:
    """D_y = ∇_y g_i,  D_v = ∇²_yy g_i v + ∇_y f_i  and  D_x = ∇_x f_i + ∇²_xy g_i v  at (x, y, v).

    D_v is the gradient of ½ vᵀ∇²_yy g v + vᵀ∇_y f, so that v* = −[∇²_yy g]⁻¹ ∇_y f = −p of FedNest, and D_x is the
    hypergradient at y* and v*. All terms in g see one batch, all terms in f another. Where v is empty there is no
    indirect term (minimax problems), where y is empty no inner problem (single-level problems).
    """
    task = shard.task
    inner = draw_batch(own_rows(shard), batch, draw.phase("inner"))
    outer = draw_batch(goal_rows(shard), batch, draw.phase("outer"))
    d_y = task.inner_gradient(x, y, inner) if len(y) else y
    d_x = task.direct_gradient(x, y, outer)
    if not len(v):
        return d_y, v, d_x
    d_v = task.inner_hvp(x, y, v, inner) + task.outer_gradient(x, y, outer)
    return d_y, d_v, d_x + task.cross(x, y, v, inner)


@work("nested/directions", update=RESULT)
def joint_directions(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """(D_y, D_v, D_x) at the shared (x, y, v), on one batch of each level; one exchange for all three."""
    x, y, v = shared
    return directions(shard, x, y, v, static.batch, draw)


@work("nested/own-directions", update=RESULT)
def own_directions(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """(D_y, D_v) at the client's own x_i, which moves to Π(x_i − γ D_x) and is remembered."""
    _, y, v = shared
    d_y, d_v, d_x = directions(shard, private, y, v, static.batch, draw)
    return (d_y, d_v), shard.task.x.project(private - static.outer_step * d_x)


def _at_fixed_x(shard: Shard, x: Tensor, size: int | str, steps: int) -> tuple[Any, Rows]:
    """The task and the rows for so many batches at one x."""
    rows = own_rows(shard)
    return shard.task.at_fixed_x(x, rows, steps * size) if isinstance(size, int) else (shard.task, rows)


def _inner_difference(task: Any, x: Tensor, y_i: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """∇_y g_i(x, y_i; ζ) − ∇_y g_i(x, y; ζ)."""
    if len(y) < len(x):  # then much of g may depend on x alone: under vmap over the two points that is done once
        g = vmap(lambda point: task.inner_gradient(x, point, batch))(torch.stack([y_i, y]))
        return g[0] - g[1]
    return task.inner_gradient(x, y_i, batch) - task.inner_gradient(x, y, batch)


def _local_hypergradient(
    shard: Shard, x: Tensor, y: Tensor, batch: Batch, static: Static, draw: Draw
) -> tuple[Tensor, Tensor]:
    """h_i from the client's own Hessian, by the series with N terms (its truncation random or not).

    The second result has the growth of the terms and the curvature where they grew; both are 0 without a series.
    """
    task, rows = shard.task, own_rows(shard)
    h = task.direct_gradient(x, y, batch)
    if task.kind in ("minimax", "single-level"):
        return h, x.new_zeros(2)
    p, series_stats = task.outer_gradient(x, y, batch), x.new_zeros(2)
    if task.kind == "bilevel":
        p, series_stats = _local_series(shard, x, y, p, static, draw)
    return h - task.cross(x, y, p, draw_batch(rows, static.batch, draw.phase("cross"))), series_stats


def _local_series(shard: Shard, x: Tensor, y: Tensor, b: Tensor, static: Static, draw: Draw) -> tuple[Tensor, Tensor]:
    """≈ H_i⁻¹ b: (1/ℓ) Σ_{n<N} (I − H_i/ℓ)ⁿ b, or N/ℓ times one term, drawn uniformly (Alg. 5, lines 5–6)."""
    random = static.series == "random"
    chosen = draw.phase("truncation").integers(static.terms, 1)[0]
    term, p, series_stats = b / static.lipschitz, torch.zeros_like(b), b.new_zeros(2)
    first = term.norm()
    for n in range(static.terms):
        p = torch.where(chosen == n, static.terms * term, p) if random else p + term
        if n + 1 < static.terms:
            batch = draw_batch(own_rows(shard), static.batch, draw.phase("series").step(n))
            hv = shard.task.inner_hvp(x, y, term, batch)
            curvature = hv.square().sum() / (term @ hv)
            term = term - hv / static.lipschitz
            series_stats = torch.stack([term.norm() / first, curvature])
    return p, torch.nan_to_num(series_stats, nan=0.0, posinf=HUGE, neginf=-HUGE)
