"""SimFBO and ShroFBO (Yang, Xiao, Ji 2023): simultaneous local updates of x, y and v, aggregated once per round.

Client i takes τ_i steps from the common (x, y, v), and uploads the weighted sums of its directions:

    y_i ← y_i − η_y a_k D_y,   v_i ← v_i − η_v a_k D_v,   x_i ← x_i − η_x a_k D_x,      k = 0 … τ_i − 1
    q_i = Σ_k a_k D at these points, for each of the three
    y ← y − γ_y mean q_i^y,    v ← P_r(v − γ_v mean q_i^v),   x ← x − γ_x mean q_i^x     at the server

with D_y = ∇_y g_i, D_v = ∇²_yy g_i v + ∇_y f_i, D_x = ∇_x f_i + ∇²_xy g_i v (v is minus the paper's), a_k = ρᵏ. With
γ = η the server takes the mean of the clients' points. ShroFBO (`normalise`) divides q_i by ‖a_i‖₁ and multiplies the
mean by the mean of ‖a_i‖₁ over the clients of the round, so that a client with many local steps does not pull the
fixed point to its own problem; with equal τ_i both are the same.

The paper was at hand as abstract and summary only; the updates follow its published recursion. Deviations: the weights
a_k are powers of one number; no projection unless `radius` is given, because a ball that is too small is another
problem; clients count alike (p_i = 1/n).
"""

from typing import Any

import torch
from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, validated
from coterie.methods.nested.coupled import CoupledRule, CoupledState, directions, moved, start_coupled
from coterie.methods.nested.phases import StepCounts, check_paces
from coterie.methods.nested.steps import Step
from coterie.methods.nested.works import pace, within
from coterie.problems.nested import NestedProblem
from coterie.settings import BatchSize, Positive, Probability


@work("simfbo/weighted-directions", update=RESULT)
def weighted_directions(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """q_i of the three variables; divided by ‖a_i‖₁ where static.normalise."""
    *start, tau = shared
    point: Any = tuple(start)
    sums: Any = tuple(map(torch.zeros_like, start))
    for k in range(static.steps):
        a = static.decay**k
        along = directions(shard, point, static.batch, draw.step(k))
        after = moved(point, along, [a * eta for eta in static.sizes], None)
        point = tuple(within(k, tau, new, old) for new, old in zip(after, point, strict=True))
        sums = tuple(within(k, tau, q + a * d, q) for q, d in zip(sums, along, strict=True))
    if not static.normalise:
        return sums
    mass = masses(static.decay, static.steps, start[0])
    return tuple(q / (mass[-1] if tau is None else mass[tau - 1]) for q in sums)


def masses(decay: float, steps: int, like: Tensor) -> Tensor:
    """‖a‖₁ = 1 + ρ + … + ρ^(τ−1) for τ = 1 … steps."""
    return (decay ** torch.arange(steps, dtype=like.dtype, device=like.device)).cumsum(0)


@validated
def simfbo(
    *,
    step: Step = "auto",
    system_step: Positive | None = None,
    outer_step: Step = "auto",
    server_step: Positive | None = None,
    server_system_step: Positive | None = None,
    server_outer_step: Positive | None = None,
    local_steps: StepCounts = 5,
    decay: Probability = 1.0,
    normalise: bool = False,
    radius: Positive | None = None,
    batch: BatchSize = 64,
) -> Method:
    """Solve a nested problem by simultaneous local updates of three variables, with step sizes of the server's own.

    Symbols: η_y, η_v, η_x = step, system_step, outer_step; γ_y, γ_v, γ_x = those of the server; τ = local_steps,
    ρ = decay, r = radius.

    Cost: 1 round per call of round; d_x + 2 d_y numbers up and down per client.

    Steps "auto" take at most 43 exchanges more, in the first round.

    Args:
        step: η_y, local step size of the inner variable; "auto" takes half the inverse of its curvature
        system_step: η_v, local step size of the linear system's variable; that of the inner variable if not set
        outer_step: η_x, local step size of the outer variable; "auto" follows the curvature of the outer objective
        server_step: γ_y, step size of the server for the inner variable; the local one if not set
        server_system_step: γ_v, step size of the server for the linear system's variable; the local one if not set
        server_outer_step: γ_x, step size of the server for the outer variable; the local one if not set
        local_steps: τ, local steps: one number, or one per client
        decay: ρ, the weight of the k-th local direction is ρᵏ
        normalise: divide by the sum of these weights (ShroFBO), for clients with different numbers of local steps
        radius: r, largest norm of the linear system's variable; no limit if not set

    Example:
        >>> import torch, coterie
        >>> inner = lambda x, y, batch: 0.5 * (y - x).square().sum()
        >>> outer = lambda x, y, batch: 0.5 * (y - batch.columns[0]).square().mean()
        >>> shards = [torch.full((4,), 1.0), torch.full((4,), 3.0)]
        >>> problem = coterie.Nested(inner, outer).on(shards, x=torch.zeros(1), y=torch.zeros(1))
        >>> method = coterie.methods.simfbo(step=0.5, system_step=0.5, outer_step=0.2, local_steps=2)
        >>> fit = coterie.fit(problem, method, rounds=40, mode="vmap")
        >>> round(float(fit.variables["x"]), 2), fit.history[-1]["communication"]["rounds"]
        (2.0, 40)
    """
    rule = CoupledRule.of(step, outer_step, system_step)
    server = (server_outer_step, server_step, server_system_step)
    settings: dict[str, Any] = {"decay": decay, "normalise": normalise, "batch": batch}

    def init(problem: NestedProblem, n: int) -> CoupledState:
        check_paces(n, local_steps)
        return start_coupled(problem)

    def round(fed: Federation, s: CoupledState, draw: Draw) -> CoupledState:
        tau, steps = pace(local_steps, s.x)
        sizes, curvature = rule.sizes(fed, s)
        local = {"steps": steps, "sizes": sizes, **settings}
        q = fed.mean(weighted_directions, (*s.point, tau), draw=draw.phase("local"), **local)
        factor = mean_mass(fed) if normalise else 1.0
        gammas = [factor * (gamma or eta) for gamma, eta in zip(server, sizes, strict=True)]
        return s.at(moved(s.point, q, gammas, radius), curvature)

    def mean_mass(fed: Federation) -> float:
        """The mean of ‖a_i‖₁ over the clients of the round."""
        counts = [local_steps] if isinstance(local_steps, int) else [local_steps[k] for k in fed.ids.tolist()]
        return sum(decay**k for count in counts for k in range(count)) / len(counts)

    return Method("simfbo", init, round, rule.rule.view, needs=frozenset({"nested"}))
