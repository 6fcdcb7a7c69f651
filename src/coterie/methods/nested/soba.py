"""SOBA (Dagréou et al. 2022, Alg. 1): y, v and x move together, each along an unbiased direction.

    D_y = ∇_y g(x, y)      D_v = ∇²_yy g(x, y) v + ∇_y f(x, y)      D_x = ∇_x f(x, y) + ∇²_xy g(x, y) v
    y ← y − ρ D_y          v ← v − ρ D_v                            x ← x − γ D_x

all at the old (x, y, v). v approaches v*(x) = −[∇²_yy g]⁻¹ ∇_y f, and D_x the hypergradient. Federated: a direction is
the mean over the clients, and all three are asked for at once, so that a step is one exchange. With all clients and all
rows it is the centralised algorithm with full batches.

Deviations: the clients' means weigh every client alike, whatever its rows. The paper's decreasing steps are schedules
(step = "power(0.1)"); the default is a constant step, which is exact with all clients and all rows. Minimax problems
have no v, single-level ones no y. Beyond the paper: steps are projected where a variable has a set, and x may be the
clients' own: client i then moves its x_i along its own D_x, which is m times the derivative by x_i, and uploads D_y and
D_v alone.
"""

from typing import Any, NamedTuple

from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Memory
from coterie.methods.base import Draw, Federation, Method, validated
from coterie.methods.nested.phases import supporting
from coterie.methods.nested.steps import Curvature, Step, StepRule, indirect
from coterie.methods.nested.works import joint_directions, own_directions
from coterie.problems.nested import OWN_X, SETS, NestedProblem
from coterie.settings import BatchSize


class SobaState(NamedTuple):
    """Outer x, inner y, the solution v of the linear system, the kind of problem, and the estimates for the steps.

    x is a memory where every client has its own.
    """

    x: Any
    y: Tensor
    v: Tensor
    kind: str
    curvature: Curvature


@validated
def soba(*, step: Step = "auto", outer_step: Step = "auto", batch: BatchSize = "all") -> Method:
    """Move the inner variable, the linear system and the outer variable together (Alg. 1, SOBA).

    Symbols: ρ = step, γ = outer_step.

    Cost: 1 round per call of round, with 2 d_y + d_x numbers per client up and down.
    Steps "auto" take at most 43 rounds more, in the first call.

    Args:
        step: ρ, step size of y and v; "auto" takes 1/L, with the curvature L of the inner loss
        outer_step: γ, step size of x; "auto" chooses it by a small model of the problem
        batch: rows per direction and level; 'all' uses every row of the client

    Example:
        >>> import torch, coterie
        >>> inner = lambda x, y, batch: 0.5 * (y - x).square().sum()
        >>> outer = lambda x, y, batch: 0.5 * (y - batch.columns[0]).square().mean()
        >>> shards = [torch.full((4,), 1.0), torch.full((4,), 3.0)]
        >>> problem = coterie.Nested(inner, outer).on(shards, x=torch.zeros(1), y=torch.zeros(1))
        >>> fit = coterie.fit(problem, coterie.methods.soba(step=1.0, outer_step=0.2), rounds=40, mode="vmap")
        >>> round(float(fit.variables["x"]), 2), fit.history[-1]["communication"]["rounds"]
        (2.0, 40)
    """
    rule = StepRule(step, outer_step)

    def init(problem: NestedProblem, n: int) -> SobaState:
        y, kind, own = problem.inner_start, problem.task.kind, problem.task.own == "x"
        if own and "auto" in (step, outer_step):
            raise UsageError(
                "soba cannot estimate its steps where x stays at every client; give numbers for method.step and "
                "method.outer_step."
            )
        x = Memory.start(problem.start, n) if own else problem.start
        return SobaState(x, y, indirect(kind, y), kind, Curvature())

    def round(fed: Federation, s: SobaState, draw: Draw) -> SobaState:
        curvature = rule.estimated(fed, s)
        rho, gamma = rule.sizes(curvature)
        at, x, y = draw.phase("directions"), fed.task.x, fed.task.y
        if isinstance(s.x, Memory):
            own: dict[str, Any] = {"memory": s.x, "outer_step": gamma, "batch": batch}
            (d_y, d_v), moved = fed.mean(own_directions, (None, s.y, s.v), draw=at, **own)
        else:
            d_y, d_v, d_x = fed.mean(joint_directions, (s.x, s.y, s.v), draw=at, batch=batch)
            moved = x.project(s.x - gamma * d_x)
        return SobaState(moved, y.project(s.y - rho * d_y), s.v - rho * d_v, s.kind, curvature)

    supports = supporting(SETS, OWN_X)
    return Method("soba", init, round, rule.view, needs=frozenset({"nested"}), alternatives=supports)
