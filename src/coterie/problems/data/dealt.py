"""Images dealt to clients, each client's in a train and a validation part: the data of the nested image problems."""

from collections.abc import Callable
from math import prod
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.data.examples import Examples as Images
from coterie.problems.data.load import load
from coterie.problems.data.partition import partition, set_apart, split

Data = Literal["digits", "mnist", "fashion-mnist"]
Partition = Literal["iid", "shards", "dirichlet", "quantity"]


class Dealt(NamedTuple):
    """A train and a validation shard a client, and a common test set. Pixels are standardised by the train images."""

    train: list[tuple[Tensor, Tensor]]
    valid: list[tuple[Tensor, Tensor]]
    test: Images


def source(data: str, test: int, draw: Draw) -> tuple[Images, Images]:
    """Train and test images in [0, 1]: the published parts, or so many rows set aside where there is one part only."""
    found = load(data)
    scale, (train, tested) = found.scale(), found.parts(test, draw)
    return Images(scale(train.x), train.y), Images(scale(tested.x), tested.y)


class Split(NamedTuple):
    """How images are dealt: the partition, its classes per client, its α."""

    partition: str
    classes: int
    alpha: float


def deal(images: Images, test: Images, clients: int, split_by: Split, share: float, draw: Draw) -> Dealt:
    """Deal images by the partition; `share` of a client's rows are for training."""
    mean, std = images.x.mean(), images.x.std()
    x = (images.x - mean) / std
    train, valid = [], []
    name, classes, alpha = split_by
    for k, rows in enumerate(partition(name, images.y, clients, classes, draw.phase("partition"), alpha)):
        mine, held_out = split(rows, share, draw.phase("split").client(k))
        train.append((x[mine], images.y[mine]))
        valid.append((x[held_out], images.y[held_out]))
    return Dealt(train, valid, Images((test.x - mean) / std, test.y))


def dense(widths: list[int], shape: tuple[int, ...], seed: int) -> nn.Sequential:
    """A perceptron with ReLU between its layers, its start fixed by the seed; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = [prod(shape), *widths]
        layers: list[nn.Module] = [nn.Flatten()]
        for i in range(len(widths)):
            layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def measured(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """`test_accuracy`, `balanced_accuracy` (the mean over classes of the share recognised) and `test_loss`."""
    right = (outputs.argmax(1) == labels).cpu().double()
    by_class = [right[labels.cpu() == c].mean() for c in sorted(set(labels.tolist()))]
    return {
        "test_accuracy": float(right.mean()),
        "balanced_accuracy": float(torch.stack(by_class).mean()),
        "test_loss": float(F.cross_entropy(outputs, labels)),
    }


def chosen_by(test: Images, count: int, draw: Draw) -> tuple[Callable[..., dict[str, float]], Images]:
    """`selection_accuracy` (mean over classes) and `selection_loss` of a network, on test rows set apart; the others.

    Args:
        test: all test rows.
        count: how many are set apart for choosing among settings; with 0 nothing is measured.
        draw: which ones.
    """
    rows, tested = set_apart((test.x, test.y), count, draw.phase("selection"))
    if rows is None:
        return lambda net, context: {}, test

    def measures(net: Callable[[Tensor], Tensor], context: Context) -> dict[str, float]:
        x, y = rows[0].to(context.device, context.dtype), rows[1].to(context.device)
        found = measured(net(x), y)
        return {"selection_accuracy": found["balanced_accuracy"], "selection_loss": found["test_loss"]}

    return measures, Images(*tested)


def draws(context: Context, name: str) -> Draw:
    """The randomness of a problem."""
    return Draw.of(context.seed).phase(name)
