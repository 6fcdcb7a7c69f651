"""`loss-tuning`: the parameters of a loss are tuned so that a model trained on long-tailed data serves all classes.

Inner: a 3-layer perceptron minimises the VS loss, cross-entropy on σ(δ_c)·logit_c + ι_c, on train rows. Outer: (δ, ι)
minimise the class-balanced cross-entropy of the plain logits on validation rows (FedNest, section 4.2; Li et al. 2021;
Kini et al. 2021). δ = ι = 0 is the untuned loss. f does not use x, so there is no direct gradient.

f weighs a row of class c by 1/(C π_c), π_c the share of class c in all rows: its mean over all rows of all clients is
then the mean of the class means. (Normalised within each client, a client without rare classes would count too much.)
"""

from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Batch
from coterie.problems.base import Context, View
from coterie.problems.data.dealt import Data, Partition, Split, chosen_by, deal, dense, draws, measured, source
from coterie.problems.data.examples import Examples as Images
from coterie.problems.data.partition import long_tail
from coterie.problems.nested import Nested, NestedProblem, batch_mean
from coterie.problems.tasks.variables import Bound
from coterie.settings import Count, NonNegative, Positive


def vs_loss(ridge: float, x: dict[str, Tensor], y: Bound, batch: Batch) -> Tensor:
    """g: cross-entropy on σ(δ)·logits + ι, plus ½ ridge ‖y‖²; the mean over a batch."""
    logits = torch.sigmoid(x["delta"]) * y(batch.inputs) + x["iota"]
    losses = F.cross_entropy(logits, batch.labels, reduction="none")
    return batch_mean(losses, batch) + 0.5 * ridge * y.flat.square().sum()


def balanced_loss(weights: Tensor, x: dict[str, Tensor], y: Bound, batch: Batch) -> Tensor:
    """f: cross-entropy of the plain logits, rows weighted by class; the mean over a batch."""
    losses = F.cross_entropy(y(batch.inputs), batch.labels, reduction="none")
    return batch_mean(weights[batch.labels] * losses, batch)


def loss_tuning(
    context: Context,
    *,
    data: Data = "digits",
    clients: Count = 10,
    partition: Partition = "iid",
    classes: Count = 2,
    alpha: Positive = 0.5,
    imbalance: Annotated[float, Field(ge=1.0)] = 20.0,
    hidden: list[Count] = [200, 100],  # noqa: B006
    ridge: NonNegative = 0.001,
    test: Count = 400,
    selection: Annotated[int, Field(ge=0)] = 0,
) -> NestedProblem:
    """A loss tuned for long-tailed classes (outer variable) and a network trained with it (inner variable).

    Class c keeps n·imbalance^(−c/9) rows, n those of the first class; 80 % of a client's rows are for training.

    Args:
        imbalance: rows of the most frequent class per row of the rarest.
        hidden: hidden units of each layer.
        test: digits set aside for the test.

    Example:
        >>> from coterie.problems import Context
        >>> problem = loss_tuning(Context(0), clients=4, hidden=[8])
        >>> len(problem.start)
        20
    """
    draw = draws(context, "loss-tuning")
    images, held_out = source(data, test, draw.phase("test"))
    n = int((images.y == 0).sum())
    if n / imbalance < 1.0:
        raise UsageError(
            f"problem.imbalance = {imbalance:g} leaves no row of the rarest class, for the first has {n}; lower it."
        )
    kept = long_tail(images.y, n, max(1, round(n / imbalance)), draw.phase("tail"))
    tail = Images(images.x[kept], images.y[kept])
    dealt = deal(tail, held_out, clients, Split(partition, classes, alpha), 0.8, draw)
    counts = torch.bincount(tail.y, minlength=10)
    weights = (counts.sum() / (10 * counts.clamp(min=1))).to(context.device, context.dtype)
    chooses, tested = chosen_by(dealt.test, selection, draw)
    x_test, y_test = tested.x.to(context.device, context.dtype), tested.y.to(context.device)

    def measures(view: View) -> dict[str, float]:
        with torch.no_grad():
            net = problem.task.y(problem.inner_start if view.inner is None else view.inner)
            return {**measured(net(x_test), y_test), **chooses(net, context)}

    problem = Nested(partial(vs_loss, ridge), partial(balanced_loss, weights)).on(
        dealt.train,
        dealt.valid,
        x={"delta": torch.zeros(10), "iota": torch.zeros(10)},
        y=dense([*hidden, 10], tuple(images.x.shape[1:]), context.seed),
        measures=measures,
        **context.tensor_options,
    )
    return problem
