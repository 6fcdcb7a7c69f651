"""Cross-entropy by row, and its derivatives by the outputs for networks that are differentiated by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

RowLoss = Callable[[Tensor, Tensor], Tensor]
Slope = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From outputs, labels and weights of the rows to the derivative of the mean loss by the outputs."""


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """By row; written out, which takes fewer operations under nested derivatives than torch's own."""
    return outputs.logsumexp(1) - outputs.gather(1, labels.long()[:, None])[:, 0]


def cross_entropy_slope(outputs: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    """The derivative of the mean cross-entropy by the outputs, […, n, o], with the bits of autograd's."""
    share = _shares(outputs, weight)
    p = share * (outputs - outputs.logsumexp(-1, keepdim=True)).exp()
    return p.scatter_add(-1, labels.long()[..., None], -share)


Columns = tuple[Tensor, Tensor | None, int, torch.dtype]
"""Labels […, n], weights of the rows or None, the number o of classes, and the type of outputs […, o, n]."""


def cross_entropy_columns(*rows: *Columns) -> Callable[[Tensor], Tensor]:
    """The same derivative as a function of outputs with rows innermost, […, o, n]; see `Columns`."""
    share, truth = _parts_of_truth(*rows)
    return lambda outputs: outputs.softmax(-2).mul_(share).sub_(truth)


def cross_entropy_column_slopes(*rows: *Columns) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """That derivative, and how it moves where the outputs z move by dz."""
    share, truth = _parts_of_truth(*rows)

    def slopes(z: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
        p = z.softmax(-2)
        return share * p - truth, share * p * (dz - (p * dz).sum(-2, keepdim=True))

    return slopes


def _parts_of_truth(labels: Tensor, weight: Tensor | None, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row's part in the mean, […, 1, n], and the same at the row's class, […, o, n]."""
    truth = labels.new_zeros(*labels.shape[:-1], classes, labels.shape[-1], dtype=dtype)
    share = _shares(truth.mT, weight).mT
    return share, truth.scatter_(-2, labels.long()[..., None, :], share)


def cross_entropy_slopes(z: Tensor, dz: Tensor, labels: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same derivative, and how it moves where the outputs move by dz."""
    p = z.softmax(-1)
    return cross_entropy_slope(z, labels, weight), _shares(z, weight) * p * (dz - (p * dz).sum(-1, keepdim=True))


def _shares(outputs: Tensor, weight: Tensor | None) -> Tensor:
    """Each row's part in the mean, […, n, 1]."""
    if weight is None:
        return outputs.new_ones(()).div(outputs.shape[-2]).expand(*outputs.shape[:-1], 1)
    return (weight * weight.sum(-1, keepdim=True).reciprocal())[..., None].expand(*outputs.shape[:-1], 1)


@dataclass(frozen=True, eq=False)
class MaskedEntropy:
    """Cross-entropy among some of the classes, so that a client does not unlearn those that it lacks.

    Args:
        present: which classes are meant, [o] bool; those of the batch at hand if None.
        instead: the output of every other class.

    Example:
        >>> outputs, labels = torch.tensor([[2.0, 2.0, 5.0]]), torch.tensor([0])
        >>> loss = MaskedEntropy(present=torch.tensor([True, True, False]))
        >>> loss(outputs, labels)  # log 2: the third class, the most likely one, does not count
        tensor([0.6931])
        >>> loss.slope(outputs, labels, None)
        tensor([[-0.5000,  0.5000,  0.0000]])
    """

    present: Tensor | None = None
    instead: float = -inf

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """By row."""
        return cross_entropy(outputs.masked_fill(self._absent(outputs, labels), self.instead), labels)

    def slope(self, outputs: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
        """The derivative of the mean by the outputs."""
        absent = self._absent(outputs, labels)
        return cross_entropy_slope(outputs.masked_fill(absent, self.instead), labels, weight).masked_fill(absent, 0.0)

    def _absent(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if self.present is not None:
            return ~self.present
        return torch.zeros_like(outputs[0]).scatter(0, labels.long(), 1.0) == 0


def slope_of(loss: RowLoss) -> Slope | None:
    """The derivative of a loss that is known by hand, and None of another.

    Args:
        loss: by row.

    Example:
        >>> slope_of(cross_entropy) is cross_entropy_slope, slope_of(MaskedEntropy()) is None, slope_of(max)
        (True, False, None)
    """
    if loss is cross_entropy:
        return cross_entropy_slope
    return loss.slope if isinstance(loss, MaskedEntropy) else None
