"""FedAvg-S (Hou et al. 2021): simultaneous federated gradient descent–ascent, the baseline for minimax problems.

Every client takes τ steps of (x, y) ← (x − (α/τ) ∇_x f_i, y + (β/τ) ∇_y f_i); the server averages both.
"""

from coterie.methods.base import Draw, Federation, Method, validated
from coterie.methods.nested.phases import NestedState, StepCounts, start, stepped, supporting, view
from coterie.methods.nested.works import simultaneous_steps
from coterie.methods.shared.works import LocalSteps
from coterie.problems.nested import SETS, NestedProblem
from coterie.settings import BatchSize, Positive


@validated
def fedavg_s(
    *, step: Positive = 0.5, outer_step: Positive = 0.1, local_steps: StepCounts = 5, batch: BatchSize = 64
) -> Method:
    """Take simultaneous local descent steps in x and ascent steps in y, and average both.

    Symbols: α = outer_step, β = step, τ = local_steps.

    Cost: 1 round per call of round.

    Args:
        step: β, total step size of the ascent in y
        outer_step: α, total step size of the descent in x
        local_steps: τ, local steps: one number, or one per client

    Example:
        >>> from coterie.methods import fedavg_s
        >>> fedavg_s().name
        'fedavg-s'
    """

    def init(problem: NestedProblem, n: int) -> NestedState:
        return start(problem, n, local_steps)

    def round(fed: Federation, s: NestedState, draw: Draw) -> NestedState:
        local = LocalSteps(outer_step, local_steps, batch)
        x, y = stepped(fed, simultaneous_steps, (s.x, s.y), local, draw, inner_step=step)
        return s._replace(x=x, y=y)

    supports = supporting(SETS, kind="minimax")
    return Method("fedavg-s", init, round, view, needs=frozenset({"minimax"}), alternatives=supports)
