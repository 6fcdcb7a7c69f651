"""MeritFed with zeroth-order mirror descent (Tupitsa et al. 2024, approach 1): the target returns only losses.

    g̃ = n (φ(w + he) − φ(w − he))/2h · e,   φ(w) = L_0(x − γ Σ_k w_k g_k),   e uniform on the sphere of R^n

Both losses of a step are on the same rows. The printed g̃ lacks its last factor e. φ is also evaluated off the simplex,
which costs nothing: any w gives a model. Central differences are exact where L_0 is quadratic, whatever h is; where it
is not, a large h blurs φ and a tiny one drowns in rounding, above all in float32.

E[g̃] = ∇φ up to O(h²), with √n times the size in every coordinate: small exponents and the warm start average it out.
"""

from typing import NamedTuple

from torch import Tensor

from coterie.methods.base import GRADIENTS_AND_TARGET, Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.works import gradient
from coterie.methods.weights.mirror import Averaging, Data, Judge, mirror_descent, zeroth_order
from coterie.numerics import uniform
from coterie.settings import BatchSize, Count, NonNegative, Positive


class MeritFedZOState(NamedTuple):
    """The common model [d], the client weights [K] on the simplex, and rounds done."""

    x: Tensor
    w: Tensor
    rounds: int


@validated
def meritfed_zo(
    *,
    step: Positive = 0.1,
    mirror_step: Positive = 0.1,
    mirror_steps: Count = 10,
    mirror_batch: BatchSize = "all",
    smoothing: Positive = 0.1,
    data: Data = "validation",
    average: Averaging = False,
    batch: BatchSize = "all",
    tie: NonNegative = 0.0,
) -> Method:
    """Run MeritFed with losses of the target alone: the slope of the weights by random central differences.

    Symbols: γ = step, α = mirror_step, h = smoothing.

    Cost: 1 round per call of round, and mirror_steps exchanges with the target, of 2 losses each.

    Args:
        smoothing: h, distance of the two trial weights from the current ones
        mirror_batch: rows of the target per loss
        average: use the mean of a round's mirror iterates instead of the last one; "continue" also starts each mirror
            step from the mean so far

    Example:
        >>> from coterie.methods import meritfed_zo
        >>> meritfed_zo().name
        'meritfed-zo'
    """
    judge = Judge(data, mirror_batch, mirror_steps)

    def init(problem: Problem, n: int) -> MeritFedZOState:
        judge.check(problem)
        return MeritFedZOState(problem.start, uniform(n, like=problem.start), 0)

    def round(fed: Federation, s: MeritFedZOState, draw: Draw) -> MeritFedZOState:
        G, ids = fed.gather(gradient, s.x, draw=draw.phase("gradient"), batch=batch)
        active = s.w[ids].sum()
        ask = judge.at(fed, s.rounds, draw.phase("mirror"))
        slope = zeroth_order(ask, s.x, G, step=step, smoothing=smoothing, draw=draw.phase("direction"))
        w = s.w[ids] / active
        w = mirror_descent(w, slope, step=mirror_step, steps=mirror_steps, average=average, tie=tie)
        return MeritFedZOState(s.x - step * w @ G, s.w.index_copy(0, ids, active * w), s.rounds + 1)

    return Method("meritfed-zo", init, round, lambda s: View(s.x, s.w), needs=GRADIENTS_AND_TARGET)
