"""FedBiOAcc (Li, Huang, Huang 2023): FedBiO with recursive (STORM) momentum on its three directions.

With p = (x, y, v), D_i(p; ζ) the three directions of client i and S = diag(η, γ, τ), step t is

    p_i⁺ = p_i − α_t S m_i                                   v_i⁺ projected onto the ball of radius r
    m_i⁺ = D_i(p_i⁺; ζ) + (1 − c α_t²)(m_i − D_i(p_i; ζ))    the same rows ζ in both terms
    α_t  = (1 + t/t_0)^(−1/3)

Every I steps the server averages p_i⁺ before m_i⁺ is computed there, and then averages m_i⁺. A round is one such
period: one exchange for the points, one for the momenta. The first momenta are plain directions, which take one more
exchange in the first round.

With full batches and c = 0 the mean momentum at an average is the exact direction there, so local steps leave no bias:
a client follows the common direction and the change of its own. c α² = 1 forgets all momentum and is FedBiO.

The paper was at hand as abstract and summary only; the recursion is the published one. Deviations: no projection unless
`radius` is given; the paper's constants c_ω, c_ν, c_u are one c; α_t is scaled so that α_0 = 1. The first momentum
comes from one batch. A client that misses a round takes the common point and momenta of the next one.
"""

from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.federation import RESULT, Memory, Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation, Method, View, validated
from coterie.methods.nested.coupled import CoupledRule, CoupledState, Triple, directions, moved, start_coupled
from coterie.methods.nested.steps import Step
from coterie.problems.nested import NestedProblem
from coterie.settings import BatchSize, Count, Positive

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class FedBiOAccState(NamedTuple):
    """The common point, its momenta, what the clients remember of the step before it (point, momenta), and t."""

    at: CoupledState
    m_x: Tensor
    m_y: Tensor
    m_v: Tensor
    last: Memory
    t: int


def alpha(t: int, decay: float | None) -> float:
    """α_t; always 1 without decay."""
    return 1.0 if decay is None else (1.0 + t / decay) ** (-1.0 / 3.0)


@work("fedbioacc/first-directions", update=RESULT)
def first_directions(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Triple:
    """D_i at the common start."""
    return directions(shard, shared, static.batch, draw)


@work("fedbioacc/momentum-steps", update=(moved_from(0), moved_from(1), moved_from(2)))
def momentum_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> tuple[Triple, Tree]:
    """I steps along the momenta; the client remembers where the last one began, and its momenta there."""
    point, m = shared[:3], shared[3:]
    before = point
    for i in range(static.steps):
        if i:
            m = recursive(shard, point, before, m, static, static.t + i - 1, draw.step(i))
        before, a = point, alpha(static.t + i, static.decay)
        point = moved(point, m, [a * size for size in static.sizes], static.radius)
    return point, (*before, *m)


@work("fedbioacc/momenta", update=RESULT)
def momenta_at_mean(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> tuple[Triple, Tree]:
    """m_i⁺ at the averaged point."""
    return recursive(shard, shared, private[:3], private[3:], static, static.t, draw), private


def recursive(shard: Shard, now: Triple, before: Triple, momenta: Triple, static: Static, t: int, draw: Draw) -> Triple:
    """D_i(now) + (1 − c α_t²)(m − D_i(before)), both on the same rows."""
    keep = 1.0 - static.forget * alpha(t, static.decay) ** 2
    new, old = (directions(shard, point, static.batch, draw) for point in (now, before))
    m_x, m_y, m_v = (d + keep * (m - o) for d, m, o in zip(new, momenta, old, strict=True))
    return m_x, m_y, m_v


@validated
def fedbioacc(
    *,
    step: Step = "auto",
    system_step: Positive | None = None,
    outer_step: Step = "auto",
    local_steps: Count = 5,
    forget: Fraction = 0.1,
    decay: Positive | None = 1000.0,
    radius: Positive | None = None,
    batch: BatchSize = 64,
) -> Method:
    """Solve a nested problem by local steps along recursive momenta of both variables and of the linear system.

    Symbols: γ = step, τ = system_step, η = outer_step, I = local_steps, c = forget, t_0 = decay, r = radius.

    Cost: 2 rounds per call of round, one more in the first; 2 (d_x + 2 d_y) numbers up per client.

    Steps "auto" take at most 43 exchanges more, in the first round.

    Args:
        step: γ, step size of the inner variable; "auto" takes half the inverse of its curvature
        system_step: τ, step size of the linear system's variable; that of the inner variable if not set
        outer_step: η, step size of the outer variable; "auto" follows the curvature of the outer objective
        local_steps: I, local steps between two averages
        forget: c, share of the momentum that is replaced by the new direction per step; 0 corrects local steps fully
        decay: t_0, local steps after which α has fallen to 0.79, then as t^(−1/3); constant steps if null
        radius: r, largest norm of the linear system's variable; no limit if not set

    Example:
        >>> from coterie.methods import fedbioacc
        >>> fedbioacc().name
        'fedbioacc'
    """
    rule = CoupledRule.of(step, outer_step, system_step)
    settings: dict[str, Any] = {"forget": forget, "decay": decay, "radius": radius, "batch": batch}
    settings |= {"steps": local_steps}

    def init(problem: NestedProblem, n: int) -> FedBiOAccState:
        at = start_coupled(problem)
        x, y, v = map(torch.zeros_like, at.point)
        return FedBiOAccState(at, x, y, v, Memory.start((*at.point, x, y, v), n), 0)

    def round(fed: Federation, s: FedBiOAccState, draw: Draw) -> FedBiOAccState:
        sizes, curvature = rule.sizes(fed, s.at)
        m: Triple = (s.m_x, s.m_y, s.m_v)
        if s.t == 0:
            m = fed.mean(first_directions, s.at.point, draw=draw.phase("first"), batch=batch)
        local: dict[str, Any] = {"sizes": sizes, "t": s.t, **settings}
        point, last = fed.mean(momentum_steps, (*s.at.point, *m), memory=s.last, draw=draw.phase("local"), **local)
        end = s.t + local_steps
        m, last = fed.mean(momenta_at_mean, point, memory=last, draw=draw.phase("momenta"), **{**local, "t": end - 1})
        return FedBiOAccState(s.at.at(point, curvature), *m, last, end)

    def view(s: FedBiOAccState) -> View:
        return rule.rule.view(s.at)

    return Method("fedbioacc", init, round, view, needs=frozenset({"nested"}))
