"""Repeated cross-fitting: which of the target's rows each model sees.

In every random order of the rows, F folds lie one after the other. For each order there are models without one fold,
which judge on it, and models without two: those without f and g choose among strategies for fold f by their errors on
fold g, and the other way round. One model sees all rows.
"""

from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor


class Splits(NamedTuple):
    """Folds [R, n] of the rows in R orders, and the rows that models see, [masks, n]."""

    folds: Tensor
    masks: Tensor
    F: int

    @staticmethod
    def of(orders: list[Tensor], n: int, F: int, dtype: torch.dtype) -> "Splits":
        """Folds of the first n rows of the first order, which number the rows for all orders."""
        rows = orders[0][:n]
        folds = torch.empty(len(orders), n, dtype=torch.int64)
        for r, order in enumerate(orders):
            place = torch.empty_like(order)
            place[order] = torch.arange(len(order))
            folds[r] = place[rows] * F // len(order)
        seen = []
        for row in folds:
            seen += [row != f for f in range(F)]
            seen += [(row != f) & (row != g) for f, g in combinations(range(F), 2)]
        seen.append(torch.ones(n, dtype=torch.bool))
        return Splits(folds, torch.stack(seen).to(dtype), F)

    @property
    def repeats(self) -> int:
        """How many orders there are."""
        return len(self.folds)

    @property
    def per_order(self) -> int:
        """Masks of one order: F without one fold, F(F − 1)/2 without two."""
        return self.F + self.F * (self.F - 1) // 2

    def without(self, r: int, f: int, g: int | None = None) -> int:
        """The number of the mask that leaves out fold f of order r, and fold g if it is given."""
        if g is None or g == f:
            return r * self.per_order + f
        pairs = list(combinations(range(self.F), 2))
        return r * self.per_order + self.F + pairs.index((min(f, g), max(f, g)))

    @property
    def whole(self) -> int:
        """The number of the mask of all rows."""
        return len(self.masks) - 1

    @property
    def outer(self) -> Tensor:
        """The masks without one fold, [R · F]."""
        return torch.tensor([self.without(r, f) for r in range(self.repeats) for f in range(self.F)])
