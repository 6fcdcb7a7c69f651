"""What several methods do with the clients' models: judge some at a client, and make weights of merits."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from coterie.federation import Shard
from coterie.methods.shared.works import goal_rows

Part = Annotated[float, Field(ge=0.0, le=1.0)]
"""A share of a whole, which may be nothing or all of it."""

NEEDS = frozenset({"gradient", "everyone"})
"""Of a problem whose clients all want a model of their own."""


def validation_losses(shard: Shard, models: Tensor) -> Tensor:
    """The loss of each of these models [m, d] on the holder's validation rows, [m]."""
    rows = goal_rows(shard)
    return torch.stack([shard.task.full_loss(x, rows) for x in models])


def on_simplex(merits: Tensor, otherwise: Tensor) -> Tensor:
    """Positive merits in proportion, as weights that sum to 1 along the last dimension.

    Args:
        merits: any numbers, [..., n].
        otherwise: the weights where no merit is positive, [..., n].

    Example:
        >>> on_simplex(torch.tensor([3.0, -1.0, 1.0]), torch.eye(3)[0])
        tensor([0.7500, 0.0000, 0.2500])
    """
    positive = merits.clamp(min=0.0)
    total = positive.sum(-1, keepdim=True)
    return torch.where(total > 0.0, positive / torch.where(total > 0.0, total, 1.0), otherwise)


def shares(sizes: Tensor, like: Tensor) -> Tensor:
    """Numbers of rows as shares of their sum.

    Args:
        sizes: rows by client.
        like: a tensor with the type of the result.
    """
    return sizes.to(like) / sizes.to(like).sum()
