"""Sums over clients whose bits do not depend on how the clients were chunked."""

import torch
from torch import Tensor

from coterie.numerics.memory import LARGE, empty_like

BLOCK = 32


class BlockedSum:
    """Σ w_k r_k over rows that arrive in id order, added in fixed blocks of rows whatever the chunks were."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._waiting: list[Tensor] = []
        self._count = 0
        self._in_turn = False

    def add(self, values: Tensor, weights: Tensor | None) -> None:
        """Take in more rows."""
        if values.is_floating_point() and values[0].numel() >= LARGE:
            self._add_in_turn(values, weights)
            return
        if weights is not None:
            weights = weights.to(values) if values.is_floating_point() else weights  # 0.3 of a count is not 0
            values = values * weights.reshape(-1, *(1,) * (values.dim() - 1))
        self._waiting.append(values.contiguous())  # another layout would be summed in another order
        self._count += len(values)
        if self._count >= BLOCK:
            self._flush()

    def _add_in_turn(self, values: Tensor, weights: Tensor | None) -> None:
        """Large rows are added one by one, in place: a block of them would be written and read several times over."""
        self._in_turn = True
        for row, w in zip(values, [1.0] * len(values) if weights is None else weights.tolist(), strict=True):
            if self._total is None:
                self._total = empty_like(row).zero_()
            self._total.add_(row, alpha=w)

    def _flush(self) -> None:
        values = self._waiting[0] if len(self._waiting) == 1 else torch.cat(self._waiting)
        whole = len(values) - len(values) % BLOCK
        for start in range(0, whole, BLOCK):
            self._accumulate(values[start : start + BLOCK])
        self._waiting = [values[whole:]] if whole < len(values) else []
        self._count = len(values) - whole

    def _accumulate(self, block: Tensor) -> None:
        part = block.sum(0)
        self._total = part if self._total is None else self._total + part

    def total(self) -> Tensor:
        """The sum of all rows taken in."""
        if self._waiting:
            self._accumulate(torch.cat(self._waiting))
            self._waiting, self._count = [], 0
        if self._total is None:
            raise ValueError("nothing was added")
        return self._total

    def mean(self, by: float | Tensor) -> Tensor:
        """The sum divided by a number. It ends the sum, whose memory is used again where it is large.

        Args:
            by: a number, such as the sum of weights.
        """
        total = self.total()
        return total.div_(by) if self._in_turn else total / by
