"""`dirichlet`: classes are dealt in Dirichlet proportions; every client tests on rows of its own (PFLlib's setting).

All published rows, training and test part alike, are pooled and dealt: every class in proportions drawn from
Dirichlet(α, …, α), class after class, where a client that has an even share of all rows gets no more. A partition in
which a client has fewer than `least` rows is drawn anew. Each client's rows are split at random: a share `test` is its
own test set, and a share `validation` of the rest is set aside. So a client is tested on the classes that it trains on,
in the same proportions, which rewards personal models. Pixels are in [−1, 1].

PFLlib (Zhang et al. 2025) sets no validation rows aside; with 20 clients, α = .1 and `test = .25` the partition is its
"practical heterogeneous" one.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.catalogue.holders import of_holders
from coterie.problems.data.examples import Examples, Holder
from coterie.problems.data.load import load
from coterie.problems.data.partition import dirichlet as dealt
from coterie.problems.data.partition import split
from coterie.problems.models import FlatModel, build
from coterie.problems.weighting import Weighting
from coterie.settings import Count, Name, Positive

Share = Annotated[float, Field(gt=0.0, lt=1.0)]
Number = Annotated[int, Field(ge=0)]
MODELS = {"digits": "mlp", "mnist": "wide-cnn", "fashion-mnist": "wide-cnn", "cifar10": "wide-cnn"}
TRIES = 100


def dirichlet(
    context: Context,
    *,
    data: Literal["digits", "mnist", "fashion-mnist", "cifar10"] = "digits",
    alpha: Positive = 0.1,
    clients: Count = 20,
    target: Number = 0,
    validation: Share = 0.2,
    test: Share = 0.25,
    least: Annotated[int, Field(ge=4)] = 20,
    model: Name | None = None,
) -> Weighting:
    """Classes in Dirichlet proportions; every client has training, validation and test rows of its own.

    Args:
        alpha: α of the Dirichlet distribution; smaller is more unequal.
        target: number of the client whose model is wanted, for methods with one target.
        validation: share of every client's rows other than test rows that judges models.
        test: share of every client's rows that its own model is tested on.
        least: fewest rows of a client; a partition with fewer is drawn anew.
        model: network by name; by data set if not set.

    Example:
        >>> from coterie.problems import Context
        >>> problem = dirichlet(Context(0), clients=5, alpha=0.5)
        >>> problem.clients, sorted(problem.offers & {"everyone", "target"})
        (5, ['everyone', 'target'])
    """
    source = load(data)
    parts = [source.train] if source.test is None else [source.train, source.test]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    draw = Draw.of(context.seed).phase("dirichlet")
    scale = source.scale()

    def holder(k: int, rows: Tensor) -> Holder:
        tested, kept = split(rows, test, draw.phase("test").client(k))
        mine = [Examples(scale(x[part]).mul_(2.0).sub_(1.0), y[part]) for part in (kept, tested)]
        return Holder(f"client {k}", *mine)

    return of_holders(
        context,
        [holder(k, rows) for k, rows in enumerate(_partition(y, clients, alpha, least, draw.phase("partition")))],
        FlatModel(build(model or MODELS[data], source.shape, source.classes, context.seed)),
        target=target,
        validation=validation,
        draw=draw,
        names=(),
    )


def _partition(labels: Tensor, clients: int, alpha: float, least: int, draw: Draw) -> list[Tensor]:
    """The first partition that gives everybody enough rows."""
    if least * clients > len(labels):
        raise UsageError(
            f"{len(labels)} rows do not give {clients} clients problem.least = {least} each; lower one of them."
        )
    for i in range(TRIES):
        parts = dealt(labels, clients, alpha, draw.step(i), capped=True)
        if min(map(len, parts)) >= least:
            return parts
    raise UsageError(
        f"none of {TRIES} partitions with problem.alpha = {alpha:g} gives all {clients} clients problem.least = {least}"
        " rows; lower problem.least or problem.clients, or raise problem.alpha."
    )
