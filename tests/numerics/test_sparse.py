"""Which entries are largest: against a stable sort, with ties, under vmap and where numbers are not finite."""

import doctest

import pytest
import torch
from torch import Tensor

from coterie.numerics import sparse
from coterie.numerics.sparse import largest


def test_examples() -> None:
    assert doctest.testmod(sparse) == (0, 1)


def by_sorting(scores: Tensor, k: int) -> Tensor:
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)


@pytest.mark.parametrize("k", [1, 2, 17, 99, 100])
@pytest.mark.parametrize("values", [2, 5, 10**6])
def test_the_largest_are_those_of_a_stable_sort(k: int, values: int) -> None:
    scores = torch.randint(values, (6, 100), generator=torch.Generator().manual_seed(k)).float()
    scores[1, ::3] = torch.inf
    scores[2] = 0.0
    scores[3, ::2] = -1.0
    expected = by_sorting(scores, k)
    assert torch.equal(largest(scores, k), expected)
    assert torch.equal(torch.func.vmap(lambda row: largest(row, k))(scores), expected)
    assert torch.equal(torch.stack([largest(row, k) for row in scores]), expected)


def test_numbers_that_are_not_finite_do_not_change_how_many_are_kept() -> None:
    scores = torch.tensor([torch.nan, 1.0, torch.inf, torch.nan, 2.0])
    assert [int(largest(scores, k).sum()) for k in range(1, 6)] == [1, 2, 3, 4, 5]
    assert largest(scores, 3).tolist() == [True, False, True, True, False]
    assert largest(scores, 4).tolist() == [True, False, True, True, True]
