"""Fed-ET (Cho et al. 2022): small networks at the clients teach a large one at the server.

Clients train the network of their level, which is averaged within the level. On public rows without labels every
client's network counts in proportion to the variance of its logits, its confidence:

    s̃ = Σ_k α_k s_k,   α_k = Var(s_k)/Σ_l Var(s_l),   ỹ = argmax s̃                          the consensus
    s_D = Σ_{k∈D} α_k s_k/Σ_{k∈D} α_k,   D: clients that disagree, argmax s_k ≠ ỹ           the diversity
    the server's network learns   CE(ỹ) + λ KL(softmax s_D ‖ softmax s)

Deviation: their networks share the shape of their last hidden layers, which the server copies into the small ones;
networks of different widths share no such layer, so nothing is copied back here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.methods.base import Draw, Federation, Method, View, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.submodels import distilling
from coterie.methods.submodels.carving import Local
from coterie.problems.catalogue.submodels import SubModels
from coterie.settings import BatchSize, Count, Positive

DIVERSITY = 0.05  # λ, the weight of the opinion of the clients that disagree


class FedETState(NamedTuple):
    """The server's network [d], one network per level [levels, d], and the clients' levels."""

    x: Tensor
    models: Tensor
    levels: Tensor


class Verdict(NamedTuple):
    """The ensemble's view of rows: labels, the mean prediction of clients that disagree, and whether any does."""

    labels: Tensor
    others: Tensor
    divided: Tensor


def verdict(logits: Tensor) -> Verdict:
    """ỹ [rows], softmax s_D [rows, classes] and whether D is not empty [rows], of logits [clients, rows, classes]."""
    alpha = logits.var(-1, keepdim=True)
    alpha = alpha / alpha.sum(0)
    labels = (alpha * logits).sum(0).argmax(-1)
    against = alpha * (logits.argmax(-1) != labels)[..., None]
    mass = against.sum(0)
    others = (against * logits).sum(0) / torch.where(mass > 0, mass, 1.0)
    return Verdict(labels, others.softmax(-1), mass[:, 0] > 0)


@validated
def fed_et(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    batch: BatchSize = 20,
    optimiser: Rule = "sgd",
    distil_step: Positive = 1e-3,
    distil_steps: Count = 20,
    distil_rows: Count = 64,
) -> Method:
    """Let the ensemble of small client networks teach a large network at the server on public rows.

    Symbols: γ = step.

    Cost: 1 round per call of round; a client receives and sends the network of its size.

    Args:
        optimiser: rule of the clients' local steps
        distil_step: step size of Adam on the public rows
        distil_steps: steps of Adam on the public rows per round
        distil_rows: public rows per step

    Example:
        >>> from coterie.methods import fed_et
        >>> fed_et().name
        'fed-et'
    """
    local = Local(step, local_steps, batch, optimiser)
    distillation = Local(distil_step, distil_steps, distil_rows, "adam")

    def loss(outputs: Tensor, judged: Verdict) -> Tensor:
        log_p = outputs.log_softmax(-1)
        agreed = -log_p.gather(1, judged.labels[:, None])[:, 0]
        divergence = (judged.others * (judged.others.clamp(min=1e-12).log() - log_p)).sum(-1)
        return (agreed + DIVERSITY * judged.divided * divergence).mean()

    def init(problem: SubModels, n: int) -> FedETState:
        return FedETState(problem.start, distilling.networks(problem.task, problem.start), problem.levels)

    def round(fed: Federation, s: FedETState, draw: Draw) -> FedETState:
        task = fed.task
        found = distilling.trained_by_level(fed, s.models, s.levels, draw.phase("learn"), local)
        inputs = distilling.public_batches(task, distillation, draw.phase("public"))
        verdicts = [verdict(distilling.ensemble(task, found, rows)) for rows in inputs]
        x = distilling.distilled(task, s.x, inputs, verdicts, loss, distillation)
        return FedETState(x, distilling.averaged(task, s.models, found), s.levels)

    return Method("fed-et", init, round, lambda s: View(s.x), needs=distilling.NEEDS)
