"""MA-SOBA (Chen, Xiao and Balasubramanian 2023): SOBA with a moving average of the outer direction.

    D_y, D_v, D_x  as in SOBA, all at (x, y, v)
    x ← x − γ h        y ← y − ρ D_y        v ← v − ρ D_v        h ← (1 − θ) h + θ D_x

h⁰ = 0. The average damps the noise of the directions, by which the paper's rate needs no smoothness of second
derivatives beyond those in D. x moves along the average of the earlier directions, as in the paper's Algorithm 1.

Federated as SOBA is: one exchange for all three directions; h is at the server. The paper's algorithm was not at hand
as a text; this follows its formulas as they are cited. θ is a constant, where the paper lets it be proportional to γ. x
and y are projected where they have a set.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.methods.base import Draw, Federation, Method, validated
from coterie.methods.nested.steps import NESTED, SUPPORTS, Curvature, Step, StepRule, indirect
from coterie.methods.nested.works import joint_directions
from coterie.problems.nested import NestedProblem
from coterie.settings import BatchSize, Probability


class MaSobaState(NamedTuple):
    """SOBA's state, and the moving average h of D_x."""

    x: Tensor
    y: Tensor
    v: Tensor
    h: Tensor
    kind: str
    curvature: Curvature


@validated
def ma_soba(
    *, step: Step = "auto", outer_step: Step = "auto", averaging: Probability = 0.5, batch: BatchSize = "all"
) -> Method:
    """Run SOBA with a moving average of the outer direction.

    Symbols: ρ = step, γ = outer_step, θ = averaging.

    Cost: 1 round per call of round, with 2 d_y + d_x numbers per client up and down.
    Steps "auto" take at most 43 rounds more, in the first call.

    Args:
        step: ρ, step size of y and v; "auto" takes 1/L, with the curvature L of the inner loss
        outer_step: γ, step size of x; "auto" chooses it by a small model of the problem
        averaging: θ, weight of the newest direction in the moving average
        batch: rows per direction and level; 'all' uses every row of the client

    Example:
        >>> from coterie.methods import ma_soba
        >>> ma_soba(averaging=0.1).name
        'ma-soba'
    """
    rule = StepRule(step, outer_step, averaging=averaging)

    def init(problem: NestedProblem, n: int) -> MaSobaState:
        x, y, kind = problem.start, problem.inner_start, problem.task.kind
        return MaSobaState(x, y, indirect(kind, y), torch.zeros_like(x), kind, Curvature())

    def round(fed: Federation, s: MaSobaState, draw: Draw) -> MaSobaState:
        curvature = rule.estimated(fed, s)
        rho, gamma = rule.sizes(curvature)
        d_y, d_v, d_x = fed.mean(joint_directions, (s.x, s.y, s.v), draw=draw.phase("directions"), batch=batch)
        x, y = fed.task.x.project(s.x - gamma * s.h), fed.task.y.project(s.y - rho * d_y)
        h = (1.0 - averaging) * s.h + averaging * d_x
        return MaSobaState(x, y, s.v - rho * d_v, h, s.kind, curvature)

    return Method("ma-soba", init, round, rule.view, NESTED, SUPPORTS)
