"""Local-SVRG (Gorbunov, Hanzely and Richtárik 2021; Algorithm 1 of the adaptively weighted nodes paper).

Minimises Σ_k w_k f_k(x), f_k a finite sum. Client k keeps an anchor y_k and ∇f_k(y_k) and takes the steps

    g_k = ∇f_{k,B}(x_k) − ∇f_{k,B}(y_k) + ∇f_k(y_k),   x_k ← x_k − γ g_k,   y_k ← old x_k with probability q;

every τ steps the server averages with weights w. It is used for the model (f = loss) and for the linear system
f_{k,B}(h) = ½ hᵀ∇²L_{k,B}(θ)h − hᵀ∇L_0(θ), whose corrected gradient needs one product only:
∇²L_{k,B}(θ)(h − y) + ∇f_k(y).

Rounds: 1 to begin (the server sends the start, clients compute their first anchor and acknowledge), ⌈T/τ⌉ averages,
and with `average` 1 more for the output x̄ = Σ u_t x^(t)/U_T, u_t = (1 − min{γμ, q/4})^{−(t+1)}, which every client
accumulates for its own iterate.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from coterie.errors import UsageError
from coterie.federation import Batch, Memory, Rows, Shard, Static, Tree, moved_from, work
from coterie.federation.mapped import is_mapped
from coterie.methods.base import Draw, Federation, Method, ModelState, View, start_model, validated
from coterie.methods.shared.works import own_rows
from coterie.numerics.control import only_where
from coterie.settings import Count, NonNegative, Positive, Probability

Vector = Tensor
Whole = Callable[..., Vector]
Difference = Callable[..., Vector]


class Anchor(NamedTuple):
    """The memory of a client: y, ∇f(y), the running output average, and the constants of its f."""

    y: Vector
    gradient: Vector
    mean: Vector
    constants: tuple[Vector, ...]


class SVRGSteps(NamedTuple):
    """The settings of Local-SVRG: γ, τ, q, T, the batch size, whether the output is averaged, and μ."""

    step: float
    period: int
    refresh: float
    steps: int
    batch: int
    average: bool = False
    convexity: float = 0.0

    @property
    def decay(self) -> float:
        """ρ = min{γμ, q/4}: u_t = (1 − ρ)^{−(t+1)}."""
        return min(self.step * self.convexity, self.refresh / 4)

    def share(self, t: int) -> float:
        """u_t / U_t, the part of x^(t) in the running average, without powers that overflow."""
        return 1.0 / (t + 1) if self.decay == 0.0 else self.decay / (1.0 - (1.0 - self.decay) ** (t + 1))


def solve(
    fed: Federation,
    instance: Literal["model", "system"],
    start: Vector,
    weights: Tensor,
    svrg: SVRGSteps,
    draw: Draw,
    constants: tuple[Vector, ...] = (),
) -> Vector:
    """Local-SVRG from `start`; constants are (θ, ∇L_0(θ)) for the linear system."""
    begin, go = (begin_model, model_steps) if instance == "model" else (begin_system, system_steps)
    blank = Anchor(*(torch.zeros_like(start),) * 3, tuple(torch.zeros_like(c) for c in constants))
    ready, memory = fed.gather(begin, (start, constants), memory=Memory.start(blank, fed.n), draw=draw)
    fed = replace(fed, ids=ready.ids)  # a client that missed the beginning has no anchor
    x = start
    for first in range(0, svrg.steps, svrg.period):
        at, steps = draw.step(first), min(svrg.period, svrg.steps - first)
        x, memory = fed.mean(go, x, weights=weights, memory=memory, draw=at, steps=steps, first=first, svrg=svrg)
    if not svrg.average:
        return x
    mean, memory = fed.mean(output_average, x, weights=weights, memory=memory, draw=draw)
    last = svrg.share(svrg.steps)
    return (1.0 - last) * mean + last * x


@work("local-svrg/begin-model", update=None, whole_pass=True)
def begin_model(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """Anchor at the start; replies 1 when done."""
    x, _ = shared
    return x.new_ones(()), Anchor(x, shard.task.full_gradient(x, own_rows(shard)), torch.zeros_like(x), ())


@work("local-svrg/model-steps", update=moved_from())
def model_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """At most τ corrected steps on the loss."""
    rows = own_rows(shard)
    return corrected_steps(shard.task, rows, shared, private, static, draw, _difference(shard.task), _whole(shard.task))


@work("local-svrg/steps-alone", update=moved_from())
def steps_alone(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """T corrected steps on the holder's own rows, the anchor set at the start."""
    rows = own_rows(shard)
    anchor = Anchor(shared, shard.task.full_gradient(shared, rows), torch.zeros_like(shared), ())
    task = shard.task
    return corrected_steps(task, rows, shared, anchor, static, draw, _difference(task), _whole(task))[0]


@work("local-svrg/begin-system", update=None, whole_pass=True)
def begin_system(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """Anchor at the start, with θ and ∇L_0(θ) kept for the steps; replies 1 when done."""
    h, (theta, goal) = shared
    gradient = shard.task.full_hvp(theta, h, own_rows(shard)) - goal
    return h.new_ones(()), Anchor(h, gradient, torch.zeros_like(h), (theta, goal))


@work("local-svrg/system-steps", update=moved_from())
def system_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """At most τ corrected steps on ½ hᵀHh − hᵀ∇L_0."""
    task = shard.task

    def difference(h: Vector, y: Vector, batch: Batch, theta: Vector, goal: Vector) -> Vector:
        return task.hvp(theta, h - y, batch)

    def whole(h: Vector, rows: Rows, theta: Vector, goal: Vector) -> Vector:
        return task.full_hvp(theta, h, rows) - goal

    return corrected_steps(task, own_rows(shard), shared, private, static, draw, difference, whole)


@work("local-svrg/output-average", update=moved_from())
def output_average(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """Σ u_t x_k^(t) / Σ u_t over this client's iterates, as a difference from the x that was sent."""
    return private.mean, private


def _whole(task: Any) -> Whole:
    """∇f(x)."""
    return lambda x, rows: task.full_gradient(x, rows)


def _difference(task: Any) -> Difference:
    """∇f_B(x) − ∇f_B(y), both points in one batched pass where the model can be run so."""

    def difference(x: Vector, y: Vector, batch: Batch) -> Vector:
        if not task.vmaps:
            return task.gradient(x, batch) - task.gradient(y, batch)
        at_x, at_y = vmap(task.gradient, in_dims=(0, None))(torch.stack([x, y]), batch)
        return at_x - at_y

    return difference


def corrected_steps(
    task: Any,
    rows: Rows,
    x: Vector,
    anchor: Anchor,
    static: Static,
    draw: Draw,
    difference: Difference,
    whole: Whole,
) -> tuple[Vector, Anchor]:
    """The steps of one client between two averages."""
    svrg: SVRGSteps = SVRGSteps(*static.svrg)
    index = draw.phase("batch").batches(rows.count, svrg.batch, static.steps)
    coins = draw.phase("anchor").bernoulli(svrg.refresh, static.steps)
    y, full, mean = anchor.y, anchor.gradient, anchor.mean

    masked = rows.key is not None

    def moved(x: Vector, offset: Tensor, count: Tensor, *others: Vector) -> tuple[Vector, Vector]:
        key, constants = (others[0], others[1:]) if masked else (None, others)
        return x, whole(x, replace(rows.alone(offset, count), key=key), *constants)

    def stepped(x: Vector, y: Vector, full: Vector, index: Tensor, offset: Tensor, *others: Tensor) -> Vector:
        columns, constants = others[: len(rows.columns)], others[len(rows.columns) :]
        batch = replace(rows, columns=columns, offset=offset).at(index)
        return x - svrg.step * (difference(x, y, batch, *constants) + full)

    name = difference.__qualname__, svrg.step, rows.capacity
    one_step = stepped if masked or is_mapped(rows.columns) else task.fuse(name, stepped)
    for t in range(static.steps):
        if svrg.average:
            mean = mean + svrg.share(static.first + t) * (x - mean)
        old = x
        rows.count_batch(index[t])
        x = one_step(x, y, full, index[t], rows.offset, *rows.columns, *anchor.constants)
        key = rows.step(t).key
        operands = (old, rows.offset, rows.count, *(() if key is None else (key,)), *anchor.constants)
        y, full = only_where(coins[t], moved, (y, full), operands)
    return x, Anchor(y, full, mean, anchor.constants)


@validated
def local_svrg(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    steps: Count | None = None,
    batch: Count = 50,
    refresh: Probability = 0.02,
    average: bool = False,
    convexity: NonNegative = 0.0,
    weights: Literal["uniform", "sizes"] = "uniform",
) -> Method:
    """Average variance-reduced local steps with fixed weights (Alg. 1).

    Symbols: γ = step, τ = local_steps, T = steps, q = refresh, μ = convexity.

    Cost: 1 + ⌈T/τ⌉ rounds per call of round, 1 more with average.

    Args:
        local_steps: τ, local steps between two averages
        steps: T, iterations per call of round; five passes over the largest shard if not set
        refresh: q, probability per step that a client renews its anchor
        average: return the weighted average of the iterates instead of the last one
        weights: equal weights, or in proportion to the clients' numbers of rows

    Example:
        >>> from coterie.methods import local_svrg
        >>> local_svrg().name
        'local-svrg'
    """

    def round(fed: Federation, s: ModelState, draw: Draw) -> ModelState:
        total = steps or five_epochs(fed, batch)
        svrg = SVRGSteps(step, local_steps, refresh, total, batch, average, convexity)
        w = fed.sizes.to(s.x) if weights == "sizes" else torch.ones(fed.n).to(s.x)
        return ModelState(solve(fed, "model", s.x, w / w.sum(), svrg, draw.phase("model")))

    return Method("local-svrg", start_model, round, lambda s: View(s.x))


def five_epochs(fed: Federation, batch: int) -> int:
    """T_s = 5 n_train / batch, the paper's choice; no client can make it long by declaring more rows than others."""
    largest = min(int(fed.sizes.max()), 10 * int(fed.sizes.median()))
    return max(1, 5 * largest // batch)


def check_cap(cap: float, clients: int) -> None:
    """The capped simplex must not be empty."""
    if cap * clients < 1.0 - 1e-9:
        raise UsageError(
            f"method.cap = {cap:g} allows {clients} clients a total weight of {cap * clients:g}, less than 1; "
            f"set it to at least 1/{clients} = {1 / clients:.4g}."
        )
