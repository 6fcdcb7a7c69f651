"""Partitions: everybody gets equally many rows, nobody the same, and shards hold two classes."""

from collections.abc import Callable

import pytest
import torch

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems import Context, Weighting
from coterie.problems.catalogue.mixture import mixture
from coterie.problems.catalogue.noisy_clients import noisy_clients
from coterie.problems.data.partition import dirichlet, long_tail, long_tail_counts, partition, split

LABELS = torch.arange(1000) % 10


@pytest.mark.parametrize("name", ["iid", "shards"])
def test_rows_are_dealt_once_and_evenly(name: str) -> None:
    parts = partition(name, LABELS, 20, 2, Draw.of(0))
    assert {len(part) for part in parts} == {50}
    assert len(torch.cat(parts).unique()) == 1000
    again = partition(name, LABELS, 20, 2, Draw.of(0))
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(parts, partition(name, LABELS, 20, 2, Draw.of(1)), strict=True))


def test_shards_hold_two_classes_and_iid_all() -> None:
    shards = [len(LABELS[part].unique()) for part in partition("shards", LABELS, 20, 2, Draw.of(0))]
    assert max(shards) <= 2
    assert sum(shards) > 30  # few clients draw two shards of one class
    iid = [len(LABELS[part].unique()) for part in partition("iid", LABELS, 20, 2, Draw.of(0))]
    assert min(iid) >= 8
    three = [len(LABELS[part].unique()) for part in partition("shards", LABELS, 20, 3, Draw.of(0))]
    assert max(three) in (3, 4)


def test_long_tails_and_splits() -> None:
    assert long_tail_counts(10, 6000, 60)[:3] == [6000, 3597, 2156]  # the paper's figures
    assert long_tail_counts(10, 6000, 60)[-1] == 60
    rows = long_tail(LABELS, 100, 10, Draw.of(0))
    assert torch.bincount(LABELS[rows]).tolist() == long_tail_counts(10, 100, 10)
    a, b = split(torch.arange(10) + 7, 0.8, Draw.of(0))
    assert (len(a), len(b)) == (8, 2)
    assert sorted(torch.cat([a, b]).tolist()) == list(range(7, 17))


def test_too_many_clients_are_refused() -> None:
    with pytest.raises(UsageError, match=r"lower problem\.clients"):
        partition("shards", LABELS, 600, 2, Draw.of(0))
    with pytest.raises(UsageError, match="did you mean shards"):
        partition("shard", LABELS, 6, 2, Draw.of(0))
    with pytest.raises(UsageError, match="cannot be split"):
        split(torch.arange(1), 0.5, Draw.of(0))


def pairs(name: str) -> list[tuple[int, ...]]:
    """The classes of each of 100 clients, two each."""
    return [tuple(LABELS[part].unique().tolist()) for part in partition(name, LABELS, 100, 2, Draw.of(0))]


def test_classes_are_dealt_at_random_and_evenly() -> None:
    dealt = pairs("classes")
    assert {len(pair) for pair in dealt} == {2}
    assert len(set(dealt)) > 35  # of the 45 pairs that there are
    assert sorted(c for pair in dealt for c in pair) == sorted(20 * list(range(10)))
    assert len(set(pairs("ring"))) == 10
    uneven = partition("classes", LABELS, 7, 3, Draw.of(0))
    holders = torch.bincount(torch.tensor([c for part in uneven for c in LABELS[part].unique().tolist()]))
    assert {len(LABELS[part].unique()) for part in uneven} == {3}
    assert int(holders.max()) - int(holders.min()) <= 1
    assert len(torch.cat(uneven)) == len(torch.cat(uneven).unique())


@pytest.mark.parametrize("made", [noisy_clients, mixture], ids=["noisy-clients", "mixture"])
def test_selection_rows_are_set_apart_from_the_test(made: Callable[..., Weighting]) -> None:
    plain, problem = made(Context(0)), made(Context(0), selection=10)
    assert plain.test is not None
    assert problem.test is not None
    assert problem.selection is not None
    both = torch.cat([problem.selection.all().columns[0], problem.test.all().columns[0]])
    assert len(problem.selection.all().columns[-1]) == 10
    assert sorted(row.sum().item() for row in both) == sorted(row.sum().item() for row in plain.test.all().columns[0])
    with pytest.raises(UsageError, match="leaves none to test on"):
        made(Context(0), selection=10_000)


def test_a_client_with_just_an_even_share_gets_no_more_where_shares_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = torch.tensor([[1.0, 0.0], [0.9, 0.1]], dtype=torch.float64)
    monkeypatch.setattr("coterie.problems.data.partition._proportions", lambda *_: shares)
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    first, second = dirichlet(labels, 2, 0.5, Draw.of(0), capped=True)
    assert labels[first].tolist() == [0] * 4
    assert labels[second].tolist() == [1] * 4
    first, second = dirichlet(labels, 2, 0.5, Draw.of(0))
    assert len(first) == 6  # 4 and 3.6: what is left goes by the remainders, and nobody has fewer than two
    assert len(second) == 2


@pytest.mark.parametrize("name", ["dirichlet", "quantity"])
def test_nobody_has_fewer_than_two_rows(name: str) -> None:
    for seed in range(5):
        parts = partition(name, LABELS[:60], 20, 2, Draw.of(seed), alpha=0.05)
        assert min(map(len, parts)) == 2
        assert sorted(torch.cat(parts).tolist()) == list(range(60))
