"""`sketch`: a convolutional network learnt by 10 clients over a slow connection (FedSep, section 5.1).

The training part is dealt evenly, i.i.d. or so that each client has exactly `classes` classes, dealt at random (or
neighbours on a ring of all classes, "ring"); the published test part measures the model. Pixels are standardised by the
training part. There is no target: nobody's weight is learnt.
Digits are not in the paper: 400 rows are set apart for the test.
"""

from typing import Annotated, Literal

from pydantic import Field

from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.data.dealt import source
from coterie.problems.data.partition import partition as parts_of
from coterie.problems.data.partition import set_apart
from coterie.problems.models import FlatModel, build
from coterie.problems.weighting import Weighting, weighting
from coterie.settings import Count, Name, Positive


def sketch(
    context: Context,
    *,
    data: Literal["digits", "mnist", "fashion-mnist", "cifar10"] = "digits",
    model: Name = "conv4",
    clients: Count = 10,
    partition: Literal["iid", "classes", "ring", "dirichlet", "quantity"] = "iid",
    classes: Count = 2,
    alpha: Positive = 0.5,
    test: Count = 400,
    selection: Annotated[int, Field(ge=0)] = 0,
) -> Weighting:
    """A convolutional network learnt over a slow connection, i.i.d. or by classes; there is no target.

    Args:
        test: rows set aside for the test where no test part is published.

    Example:
        >>> from coterie.problems import Context
        >>> problem = sketch(Context(0), clients=4)
        >>> problem.clients, problem.target is None
        (4, True)
    """
    draw = Draw.of(context.seed).phase("sketch")
    (x, y), held_out = source(data, test, draw.phase("test part"))
    mean, deviation = x.mean(), x.std()
    x, x_test = (t.sub_(mean).div_(deviation) for t in (x, held_out.x))  # fresh copies, and large
    dealt = parts_of(partition, y, clients, classes, draw.phase("partition"), alpha)
    chooses, judged = set_apart((x_test, held_out.y), selection, draw.phase("selection"))
    return weighting(
        [(x[rows], y[rows]) for rows in dealt],
        None,
        FlatModel(build(model, tuple(x.shape[1:]), int(y.max()) + 1, context.seed)),
        "cross_entropy",
        test=judged,
        selection=chooses,
        **context.tensor_options,
    )
