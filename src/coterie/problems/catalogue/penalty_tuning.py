"""`penalty-tuning`: one penalty per class of a linear classifier, tuned on validation rows; with data = covtype the
regularisation problem of benchmark_bilevel.

    g_k(x, y) = mean cross-entropy of the linear model y over client k's train rows + ½ Σ_c exp(x_c) ‖y_c‖²
    f_k(y) = mean cross-entropy over its validation rows                          y_c: the weights of class c

There (datasets/covtype.py), 64 % of the rows train, 16 % validate and 20 % test, inputs are standardised, the model has
no offsets, and the log-penalties start at −2, y at 0. Here the rows are dealt to clients, and rows = N takes a subset.
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Batch
from coterie.problems.base import Context, View
from coterie.problems.data.dealt import Split, deal, draws, measured, source
from coterie.problems.data.examples import Examples
from coterie.problems.nested import Nested, NestedProblem, batch_mean
from coterie.settings import Count

START = -2.0


def class_loss(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """f: the mean cross-entropy of a batch; y is classes × features."""
    return batch_mean(F.cross_entropy(batch.inputs.flatten(1) @ y.T, batch.labels, reduction="none"), batch)


def penalised_loss(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """g: the same, with a penalty per class."""
    return class_loss(x, y, batch) + 0.5 * x.exp() @ y.square().sum(1)


def penalty_tuning(
    context: Context,
    *,
    data: Literal["digits", "covtype", "mnist", "fashion-mnist"] = "digits",
    clients: Count = 10,
    rows: Annotated[int, Field(ge=0)] = 0,
    test: Count = 400,
) -> NestedProblem:
    """One penalty per class (outer variable) and a linear classifier trained with them (inner variable).

    80 % of a client's rows are for training, the others validate.

    Args:
        rows: how many rows are dealt to the clients; 0 for all.
        test: rows set aside for the test, of data without a published test part.

    Example:
        >>> from coterie.problems import Context
        >>> problem = penalty_tuning(Context(0), clients=4)
        >>> len(problem.start), len(problem.inner_start)
        (10, 640)
    """
    draw = draws(context, "penalty-tuning")
    images, held_out = source(data, test, draw.phase("test"))
    if rows > len(images.y):
        raise UsageError(f"problem.rows = {rows}, but {data} has {len(images.y)} rows besides the test; lower it.")
    if rows:
        kept = draw.phase("rows").permutation(len(images.y))[:rows]
        images = Examples(images.x[kept], images.y[kept])
    dealt = deal(images, held_out, clients, Split("iid", 2, 0.5), 0.8, draw)
    x_test, y_test = dealt.test.x.to(context.device, context.dtype), dealt.test.y.to(context.device)
    count = int(max(images.y.max(), held_out.y.max())) + 1

    def measures(view: View) -> dict[str, float]:
        y = (problem.inner_start if view.inner is None else view.inner).view(count, -1)

        def net(inputs: Tensor) -> Tensor:
            return inputs.flatten(1) @ y.T

        return {**problem.losses(view), **measured(net(x_test), y_test)}

    problem = Nested(penalised_loss, class_loss).on(
        dealt.train,
        dealt.valid,
        x=torch.full((count,), START),
        y=torch.zeros(count, images.x[0].numel()),
        measures=measures,
        **context.tensor_options,
    )
    return problem
