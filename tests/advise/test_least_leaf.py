"""Leaves of a partner's trees hold at least 20 of its rows, whatever is asked for."""

import numpy as np
import pytest
import torch

from coterie.ensemble.goal import Goal
from coterie.ensemble.message import Message, message, received
from coterie.ensemble.models import LEAST_LEAF
from coterie.federation import Federation, LocalEngine, Stack
from coterie.numerics import Draw


def asked(leaf: int) -> Message:
    """The message of a partner with 90 rows, asked for leaves of so many."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(90, 3)))
    count = torch.tensor([90])
    rows = Stack((x, (x.sum(1) > 0).long()), torch.zeros_like(count), count)
    fed = Federation.on(LocalEngine(None, rows, None, None, "sequential"))
    edges = torch.zeros(0, dtype=torch.float64)
    replies = fed.gather(message, edges, draw=Draw.of(0), classes=2, leaf=leaf)
    return received(tuple(part[0] for part in replies.rows), Goal(2), 3)


@pytest.mark.parametrize(("leaf", "least"), [(1, LEAST_LEAF), (LEAST_LEAF, LEAST_LEAF), (30, 30)])
def test_smaller_leaves_than_20_rows_are_not_sent(leaf: int, least: int) -> None:
    leaves = (asked(leaf).trees.value != 0).sum(1).max()
    assert 1 < leaves <= 90 // least
