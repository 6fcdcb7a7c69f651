"""What a fixed module makes of a client's rows, computed once for many batches.

Local steps on a head see their batches through a backbone x that does not move. Batches of τ steps have τ b rows, and
a client has n: where n is far less, all rows pass through x once, and batches are looked up in what comes out. Values
are those of the batches up to rounding; portable processes keep to the batches, and so their bits.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.federation import Rows
from coterie.federation.mapped import is_mapped
from coterie.federation.points import counted
from coterie.machine import wanted
from coterie.numerics.control import differentiated
from coterie.numerics.tracing import recording
from coterie.problems.models.probing import current_probe
from coterie.problems.tasks.variables import Flat

LESS = 2  # times: the rows of the batches, compared with all rows


class Seen(Flat):
    """A module whose outputs stand in the rows already: it hands on what it is given.

    Args:
        of: the module as a variable.
    """

    def __init__(self, of: Flat) -> None:
        self.__dict__.update(of.__dict__)

    def fixed(self, theta: Tensor, inputs: Tensor, keys: Tensor | None = None) -> Any:
        """Called on a batch's inputs, it returns them."""
        return _same


def _same(inputs: Tensor) -> Tensor:
    return inputs


def seen_rows(x: Flat, theta: Tensor, rows: Rows, taken: int) -> Rows | None:
    """The rows as they come out of x at θ; None where that would not pay, or would not be the same.

    Args:
        x: the module.
        theta: its parameters.
        rows: a client's rows.
        taken: how many rows batches will have together.
    """
    (model,) = x.models if len(x.models) == 1 and len(x.start) == x.models[0].size else (None,)
    pays = taken >= LESS * rows.capacity and len(rows.columns) == 2
    if model is None or not pays or model.mixes_rows or rows.key is not None or is_mapped(rows.columns):
        return None
    if wanted() or recording() or current_probe() is not None or differentiated(theta, *rows.columns):
        return None
    with counted():  # batches count their rows when they are taken
        inputs, labels = rows.all().columns
    columns = (model(theta, inputs).detach(), labels)
    return replace(rows, columns=columns, offset=torch.zeros_like(rows.offset), whole=())


__all__ = ["Seen", "seen_rows"]
