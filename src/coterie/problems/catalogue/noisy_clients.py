"""`noisy-clients`: clean clients that split the classes, the others with random labels (primal–dual, 5.2 and C).

The target is the server's validation set, 20 rows per class. The rest of the training part goes to client 0 (classes
0–4), 1 (5–7) and 2 (8–9), or to as many clients as `classes` has lists; rows of a class that several of them list are
dealt among these. Every other client has rows drawn from that rest, each with a label drawn from all classes. The class
counts suggest the weights (.5 .3 .2 0 …), which `fixed-weights` calls opt. Pixels are in [0, 1].

Appendix C's i.i.d. case: five lists of all classes, `clean_rows` and `noisy_rows` 9000.

MNIST and Fashion-MNIST: LeNet-5, 5000 rows per noisy client, the published test part. Digits are not in the paper: a
small perceptron, 120 rows per noisy client, and `test` rows set apart.
"""

from collections import Counter
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.data.load import load
from coterie.problems.data.partition import set_apart, thinned
from coterie.problems.models import FlatModel, build
from coterie.problems.weighting import Weighting, weighting
from coterie.settings import Count, Name, Positive

ClassNumber = Annotated[int, Field(ge=0)]
CLEAN = [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9]]


def noisy_clients(
    context: Context,
    *,
    data: Literal["digits", "mnist", "fashion-mnist"] = "digits",
    model: Name | None = None,
    clients: Annotated[int, Field(ge=len(CLEAN))] = 10,
    classes: Annotated[list[Annotated[list[ClassNumber], Field(min_length=1)]], Field(min_length=1)] | None = None,
    per_class: Count = 20,
    clean_rows: Count | None = None,
    noisy_rows: Count | None = None,
    test: Count = 400,
    selection: Annotated[int, Field(ge=0)] = 0,
    skew: Positive | None = None,
) -> Weighting:
    """Clean clients that split the classes, three by default; all others have random labels.

    Args:
        classes: the classes of each clean client, one list per client; [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9]] if not set.
        per_class: validation rows per class.
        clean_rows: most rows per clean client; all that there are if not set.
        noisy_rows: rows per noisy client; by data set if not set.
        test: rows set aside for the test where no test part is published.

    Example:
        >>> from coterie.problems import Context
        >>> problem = noisy_clients(Context(0), clients=5)
        >>> problem.clients, problem.best_weights.tolist()
        (5, [0.5, 0.3, 0.2, 0.0, 0.0])
    """
    source = load(data)
    clean = CLEAN if classes is None else classes
    _check_lists(clean, clients, source.classes)
    usual_model, usual_rows = ("mlp", 120) if data == "digits" else ("lenet5", 5000)
    draw = Draw.of(context.seed).phase("noisy-clients")
    train, held_out = source.parts(test, draw.phase("test part"))
    scale = source.scale()
    order = draw.phase("order").permutation(len(train.y))
    valid = torch.cat([_first(order, train.y, c, per_class) for c in range(source.classes)])
    rest = order[~torch.isin(order, valid)]

    shards = []
    for k in range(len(clean)):
        rows = rest[_dealt(train.y[rest], clean, k)][:clean_rows]
        shards.append((scale(train.x[rows]), train.y[rows]))
    each = min(noisy_rows or usual_rows, len(rest))
    for k in range(len(clean), clients):
        mine = draw.phase("noisy").client(k)
        rows = rest[mine.phase("rows").permutation(len(rest))[:each]]
        shards.append((scale(train.x[rows]), mine.phase("labels").integers(source.classes, each)))

    chooses, tested = set_apart((scale(held_out.x), held_out.y), selection, draw.phase("selection"))
    best = torch.zeros(clients, dtype=torch.float64)
    best[: len(clean)] = torch.tensor(_class_shares(clean), dtype=torch.float64)
    return weighting(
        thinned(shards, skew, draw.phase("skew")),
        (scale(train.x[valid]), train.y[valid]),
        FlatModel(build(model or usual_model, source.shape, source.classes, context.seed)),
        "cross_entropy",
        test=tested,
        selection=chooses,
        friends=len(clean),
        **context.tensor_options,
        best_weights=best,
    )


def _check_lists(clean: list[list[int]], clients: int, classes: int) -> None:
    if clients < len(clean):
        raise UsageError(
            f"problem.classes has lists for {len(clean)} clean clients, but there are {clients} clients; raise "
            "problem.clients."
        )
    if (worst := max(c for members in clean for c in members)) >= classes:
        raise UsageError(f"problem.classes names class {worst}, but the data has classes 0 … {classes - 1} only.")
    for k, members in enumerate(clean):
        if len(set(members)) < len(members):
            raise UsageError(f"problem.classes names a class twice for client {k}; name it once.")


def _dealt(labels: Tensor, clean: list[list[int]], k: int) -> Tensor:
    """Which rows client k gets: those of its classes, every so-manieth where several clients list one."""
    mine = torch.zeros(len(labels), dtype=torch.bool)
    for c in clean[k]:
        holders = [j for j, members in enumerate(clean) if c in members]
        rows = (labels == c).nonzero()[:, 0]
        mine[rows[holders.index(k) :: len(holders)]] = True
    return mine


def _class_shares(clean: list[list[int]]) -> list[float]:
    """The share of all listed classes that each client holds."""
    holders = Counter(c for members in clean for c in members)
    return [sum(1 / holders[c] for c in members) / len(holders) for members in clean]


def _first(order: Tensor, labels: Tensor, c: int, count: int) -> Tensor:
    """The first rows of a class; the clients must keep some."""
    rows = order[labels[order] == c]
    if len(rows) <= count:
        raise UsageError(
            f"class {c} has {len(rows)} training rows; problem.per_class = {count} leaves the clients none. Lower it."
        )
    return rows[:count]
