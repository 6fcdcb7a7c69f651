"""DS-FL (Itahara et al. 2020): clients exchange predictions for public rows, not their networks.

Every client keeps a network of its level. In a round it learns the soft labels of the last round, trains on its own
rows, and uploads class probabilities of fresh public rows. The server sharpens their mean (entropy reduction
aggregation: a softmax of it at a low temperature), and a whole network of its own learns the result. Deviation: a
client that missed rounds learns the last soft labels only.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Memory, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, View, known, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.submodels.carving import Local, asked, by_level, learnt
from coterie.methods.submodels.distilling import NEEDS, distilled, index_of, networks, soft_cross_entropy
from coterie.problems.catalogue.submodels import SubModels
from coterie.settings import BatchSize, Count, Positive

TEMPERATURE = 0.1  # below 1 the mean prediction is sharpened


class DSFLState(NamedTuple):
    """The server's network, the clients' networks [n, d], their levels; the last soft labels and their rows."""

    x: Tensor
    models: Memory
    levels: Tensor
    labels: Tensor
    places: Tensor
    rounds: int


@work("ds-fl/learn-and-predict", update=RESULT)
def learn_and_predict(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """Class probabilities of public rows, after learning from soft labels and from the client's own rows."""
    labels, places, fresh = shared
    task, public = shard.task.at(static.level, scaled=False), shard.task.public
    index = index_of(shard.task, static.level)
    theta = private[index]
    if static.labelled:
        distillation = Local(static.distil_step, static.distil_steps, static.distil_rows, "adam")
        rows = draw.phase("public").batches(len(places), int(distillation.batch), distillation.steps)
        theta = distilled(task, theta, public[places[rows]], list(labels[rows]), soft_cross_entropy, distillation)
    theta = theta + learnt(task, theta, shard, static, draw)
    predicted = task.model(theta, public[fresh]).softmax(-1)
    return predicted, private.scatter(0, index, theta)


@validated
def ds_fl(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    batch: BatchSize = 20,
    optimiser: Rule = "sgd",
    public_rows: Count = 200,
    distil_step: Positive = 1e-3,
    distil_steps: Count = 10,
    distil_rows: Count = 64,
) -> Method:
    """Exchange predictions for public rows instead of networks; all learn from their sharpened mean.

    Symbols: γ = step.

    Cost: 1 round per call of round; public_rows × classes numbers each way per client.

    Args:
        optimiser: rule of the clients' local steps
        public_rows: public rows that are labelled per round
        distil_step: step size of Adam on the public rows
        distil_steps: steps of Adam on the public rows per round
        distil_rows: public rows per step

    Example:
        >>> from coterie.methods import ds_fl
        >>> ds_fl().name
        'ds-fl'
    """
    local = Local(step, local_steps, batch, optimiser)
    distillation = Local(distil_step, distil_steps, distil_rows, "adam")
    # by name, so that nodes can bound the steps and rows that they are asked for
    distil: dict[str, Any] = {"distil_step": distil_step, "distil_steps": distil_steps, "distil_rows": distil_rows}

    def init(problem: SubModels, n: int) -> DSFLState:
        task, count = problem.task, min(public_rows, len(problem.task.public))
        models = Memory(networks(task, problem.start)[problem.levels])
        classes = known(task.classes, "classes")
        labels = problem.start.new_full((count, classes), 1 / classes)
        places = torch.arange(count, device=problem.levels.device)
        return DSFLState(problem.start, models, problem.levels, labels, places, 0)

    def round(fed: Federation, s: DSFLState, draw: Draw) -> DSFLState:
        task, memory = fed.task, s.models
        fresh = draw.phase("fresh").subset(len(task.public), len(s.places))

        def ask(level: int, group: Federation) -> Tensor:
            nonlocal memory
            settings: dict[str, Any] = {**local._asdict(), **distil, "level": level, "labelled": s.rounds > 0}
            settings |= {"memory": memory, "draw": draw.phase("learn")}
            (predicted, _), memory = group.gather(learn_and_predict, (s.labels, s.places, fresh), **settings)
            return predicted

        predicted = torch.cat(asked(fed, by_level(s.levels), ask))
        labels = (predicted.mean(0) / TEMPERATURE).softmax(-1)
        rows = draw.phase("server").batches(len(fresh), int(distillation.batch), distillation.steps)
        x = distilled(task, s.x, task.public[fresh[rows]], list(labels[rows]), soft_cross_entropy, distillation)
        return DSFLState(x, memory, s.levels, labels, fresh, s.rounds + 1)

    return Method("ds-fl", init, round, lambda s: View(s.x), needs=NEEDS)
