"""`hyper-representation`: the backbone is the outer variable, judged on validation rows; the head is the inner one,
trained on train rows (FedNest, section 4.1). 2-layer perceptron; with MNIST and 200 hidden units d_x = 157,000 and
d_y = 2,010. The head's ridge makes the inner problem strongly convex.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from coterie.federation import Batch
from coterie.problems.base import Context, View
from coterie.problems.data.dealt import Data, Partition, Split, chosen_by, deal, dense, draws, measured, source
from coterie.problems.nested import Nested, NestedProblem, batch_mean
from coterie.problems.tasks.softmax import softmax_gradient, softmax_product
from coterie.problems.tasks.variables import Bound
from coterie.settings import Count, NonNegative, Positive


class HeadLoss:
    """Cross-entropy of head ∘ backbone, plus ½ ridge ‖y‖². Derivatives by a linear head are written down."""

    through_x = True
    """Inputs are looked at through x alone."""

    def __init__(self, ridge: float = 0.0) -> None:
        self.ridge = ridge

    def __call__(self, x: Bound, y: Bound, batch: Batch) -> Tensor:
        """The mean over a batch."""
        loss = batch_mean(F.cross_entropy(y(x(batch.inputs)), batch.labels, reduction="none"), batch)
        return loss + 0.5 * self.ridge * y.flat.square().sum() if self.ridge else loss

    def y_gradient(self, x: Bound, y: Bound, batch: Batch) -> Tensor:
        """By the parameters of the head."""
        return softmax_gradient(y.flat, _seen(x, batch)) + self.ridge * y.flat

    def y_product(self, x: Bound, y: Bound, v: Tensor, batch: Batch) -> Tensor:
        """The second derivative by them, times v."""
        return softmax_product(y.flat, v, _seen(x, batch)) + self.ridge * v


def _seen(x: Bound, batch: Batch) -> Batch:
    """The batch as the head sees it."""
    return Batch((x(batch.inputs), batch.labels), batch.weight)


def hyper_representation(
    context: Context,
    *,
    data: Data = "digits",
    clients: Count = 20,
    partition: Partition = "iid",
    classes: Count = 2,
    alpha: Positive = 0.5,
    hidden: Count = 200,
    ridge: NonNegative = 0.01,
    test: Count = 400,
    selection: Annotated[int, Field(ge=0)] = 0,
) -> NestedProblem:
    """The backbone is the outer variable, the head the inner one; half of a client's rows train, half validate.

    Args:
        test: digits set aside for the test.

    Example:
        >>> from coterie.problems import Context
        >>> problem = hyper_representation(Context(0), clients=4, hidden=8)
        >>> len(problem.inner_start)
        90
    """
    draw = draws(context, "hyper-representation")
    images, held_out = source(data, test, draw.phase("test"))
    dealt = deal(images, held_out, clients, Split(partition, classes, alpha), 0.5, draw)
    net = dense([hidden, 10], tuple(images.x.shape[1:]), context.seed)
    backbone, head = net[:-1], net[-1]
    valid = [torch.cat(column) for column in zip(*dealt.valid, strict=True)]
    chooses, tested = chosen_by(dealt.test, selection, draw)
    (x_test, y_test), (x_valid, y_valid) = (
        (x.to(context.device, context.dtype), y.to(context.device)) for x, y in (tested, valid)
    )

    def measures(view: View) -> dict[str, float]:
        y = problem.task.y(problem.inner_start if view.inner is None else view.inner)
        with torch.no_grad():
            outputs, seen = (y(problem.task.x(view.model)(inputs)) for inputs in (x_test, x_valid))
            return {
                **measured(outputs, y_test),
                **chooses(lambda inputs: y(problem.task.x(view.model)(inputs)), context),
                "validation_loss": float(F.cross_entropy(seen, y_valid)),
                "validation_accuracy": float((seen.argmax(1) == y_valid).cpu().double().mean()),
            }

    problem = Nested(HeadLoss(ridge), HeadLoss()).on(
        dealt.train,
        dealt.valid,
        x=backbone,
        y=nn.Sequential(head),
        measures=measures,
        **context.tensor_options,
    )
    return problem
