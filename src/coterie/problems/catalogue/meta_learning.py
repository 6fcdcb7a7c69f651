"""`meta-learning`: an initialisation x that is good after one common gradient step, as in model-agnostic meta-learning.

    r_i(x) = x − η ∇L_i(x) on client i's train rows,   y*(x) = 1/m Σ r_i(x),   f_i(y) = L_i(y) on its validation rows

A small compositional problem: ∇f(x) = (I − η∇²L(x)) ∇L_valid(y*(x)), and no client knows L. Digits, shards by class.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

from coterie.federation import Batch
from coterie.problems.base import Context, View
from coterie.problems.data.dealt import Data, Partition, Split, deal, dense, draws, measured, source
from coterie.problems.models import FlatModel
from coterie.problems.nested import Compositional, NestedProblem, batch_mean
from coterie.settings import Count, Positive


class Adapted:
    """r: one gradient step of size η from x."""

    def __init__(self, model: FlatModel, eta: float) -> None:
        self.model, self.eta = model, eta

    def loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """L(θ), the mean cross-entropy of a batch."""
        losses = F.cross_entropy(self.model(theta, batch.inputs), batch.labels, reduction="none")
        return batch_mean(losses, batch)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x − η ∇L(x) on a batch."""
        return x - self.eta * grad(self.loss)(x, batch)


def meta_learning(
    context: Context,
    *,
    data: Data = "digits",
    clients: Count = 10,
    partition: Partition = "shards",
    classes: Count = 2,
    alpha: Positive = 0.5,
    hidden: Count = 32,
    adaptation: Positive = 0.5,
    test: Count = 400,
) -> NestedProblem:
    """An initialisation that is good after one common gradient step; the adapted model is tested.

    Args:
        adaptation: η, size of the common gradient step.
        test: digits set aside for the test.

    Example:
        >>> from coterie.problems import Context
        >>> problem = meta_learning(Context(0), clients=4, hidden=8)
        >>> len(problem.start) == len(problem.inner_start)
        True
    """
    draw = draws(context, "meta-learning")
    images, held_out = source(data, test, draw.phase("test"))
    dealt = deal(images, held_out, clients, Split(partition, classes, alpha), 0.5, draw)
    model = FlatModel(dense([hidden, 10], tuple(images.x.shape[1:]), context.seed)).to(**context.tensor_options)
    adapted = Adapted(model, adaptation)
    x_test, y_test = dealt.test.x.to(context.device, context.dtype), dealt.test.y.to(context.device)

    def measures(view: View) -> dict[str, float]:
        with torch.no_grad():
            outputs = model(view.model if view.inner is None else view.inner, x_test)
            return measured(outputs, y_test)

    return Compositional(adapted, adapted.loss).on(
        dealt.train,
        dealt.valid,
        x=model.start,
        y=model.start,
        measures=measures,
        **context.tensor_options,
    )
