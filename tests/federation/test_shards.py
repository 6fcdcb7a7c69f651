"""Shards are laid out one after the other; what cannot be used is refused with its place and the remedy."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from coterie.errors import UsageError
from coterie.federation import Rows, pack


def columns(n: int, width: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(n * width, dtype=torch.float32).reshape(n, width), torch.arange(n)


class Items(Dataset):
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.mark.parametrize("sizes", [(4, 4, 4), (2, 5, 1), (3,)])
def test_every_client_gets_its_rows_back(sizes):
    shards = [tuple(c + 100 * k for c in columns(n)) for k, n in enumerate(sizes)]
    stack = pack(shards)
    assert (len(stack), stack.capacity, stack.ragged) == (len(sizes), max(sizes), len(set(sizes)) > 1)
    for k, shard in enumerate(shards):
        rows = stack.client(k)
        assert rows.capacity == rows.count == sizes[k]
        assert all(torch.equal(a, b) for a, b in zip(rows.all().columns, shard, strict=True))
        assert rows.all().weight is None
        assert rows.all().inputs.data_ptr() == stack.columns[0][stack.offsets[k]].data_ptr()


def test_later_changes_of_the_given_arrays_change_nothing():
    x = np.ones((2, 3), dtype=np.float32)
    stack = pack([(x,)])
    x[:] = 7.0
    assert stack.columns[0].unique().item() == 1.0


def seen_under_vmap(sizes: tuple[int, ...], client: int) -> Rows:
    """One client's rows as works see them where all clients run at once."""
    stack = pack([columns(n) for n in sizes])
    return Rows(stack.columns, stack.offsets[client], stack.counts[client], stack.capacity, stack.ragged)


def test_padding_has_weight_zero_and_repeats_the_last_row():
    batch = seen_under_vmap((5, 2), 1).all()
    assert batch.weight.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert batch.labels.tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("client", [0, 1, 2])
def test_blocks_hold_every_row_once(size, client):
    sizes = (7, 4, 1)
    blocks = list(seen_under_vmap(sizes, client).blocks(size))
    assert all(len(block.inputs) <= size for block in blocks)
    labels, weights = torch.cat([b.labels for b in blocks]), torch.cat([b.weight for b in blocks])
    assert labels[weights == 1.0].tolist() == list(range(sizes[client]))
    alone = list(pack([columns(n) for n in sizes]).client(client).blocks(size))
    assert torch.cat([b.labels for b in alone]).tolist() == list(range(sizes[client]))


def test_rows_are_taken_by_their_number():
    rows = seen_under_vmap((3, 4), 1)
    assert rows.take(torch.tensor([3, 0, 3])).labels.tolist() == [3, 0, 3]


@pytest.mark.parametrize("form", ["tensors", "arrays", "lists", "dataset", "items"])
def test_forms_of_a_shard(form):
    x, y = columns(4)
    shard = {
        "tensors": (x, y),
        "arrays": (x.numpy(), y.numpy()),
        "lists": [x.tolist(), y.tolist()],
        "dataset": TensorDataset(x, y),
        "items": Items(*[(row.numpy(), int(label)) for row, label in zip(x, y, strict=True)]),
    }[form]
    stack = pack([shard, shard])
    assert torch.equal(stack.columns[0], torch.cat([x, x]))
    assert torch.equal(stack.columns[1], torch.cat([y, y]))


def test_a_single_column_needs_no_tuple():
    x, _ = columns(4)
    for shard in (x, x.numpy(), Items(*x)):
        assert torch.equal(pack([shard]).columns[0], x)


def test_read_only_arrays_are_taken_without_a_warning():
    x = np.ones((2, 3))
    x.flags.writeable = False
    assert pack([x]).columns[0].dtype == torch.float64


def test_only_real_numbers_change_their_type():
    stack = pack([columns(4)]).to(dtype=torch.float64, device="cpu")
    assert [c.dtype for c in stack.columns] == [torch.float64, torch.int64]


X, Y = columns(4)
BROKEN = X.clone()
BROKEN[2, 1] = torch.nan
REFUSED = {
    "no shard at all": ([], "there is no client; at least one shard"),
    "no rows": ([(X, Y), (X[:0], Y[:0])], "client 1 is empty; leave it out"),
    "no columns": ([()], "client 0 is empty"),
    "empty dataset": ([TensorDataset(X, Y), TensorDataset(X[:0], Y[:0])], "client 1 is empty"),
    "NaN": ([(X, Y), (X, Y), (X, BROKEN)], r"column 1 of client 2 holds NaN or infinity \(first in row 2\)"),
    "infinity": ([(X[:, 0] / 0.0, Y)], r"column 0 of client 0 holds NaN or infinity \(first in row 0\)"),
    "columns of different lengths": ([(X, Y), (X, Y[:3])], r"client 1 has columns of different lengths \[3, 4\]"),
    "different numbers of columns": ([(X, Y), (X,)], "client 1 has 1 columns, client 0 has 2"),
    "different shapes": ([(X, Y), (X[:, :2], Y)], r"column 0 of client 1 has rows of shape \(2,\).*client 0 \(3,\)"),
    "different types": ([(X, Y), (X, Y.int())], "column 1 of client 1 .* torch.int32.* torch.int64"),
    "words": ([(["a", "b"], Y[:2])], "client 0 holds a list that is no numeric array"),
    "uneven lists": ([([[1.0, 2.0], [3.0]], Y[:2])], "client 0 holds a list that is no numeric array"),
    "a number": ([(X, 3.0)], "client 0 holds a single number where an array of rows"),
    "uneven items": ([Items((X[0], 0), (X[0, :2], 1))], "the items of client 0 are not equally shaped numbers"),
    "items of uneven length": ([Items((X[0], 0), (X[1],))], "the items of client 0 are not equally shaped numbers"),
    "words in a dataset": ([Items(("a", 0), ("b", 1))], "the items of client 0 are not equally shaped numbers"),
}


@pytest.mark.parametrize(("shards", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_used_is_refused(shards, message):
    with pytest.raises(UsageError, match=message):
        pack(shards)


def test_the_holder_is_named():
    with pytest.raises(UsageError, match="target 0 is empty"):
        pack([(X[:0], Y[:0])], who="target")


def test_rows_of_the_same_sample_are_gathered_when_they_are_asked_for_again():
    stack = pack([(torch.randn(4, 3), torch.randn(4)) for _ in range(5)])
    some = torch.tensor([3, 0, 4])
    assert stack.views(some) == ()
    wholes = stack.views(some)
    for column, whole in zip(stack.columns, wholes, strict=True):
        assert torch.equal(whole, torch.stack([column[4 * k : 4 * k + 4] for k in some.tolist()]))
    assert stack.views(some)[0] is wholes[0]
    assert stack.views(torch.tensor([1, 3])) == ()
    assert stack.views(some) == ()  # only the last sample is kept
    assert stack.shared_by(torch.tensor([1, 0, 2, 3, 4]))._gathered is not stack._gathered
