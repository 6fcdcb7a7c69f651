"""Memoised functions: the same values, computed once."""

import pytest
import torch
from torch.func import grad, vmap

from coterie.numerics.memo import Memoised


class Counted:
    """x ↦ a x, and how often it was computed."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return a * x


def test_equal_tensors_are_answered_from_memory():
    plain = Counted()
    kept = Memoised(plain)
    a, x = torch.tensor(2.0), torch.arange(3.0)
    first, again = kept(a, x), kept(a.clone(), x.clone())
    assert plain.calls == 1
    assert torch.equal(first, again)
    assert torch.equal(kept(a, x + 1.0), 2.0 * (x + 1.0))
    assert torch.equal(kept(a, x[:2]), 2.0 * x[:2])
    assert plain.calls == 3


def test_all_rows_of_a_vmap_are_one_call_and_one_memory():
    plain = Counted()
    kept = Memoised(plain)
    a, x = torch.arange(4.0), torch.arange(12.0).view(4, 3)
    expected = a[:, None] * x
    for _ in range(3):
        assert torch.equal(vmap(kept)(a, x), expected)
        assert torch.equal(vmap(kept, in_dims=(None, 0))(a[2], x), a[2] * x)
    assert plain.calls == 2


def test_what_it_feeds_may_be_differentiated_by_other_things():
    kept = Memoised(Counted())
    a, x = torch.tensor(2.0), torch.arange(3.0)
    slopes = vmap(lambda y: grad(lambda y_: (y_ * kept(a, x)).square().sum())(y))(torch.ones(2, 3))
    assert torch.equal(slopes, (2.0 * (a * x).square()).expand(2, 3))


def test_but_not_by_its_own():
    kept = Memoised(Counted())
    with pytest.raises(RuntimeError, match="not differentiable"):
        grad(lambda a: kept(a, torch.arange(3.0)).sum())(torch.tensor(2.0))


def test_the_least_recently_used_are_forgotten():
    plain = Counted()
    x, budget = torch.arange(4.0), 2 * (4 + 16 + 16)  # two calls' bytes
    kept = Memoised(plain, budget)
    one, two, three = (torch.tensor(float(i)) for i in (1, 2, 3))
    for a in (one, two, one, three):
        kept(a, x)
    assert plain.calls == 3
    kept(one, x)
    assert plain.calls == 3
    kept(two, x)
    assert plain.calls == 4


def test_what_was_written_to_since_is_not_taken_for_what_it_was():
    kept = Memoised(Counted())
    a, x = torch.tensor(2.0), torch.arange(3.0)
    first = kept(a, x)
    x += 1.0  # the operand that it knows, in place
    assert torch.equal(kept(a, x), torch.tensor([2.0, 4.0, 6.0]))
    first = kept(a, x)
    first += 100.0  # the value that it keeps
    assert torch.equal(kept(a, x), torch.tensor([2.0, 4.0, 6.0]))


def test_it_forgets_when_told_to():
    plain = Counted()
    kept = Memoised(plain)
    a, x = torch.arange(4.0), torch.arange(12.0).view(4, 3)
    for _ in range(2):
        kept(a[1], x)
        vmap(kept)(a, x)
        kept.forget()
    assert plain.calls == 4
