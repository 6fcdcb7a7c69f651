"""`hyper-cleaning`: weights of single rows are learned so that a model trained on corrupted labels does well on clean
validation rows (Franceschi et al. 2017; the data cleaning of benchmark_bilevel).

    g_k(x_k, y) = 1/n_k Σ_i σ(x_ki) ℓ(y; row i of client k) + ½ ridge ‖y‖²       corrupted train rows
    f_k(y) = mean of ℓ(y; ·) over client k's clean validation rows               ℓ: cross-entropy of a linear model y

Client k keeps x_k, the weights of its own rows: neither the server nor another client is sent any of them. With
own = false x is one vector of all rows' weights, which every client receives: the same problem for methods that need
a shared x (its gradient by x_k is 1/m of the client's own, hence its steps m times as large).
"""

from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.federation import Batch
from coterie.measures import Measure, named
from coterie.numerics import Draw
from coterie.problems.base import Context, View
from coterie.problems.data.dealt import Data, Split, deal, dense, draws, measured, source
from coterie.problems.nested import Nested, NestedProblem, batch_mean
from coterie.problems.tasks.variables import Bound, PerClient
from coterie.settings import Count, Positive

CLASSES = 10
CLEAN = Measure("clean_share", "share of the weight on rows with true labels", "higher", "share", "train")


class WeighedLoss:
    """Cross-entropy with row weights σ(x_i), plus ½ ridge ‖y‖². A row's number is the second column of a batch."""

    def __init__(self, ridge: float) -> None:
        self.ridge = ridge

    def __call__(self, x: Tensor, y: Bound, batch: Batch) -> Tensor:
        """The mean over a batch."""
        losses = F.cross_entropy(y(batch.inputs), batch.labels, reduction="none")
        weighed = torch.sigmoid(x[batch.columns[1]]) * losses
        return batch_mean(weighed, batch) + 0.5 * self.ridge * y.flat.square().sum()


def clean_loss(x: Tensor, y: Bound, batch: Batch) -> Tensor:
    """f: the mean cross-entropy of a batch."""
    return batch_mean(F.cross_entropy(y(batch.inputs), batch.labels, reduction="none"), batch)


def corrupted(labels: Tensor, share: float, draw: Draw) -> Tensor:
    """Labels of which about this share is replaced by a uniform draw from all classes, the true one among them."""
    n = len(labels)
    replaced = draw.phase("which").bernoulli(share, n)
    return torch.where(replaced, draw.phase("label").integers(CLASSES, n), labels)


def clean_share(x: Tensor, true: list[Tensor]) -> float:
    """How much of the total weight is on rows whose labels are true.

    Args:
        x: the clients' own rows, [m, largest n_k]; all weights in one vector; or the common start of the clients.
        true: which labels of each client are true.
    """
    weights, counts = torch.sigmoid(x).cpu(), [len(kept) for kept in true]
    one_vector = weights.dim() == 1 and len(weights) == sum(counts)
    rows = (
        torch.split(weights, counts)
        if one_vector
        else [w[:n] for w, n in zip(weights.expand(len(true), -1), counts, strict=True)]
    )
    on_true = sum(float(w[kept].sum()) for w, kept in zip(rows, true, strict=True))
    return on_true / sum(float(w.sum()) for w in rows)


def hyper_cleaning(
    context: Context,
    *,
    data: Data = "digits",
    clients: Count = 10,
    corruption: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5,
    ridge: Positive = 0.02,
    own: bool = True,
    test: Count = 400,
) -> NestedProblem:
    """Row weights that clients keep (outer variable) and a linear model trained with them (inner variable).

    80 % of a client's rows are for training, with corrupted labels; the others validate, with true labels.

    Args:
        corruption: share of the train labels that are replaced by a uniform draw.
        own: whether a client keeps the weights of its rows; false shares all of them, for methods that need that.
        test: digits set aside for the test.

    Example:
        >>> from coterie.problems import Context
        >>> problem = hyper_cleaning(Context(0), clients=4)
        >>> problem.offers
        frozenset({'nested with x per client'})
    """
    draw = draws(context, "hyper-cleaning")
    images, held_out = source(data, test, draw.phase("test"))
    dealt = deal(images, held_out, clients, Split("iid", 2, 0.5), 0.8, draw)
    train, true, first = [], [], 0
    for k, (inputs, labels) in enumerate(dealt.train):
        spoilt = corrupted(labels, corruption, draw.phase("corruption").client(k))
        numbers = torch.arange(len(labels)) + (0 if own else first)
        train.append((inputs, numbers, spoilt))
        true.append(spoilt == labels)
        first += len(labels)
    x_test, y_test = dealt.test.x.to(context.device, context.dtype), dealt.test.y.to(context.device)

    def measures(view: View) -> dict[str, float]:
        with torch.no_grad():
            net = problem.task.y(problem.inner_start if view.inner is None else view.inner)
            found = measured(net(x_test), y_test)
        return {**found, "clean_share": clean_share(view.model, true)}

    weights = torch.zeros(max(len(kept) for kept in true) if own else first)
    problem = Nested(WeighedLoss(ridge), clean_loss).on(
        train,
        dealt.valid,
        x=PerClient(weights) if own else weights,
        y=dense([CLASSES], tuple(images.x.shape[1:]), context.seed),
        measures=measures,
        **context.tensor_options,
    )
    return replace(problem, declares=(named("test_accuracy"), CLEAN))
