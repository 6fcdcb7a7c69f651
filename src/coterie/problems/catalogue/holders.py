"""Clients that are real holders of data: each has training and test rows of its own, and may be a target."""

from collections.abc import Sequence
from typing import Any

import torch

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.data.examples import Holder
from coterie.problems.data.partition import split
from coterie.problems.models import FlatModel
from coterie.problems.weighting import Weighting, weighting


def of_holders(
    context: Context,
    holders: Sequence[Holder],
    model: FlatModel,
    *,
    target: int,
    validation: float,
    draw: Draw,
    **more: Any,
) -> Weighting:
    """The weighting problem of these holders; every one has a test set, and validation rows where a share is set aside.

    Args:
        context: seed, numbers and device.
        holders: names, training and test rows.
        model: the model.
        target: the number of the holder whose model is wanted.
        validation: the share of every holder's training rows that is set aside for validation; without any there is no
            target.
        draw: the randomness.
        more: further fields of the problem; names, if not those of the holders.
    """
    if target >= len(holders):
        raise UsageError(f"problem.target is {target}, but there are holders 0 … {len(holders) - 1} only.")
    train, valid = [], []
    for k, (_, mine, _) in enumerate(holders):
        learn = torch.arange(len(mine.y))
        if validation > 0.0:
            held_out, learn = split(learn, validation, draw.phase("validation").client(k))
            valid.append((mine.x[held_out], mine.y[held_out]))
        train.append((mine.x[learn], mine.y[learn]))
    return weighting(
        train,
        valid[target] if valid else None,
        model,
        "cross_entropy",
        test=tuple(holders[target].test),
        tests=[tuple(holder.test) for holder in holders],
        **context.tensor_options,
        valid=valid or None,
        **{"names": tuple(holder.name for holder in holders), **more},
    )
