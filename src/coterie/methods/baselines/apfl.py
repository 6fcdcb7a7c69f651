"""APFL (Deng et al. 2020, Algorithm 1): every client learns how much to mix a model of its own with the common one.

    v̄ = αv + (1−α)w,   w from the common model x, v and α kept by the client
    first step of a round:   α ← α − γ⟨v − w, ∇L_k(v̄)⟩, projected onto [0, 1]   (equation 10)
    each local step:   w ← w − γ∇L_k(w),   v ← v − γα∇L_k(v̄)   on the same batch
    x⁺ = mean of the w_k

v̄ after the local steps is the client's personal model. The last factor α is the derivative of v̄ by v. With α = 0 the
personal model is the client's copy of FedAvg's, with α = 1 it is trained alone.
"""

from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.federation import Memory, Shard, Static, Tree, moved_from, work
from coterie.federation.work import rows_for_records
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.works import own_rows, slopes
from coterie.settings import BatchSize, Count, Positive

Unit = Annotated[float, Field(ge=0.0, le=1.0)]


class Mixed(NamedTuple):
    """What a client keeps: its own model v, the share α of it, and the mixture v̄ after the last local steps."""

    v: Tensor
    alpha: Tensor
    mixture: Tensor


class APFLState(NamedTuple):
    """The common model x, and what the clients keep."""

    x: Tensor
    own: Memory


@work("apfl/both-models", update=moved_from())
def both_models(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """w after the local steps, which is uploaded, and what the client keeps."""
    w, v, alpha = shared, private.v, private.alpha
    for i, slope in enumerate(slopes(own_rows(shard), shard.task, static.batch, static.steps, draw)):
        at_mixture = slope(alpha * v + (1 - alpha) * w)
        if i == 0 and static.adaptive:
            alpha = (alpha - static.step * (at_mixture @ (v - w))).clamp(0.0, 1.0)
        w, v = w - static.step * slope(w), v - static.step * alpha * at_mixture
    return w, Mixed(v, alpha, alpha * v + (1 - alpha) * w)


@validated
def apfl(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    mixing: Unit = 0.5,
    adaptive: bool = True,
) -> Method:
    """Train a common model and one per client; each client judges by its data how much of which it takes.

    Symbols: γ = step, α = mixing.

    Cost: 1 round per call of round; d numbers each way per client, and two gradients per local step.

    Args:
        mixing: α, share of the own model in the mixture; the first one where it is learned
        adaptive: whether every client learns its α, once per round

    Example:
        >>> from coterie.methods import apfl
        >>> apfl(mixing=0.25, adaptive=False).settings["mixing"]
        0.25
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch, "adaptive": adaptive}

    def init(problem: Problem, n: int) -> APFLState:
        x = problem.start
        return APFLState(x, Memory.start(Mixed(x, torch.full_like(x[0], mixing), x), n))

    def round(fed: Federation, s: APFLState, draw: Draw) -> APFLState:
        return APFLState(*fed.mean(both_models, s.x, memory=s.own, draw=draw.phase("walk"), **local))

    def view(s: APFLState) -> View:
        return View(Mixed(*rows_for_records(s.own)).mixture)

    return Method("apfl", init, round, view, needs=frozenset({"gradient", "everyone"}))
