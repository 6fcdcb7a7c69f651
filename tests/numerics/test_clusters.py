"""Clusters of a matrix of weights: blocks are found, nothing is found where there is nothing, order does not matter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.numerics import Draw, clusters


def blocks(sizes: list[int], inside: float = 1.0, own: float | None = None) -> torch.Tensor:
    """Rows that put a share inside their block, equally (but for what they keep), and the rest outside, equally."""
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    same = (group[:, None] == group).double()
    outside = (1 - same).sum(1, keepdim=True).clamp(min=1)
    w = inside * same / same.sum(1, keepdim=True) + (1 - inside) * (1 - same) / outside
    if own is not None:
        w = own * torch.eye(len(w), dtype=w.dtype) + (1 - own) * w
    return w


def members(sizes: list[int]) -> list[list[int]]:
    parts = torch.arange(sum(sizes)).split(sizes)
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("sizes", [[5, 10], [2, 3, 4], [1, 6], [30, 3, 67]])
@pytest.mark.parametrize("inside", [1.0, 0.9])
@pytest.mark.parametrize("own", [None, 0.3])
def test_blocks_are_found(sizes: list[int], inside: float, own: float | None) -> None:
    assert clusters(blocks(sizes, inside, own)) == members(sizes)


def test_equal_weights_make_one_cluster_and_everyone_alone_none() -> None:
    assert clusters(torch.full((7, 7), 1 / 7)) == [list(range(7))]
    assert clusters(torch.eye(7)) == [[k] for k in range(7)]
    assert clusters(0.99 * torch.eye(7) + 0.01 / 7) == [[k] for k in range(7)]
    assert clusters(torch.ones(1, 1)) == [[0]]


def test_noise_around_equal_weights_makes_no_clusters() -> None:
    for seed in range(5):
        w = 1 + 0.5 * Draw.of(seed).uniform(20, 20)
        assert clusters(w / w.sum(1, keepdim=True)) == [list(range(20))]


def test_rows_may_be_sparse() -> None:
    """Each of a group trusts three of the others only."""
    w = torch.zeros(12, 12)
    for first in (0, 6):
        for i in range(6):
            w[first + i, [first + (i + 1) % 6, first + (i + 2) % 6, first + (i + 3) % 6]] = 1 / 3
    assert clusters(w) == [list(range(6)), list(range(6, 12))]


@given(st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_order_of_clients_does_not_matter(seed: int) -> None:
    draw = Draw.of(seed)
    w = blocks([4, 5, 3], 0.95) * (0.5 + draw.uniform(12, 12, dtype=torch.float64))
    w = w / w.sum(1, keepdim=True)
    order = draw.phase("order").permutation(12)
    renamed = [sorted(order[cluster].tolist()) for cluster in clusters(w[order][:, order])]
    assert sorted(renamed) == clusters(w)
