"""Losses whose derivatives are written by hand: their examples, and the derivatives against autograd."""

import doctest

import pytest
import torch
from torch import Tensor

from coterie.problems.tasks import entropy
from coterie.problems.tasks.entropy import MaskedEntropy, RowLoss, cross_entropy, slope_of

PRESENT = torch.tensor([True, True, False, True])


def test_examples() -> None:
    assert doctest.testmod(entropy) == (0, 5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", [cross_entropy, MaskedEntropy(), MaskedEntropy(PRESENT), MaskedEntropy(PRESENT, 0.0)])
def test_the_slope_is_the_derivative_of_the_mean(loss: RowLoss, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    outputs = torch.randn(6, 4, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.tensor([0, 1, 3, 1, 0, 0])
    weight: Tensor | None = torch.rand(6, dtype=torch.float64, generator=generator) if weighted else None
    rows = loss(outputs, labels)
    mean = rows.mean() if weight is None else (weight * rows).sum() / weight.sum()
    slope = slope_of(loss)
    assert slope is not None
    (expected,) = torch.autograd.grad(mean, outputs)
    torch.testing.assert_close(slope(outputs.detach(), labels, weight), expected, rtol=1e-12, atol=1e-14)
