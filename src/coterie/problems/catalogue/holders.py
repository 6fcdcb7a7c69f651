"""Clients that are real holders of data: each has training and test rows of its own, and may be a target."""

from typing import Any

import torch

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.data.examples import Examples
from coterie.problems.data.partition import split
from coterie.problems.models import FlatModel
from coterie.problems.weighting import Weighting, weighting


def of_holders(
    context: Context,
    parts: list[tuple[Examples, Examples]],
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
        parts: training and test rows by holder.
        model: the model.
        target: the number of the holder whose model is wanted.
        validation: the share of every holder's training rows that is set aside for validation; without any there is no
            target.
        draw: the randomness.
        more: further fields of the problem.
    """
    if target >= len(parts):
        raise UsageError(f"problem.target is {target}, but there are holders 0 … {len(parts) - 1} only.")
    train, valid = [], []
    for k, (mine, _) in enumerate(parts):
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
        test=tuple(parts[target][1]),
        tests=[tuple(test) for _, test in parts],
        **context.place,
        valid=valid or None,
        **more,
    )
