"""Memoised functions: the same values, computed once."""

import pytest
import torch
from torch.func import grad, vmap

from coterie.numerics.memo import ENTRIES, Memoised


class Counted:
    """x ↦ a x, and how often it was computed."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return a * x


def test_equal_tensors_are_answered_from_memory():
    plain = Counted()
    memoised = Memoised(plain)
    a, x = torch.tensor(2.0), torch.arange(3.0)
    first, again = memoised(a, x), memoised(a.clone(), x.clone())
    assert plain.calls == 1
    assert torch.equal(first, again)
    assert torch.equal(memoised(a, x + 1.0), 2.0 * (x + 1.0))
    assert torch.equal(memoised(a, x[:2]), 2.0 * x[:2])
    assert plain.calls == 3


def test_all_rows_of_a_vmap_are_one_call_and_one_memory():
    plain = Counted()
    memoised = Memoised(plain)
    a, x = torch.arange(4.0), torch.arange(12.0).view(4, 3)
    expected = a[:, None] * x
    for _ in range(3):
        assert torch.equal(vmap(memoised)(a, x), expected)
        assert torch.equal(vmap(memoised, in_dims=(None, 0))(a[2], x), a[2] * x)
    assert plain.calls == 2


def test_what_it_feeds_may_be_differentiated_by_other_things():
    memoised = Memoised(Counted())
    a, x = torch.tensor(2.0), torch.arange(3.0)
    slopes = vmap(lambda y: grad(lambda y_: (y_ * memoised(a, x)).square().sum())(y))(torch.ones(2, 3))
    assert torch.equal(slopes, (2.0 * (a * x).square()).expand(2, 3))


def test_but_not_by_its_own():
    memoised = Memoised(Counted())
    with pytest.raises(RuntimeError, match="not differentiable"):
        grad(lambda a: memoised(a, torch.arange(3.0)).sum())(torch.tensor(2.0))


def test_the_least_recently_used_are_forgotten():
    plain = Counted()
    x, budget = torch.arange(4.0), 2 * (4 + 16 + 16)  # two calls' bytes
    memoised = Memoised(plain, budget)
    one, two, three = (torch.tensor(float(i)) for i in (1, 2, 3))
    for a in (one, two, one, three):
        memoised(a, x)
    assert plain.calls == 3
    memoised(one, x)
    assert plain.calls == 3
    memoised(two, x)
    assert plain.calls == 4


def test_what_was_written_to_since_is_not_taken_for_what_it_was():
    memoised = Memoised(Counted())
    a, x = torch.tensor(2.0), torch.arange(3.0)
    first = memoised(a, x)
    x += 1.0  # the operand that it knows, in place
    assert torch.equal(memoised(a, x), torch.tensor([2.0, 4.0, 6.0]))
    first = memoised(a, x)
    first += 100.0  # the value that it keeps
    assert torch.equal(memoised(a, x), torch.tensor([2.0, 4.0, 6.0]))


def test_it_forgets_when_told_to():
    plain = Counted()
    memoised = Memoised(plain)
    a, x = torch.arange(4.0), torch.arange(12.0).view(4, 3)
    for _ in range(2):
        memoised(a[1], x)
        vmap(memoised)(a, x)
        memoised.clear()
    assert plain.calls == 4


def test_so_many_values_are_kept_and_the_last_used_stay():
    plain = Counted()
    memoised = Memoised(plain)
    a, points = torch.tensor(2.0), [torch.tensor([float(i)]) for i in range(ENTRIES + 2)]
    for x in points[:-1]:
        memoised(a, x)
    assert len(memoised.memo) == ENTRIES
    memoised(a, points[1])  # the oldest that is left is used again, so the next one goes
    memoised(a, points[-1])
    calls = plain.calls
    memoised(a, points[1])
    assert plain.calls == calls
    memoised(a, points[2])
    assert plain.calls == calls + 1
