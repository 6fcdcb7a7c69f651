"""Memory that is used again: only when nobody has it, with torch's values and alignment."""

from threading import Thread

import pytest
import torch
from torch.func import grad

from coterie.federation.reduce import BlockedSum
from coterie.numerics import memory
from coterie.numerics.memory import empty_like, stepped


@pytest.fixture(autouse=True)
def own_pieces(monkeypatch):
    """Every size counts as large, and no piece is left from elsewhere."""
    monkeypatch.setattr(memory, "LARGE", 1)
    monkeypatch.setattr(memory, "_PIECES", memory._Pieces())


def test_memory_is_used_again_when_the_tensor_is_gone():
    x = torch.zeros(1000)
    first = empty_like(x)
    place = first.data_ptr()
    assert empty_like(x).data_ptr() != place
    del first
    assert empty_like(x).data_ptr() == place


@pytest.mark.parametrize(
    "keep", [lambda t: t[3:5], lambda t: t.view(10, 100).T, lambda t: t.detach(), lambda t: t.numpy()]
)
def test_a_view_keeps_it(keep):
    first = empty_like(torch.zeros(1000)).fill_(3.0)
    place, kept = first.data_ptr(), keep(first)
    del first
    assert empty_like(torch.zeros(1000)).fill_(7.0).data_ptr() != place
    assert bool((kept == 3.0).all())


def test_a_graph_keeps_it():
    weight = torch.ones(1000, requires_grad=True)
    factor = empty_like(weight).fill_(3.0)
    y = (weight * factor).sum()
    del factor
    empty_like(weight).fill_(7.0)
    y.backward()
    assert torch.equal(weight.grad, torch.full((1000,), 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_type_shape_layout_and_alignment_are_torchs(dtype):
    x = torch.zeros(7, 9, dtype=dtype).T
    for shape in ((), (5, 3)):
        made = empty_like(x, *shape)
        assert made.dtype == dtype
        assert made.shape == (shape or x.shape)
        assert made.is_contiguous()
        assert made.data_ptr() % memory.ALIGNED == 0


def test_no_more_than_the_limit_is_kept_and_nothing_in_use_is_lost(monkeypatch):
    monkeypatch.setattr(memory, "KEPT", 5000)
    held = [empty_like(torch.zeros(250)).fill_(k) for k in range(20)]
    assert sum(piece.memory.nbytes for piece in memory._PIECES._pieces) <= 5000
    assert all(torch.equal(x, torch.full((250,), float(k))) for k, x in enumerate(held))
    large = empty_like(torch.zeros(5000)).fill_(1.0)
    assert memory._PIECES._pieces == []
    assert large.sum() == 5000


def test_threads_never_share_a_piece():
    wrong = []

    def work(number: int) -> None:
        for _ in range(300):
            mine = empty_like(torch.zeros(200)).fill_(number)
            if not bool((mine == number).all()):
                wrong.append(number)

    threads = [Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_step_has_torchs_bits_and_changes_nothing_else():
    random = torch.Generator().manual_seed(0)
    x, g = torch.randn(1001, generator=random), torch.randn(1001, generator=random)
    before = x.clone(), g.clone()
    assert torch.equal(stepped(x, g, 0.3), torch.sub(x, g, alpha=0.3))
    assert torch.equal(x, before[0])
    assert torch.equal(g, before[1])


def test_a_step_is_differentiated_and_vmapped_as_before():
    x = torch.ones(3, requires_grad=True)
    stepped(x, 2 * x, 0.25).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 0.5))
    assert torch.equal(grad(lambda t: stepped(t, t * t, 0.5).sum())(torch.ones(3)), torch.zeros(3))
    rows = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.vmap(lambda t: stepped(t, t, 0.5))(rows), rows / 2)
    assert stepped(torch.ones(3), torch.ones(()), 0.5).shape == (3,)


def test_a_mean_of_large_rows_is_that_of_all_rows(monkeypatch):
    random = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(5, 64, generator=random), torch.rand(5, generator=random)
    for large in (1, 1000):
        monkeypatch.setattr("coterie.federation.reduce.LARGE", large)
        total = BlockedSum()
        for k in range(5):
            total.add(rows[k : k + 1], weights[k : k + 1])
        torch.testing.assert_close(total.mean(float(weights.sum())), weights @ rows / weights.sum())
