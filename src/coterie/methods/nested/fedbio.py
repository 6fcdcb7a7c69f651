"""FedBiO (Li, Huang, Huang 2023): local steps on x, y and on the linear system of the hypergradient, then averages.

Each client takes I steps from the common (x, y, v), all three at the old point; the server averages all three:

    y ← y − γ ∇_y g_i(x, y)
    v ← P_r(v − τ (∇²_yy g_i(x, y) v + ∇_y f_i(x, y)))
    x ← x − η (∇_x f_i(x, y) + ∇²_xy g_i(x, y) v)

v is −u of the paper: the linear system is a federated quadratic problem of its own, so no local inverse is averaged.
With I = 1 a round is a step of the centralised method. With I > 1 and clients that differ, constant steps leave a bias
of the order of the steps: `fedbioacc` reduces it, and so do steps that are schedules.

The paper was at hand as abstract and summary only: the updates follow its published recursion, all at the old point.
Deviation: no projection unless `radius` is given, because a ball that is too small is another problem; the paper's r is
a bound of ‖∇_y f‖/μ.
"""

from typing import Any

from coterie.federation import Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation, Method, validated
from coterie.methods.nested.coupled import CoupledRule, CoupledState, Triple, directions, moved, start_coupled
from coterie.methods.nested.steps import Step
from coterie.problems.nested import NestedProblem
from coterie.settings import BatchSize, Count, Positive


@work("fedbio/coupled-steps", update=(moved_from(0), moved_from(1), moved_from(2)))
def coupled_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Triple:
    """I simultaneous steps on x, y and v."""
    point: Triple = shared
    for i in range(static.steps):
        along = directions(shard, point, static.batch, draw.step(i))
        point = moved(point, along, static.sizes, static.radius)
    return point


@validated
def fedbio(
    *,
    step: Step = "auto",
    system_step: Positive | None = None,
    outer_step: Step = "auto",
    local_steps: Count = 5,
    radius: Positive | None = None,
    batch: BatchSize = 64,
) -> Method:
    """Solve a nested problem by local steps on both variables and on the linear system between them.

    Symbols: γ = step, τ = system_step, η = outer_step, I = local_steps, r = radius.

    Cost: 1 round per call of round; d_x + 2 d_y numbers up and down per client.

    Steps "auto" take at most 43 exchanges more, in the first round.

    Args:
        step: γ, step size of the inner variable; "auto" takes half the inverse of its curvature
        system_step: τ, step size of the linear system's variable; that of the inner variable if not set
        outer_step: η, step size of the outer variable; "auto" follows the curvature of the outer objective
        local_steps: I, local steps between two averages
        radius: r, largest norm of the linear system's variable; no limit if not set

    Example:
        >>> import torch, coterie
        >>> inner = lambda x, y, batch: 0.5 * (y - x).square().sum()
        >>> outer = lambda x, y, batch: 0.5 * (y - batch.columns[0]).square().mean()
        >>> shards = [torch.full((4,), 1.0), torch.full((4,), 3.0)]
        >>> problem = coterie.Nested(inner, outer).on(shards, x=torch.zeros(1), y=torch.zeros(1))
        >>> method = coterie.methods.fedbio(step=0.5, system_step=0.5, outer_step=0.2, local_steps=2)
        >>> fit = coterie.fit(problem, method, rounds=40, mode="vmap")
        >>> round(float(fit.variables["x"]), 2), fit.history[-1]["communication"]["rounds"]
        (2.0, 40)
    """
    rule = CoupledRule.of(step, outer_step, system_step)
    settings: dict[str, Any] = {"steps": local_steps, "radius": radius, "batch": batch}

    def init(problem: NestedProblem, n: int) -> CoupledState:
        return start_coupled(problem)

    def round(fed: Federation, s: CoupledState, draw: Draw) -> CoupledState:
        sizes, curvature = rule.sizes(fed, s)
        point = fed.mean(coupled_steps, s.point, draw=draw.phase("local"), sizes=sizes, **settings)
        return s.at(point, curvature)

    return Method("fedbio", init, round, rule.rule.view, needs=frozenset({"nested"}))
