"""FedDF (Lin et al. 2020, Algorithm 3): networks of several sizes, each fused by distilling all clients' ensemble.

Clients train the network of their level. The server averages those of a level, then each average learns, on public
rows without labels, from the mean logits of all clients' networks. The network of the largest capacity is
judged. Deviation: a fixed number of steps, no early stopping on a validation set.
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


class FedDFState(NamedTuple):
    """One network per level, [levels, d], and the clients' levels."""

    models: Tensor
    levels: Tensor


@validated
def feddf(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    batch: BatchSize = 20,
    optimiser: Rule = "sgd",
    distil_step: Positive = 1e-3,
    distil_steps: Count = 20,
    distil_rows: Count = 64,
) -> Method:
    """Train networks of several sizes, and let each learn from the ensemble of all clients on public rows (Alg. 3).

    Symbols: γ = step.

    Cost: 1 round per call of round; a client receives and sends the network of its size.

    Args:
        optimiser: rule of the clients' local steps
        distil_step: step size of Adam on the public rows
        distil_steps: steps of Adam on the public rows per round
        distil_rows: public rows per step

    Example:
        >>> from coterie.methods import feddf
        >>> feddf().name
        'feddf'
    """
    local = Local(step, local_steps, batch, optimiser)
    distillation = Local(distil_step, distil_steps, distil_rows, "adam")

    def init(problem: SubModels, n: int) -> FedDFState:
        return FedDFState(distilling.networks(problem.task, problem.start), problem.levels)

    def round(fed: Federation, s: FedDFState, draw: Draw) -> FedDFState:
        task = fed.task
        found = distilling.trained_by_level(fed, s.models, s.levels, draw.phase("learn"), local)
        models = distilling.averaged(task, s.models, found)
        inputs = distilling.public_batches(task, distillation, draw.phase("public"))
        labels = [distilling.ensemble(task, found, rows).mean(0).softmax(-1) for rows in inputs]
        students = []
        for level, model in enumerate(models):
            index = distilling.index_of(task, level)
            theta = distilling.distilled(
                task.at(level, scaled=False), model[index], inputs, labels, distilling.soft_cross_entropy, distillation
            )
            students.append(model.index_copy(0, index, theta))
        return FedDFState(torch.stack(students), s.levels)

    return Method("feddf", init, round, lambda s: View(s.models[0]), needs=distilling.NEEDS)
