"""SCAFFOLD (Karimireddy et al. 2020, Algorithm 1): control variates correct the drift of local steps.

    y ← x;   τ times:  y ← y − γ(∇L_k(y) − c_k + c)
    c_k⁺ = c_k − c + (x − y)/(τγ)   (the paper's option II)
    x⁺ = x + mean(y_k − x),   c⁺ = c + (|A|/n) mean(c_k⁺ − c_k)

c_k is the mean gradient along the client's last local steps and stays at the client; c is the mean of all c_k. All
begin at 0, so the first round is FedAvg with equal weights. Where the losses differ, FedAvg with several local steps
stops at another point than the optimum of the mean loss; SCAFFOLD does not.

The paper's server step η_g is `server = "sgd(η_g)"`. |A| counts the clients that were asked: if a reply is lost, the
mean change of the others stands for it.
"""

from typing import Any, NamedTuple

from torch import Tensor

from coterie.federation import RESULT, Memory, Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.optimisers import AveragedState, Averaging, Moments, ServerRule
from coterie.methods.shared.works import own_rows, slopes
from coterie.settings import BatchSize, Count, Positive


class ScaffoldState(NamedTuple):
    """The common model x, the moments of the server's rule, the server's variate c, and the clients' variates c_k."""

    x: Tensor
    moments: Moments
    c: Tensor
    variates: Memory


@work("scaffold/corrected-steps", update=(moved_from(0), RESULT))
def corrected_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """y after the corrected local steps and c_k⁺ − c_k, which are uploaded, and c_k⁺, which is kept."""
    (x, c), mine = shared, private
    y = x
    for slope in slopes(own_rows(shard), shard.task, static.batch, static.steps, draw):
        y = y - static.step * (slope(y) - mine + c)
    change = (x - y) / (static.steps * static.step) - c
    return (y, change), mine + change


@validated
def scaffold(
    *, step: Positive = 0.1, local_steps: Count = 5, batch: BatchSize = 20, server: ServerRule = "sgd"
) -> Method:
    """Average local steps whose drift is corrected by control variates, which the clients keep.

    Symbols: γ = step, τ = local_steps.

    Cost: 1 round per call of round; 2d numbers each way per client.

    Example:
        >>> from coterie.methods import scaffold
        >>> scaffold(server="sgd(0.5)").settings["server"]
        'sgd(0.5)'
    """
    averaging = Averaging.by(server)
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch}

    def init(problem: Problem, n: int) -> ScaffoldState:
        zero = 0.0 * problem.start
        return ScaffoldState(*averaging.start(problem.start), zero, Memory.start(zero, n))

    def round(fed: Federation, s: ScaffoldState, draw: Draw) -> ScaffoldState:
        at = draw.phase("walk")
        (mean, change), variates = fed.mean(corrected_steps, (s.x, s.c), memory=s.variates, draw=at, **local)
        moved = averaging.move(AveragedState(s.x, s.moments), mean)
        return ScaffoldState(*moved, s.c + len(fed.ids) / fed.n * change, variates)

    return Method("scaffold", init, round, lambda s: View(s.x))
