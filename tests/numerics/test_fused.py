"""A fused function has the plain one's values, under any nesting of vmap, and survives a broken compiler."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from coterie.numerics import compiled as module
from coterie.numerics import programs
from coterie.numerics.compiled import Fused, Workshop
from coterie.numerics.programs import Graph, namespace
from coterie.numerics.tracing import Untraceable

compiler = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
X = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss(x: Tensor, rows: Tensor) -> Tensor:
    return (rows @ x).tanh().square().sum()


def pair(of: Callable[..., Tensor]) -> Tensor:
    return vmap(vmap(of, in_dims=(0, None)))(X, Y)


class Interpreting:
    """A builder whose programs run the text of the graph, plus an error."""

    busy = False
    error = 0.0

    def __init__(self, graph: Graph, threads: int, note: Callable[[str], None]) -> None:
        names = namespace()
        exec(graph.text, names)
        self._forward, self._constants = names["forward"], graph.constants

    def program(self) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        return lambda inputs: [t + self.error for t in self._forward(None, *inputs, *self._constants)]

    def close(self) -> None:
        self._forward = None


def collected() -> tuple[Workshop, Fused]:
    workshop = Workshop()
    fused = Fused(grad(loss), workshop)
    workshop.collecting = True
    torch.testing.assert_close(pair(fused), pair(grad(loss)), rtol=0.0, atol=0.0)
    return workshop, fused


def test_vectorised_twice_it_is_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Builder", Interpreting)
    workshop, fused = collected()
    assert len(workshop._orders) == 1
    workshop.finish()
    assert workshop.using
    torch.testing.assert_close(pair(fused), pair(grad(loss)))
    inner = fused.over((0, None))
    assert list(inner._vectorised) == [(0, 0)], "it was compiled where both vmaps had been taken in"


def test_a_compiler_that_gives_another_value_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Builder", Interpreting)
    monkeypatch.setattr(Interpreting, "error", 1.0)
    workshop, fused = collected()
    with pytest.raises(Untraceable, match="another value"):
        workshop.finish()
    assert torch.equal(pair(fused), pair(grad(loss)))


@pytest.mark.parametrize("size", [1.0, 1e-3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_compiled_values_are_compared_by_their_changes_and_row_by_row(dtype, tolerance, size):
    before = torch.linspace(-1.0, 2.0, 60, dtype=dtype).view(3, 20)
    change = size * torch.linspace(1.0, 2.0, 60, dtype=dtype).view(3, 20)
    change[2] *= 1e-2  # a client that hardly moves beside others
    plain = before + change
    error = torch.zeros_like(change)
    error[2] = change[2]
    assert module.agrees(plain, plain, before)
    assert not module.agrees(before, plain, before)
    assert not module.agrees(plain - error, plain, before)
    for rows in (slice(None), 2):  # all clients in a matrix, and one in a vector
        a, b, at = plain[rows], change[rows], torch.zeros_like(before)[rows]
        assert module.agrees(b * (1 + 0.5 * tolerance), b, at)
        assert not module.agrees(b * (1 + 2 * tolerance), b, at)
        assert not module.agrees(a * torch.nan, a, at)
    assert module.agrees(torch.tensor([1, 2]), torch.tensor([1, 2]), torch.tensor([0, 0]))
    assert not module.agrees(torch.tensor([1, 2]), torch.tensor([1, 3]), torch.tensor([0, 0]))


def test_a_workshop_that_is_closed_computes_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Builder", Interpreting)
    workshop, fused = collected()
    workshop.close()
    assert not workshop._orders
    assert torch.equal(pair(fused), pair(grad(loss)))


def test_it_cannot_be_differentiated_by_accident() -> None:
    fused = Fused(loss, Workshop())
    x = X[0, 0].clone().requires_grad_()
    assert not fused(x, Y[0]).requires_grad


@compiler
@pytest.mark.slow
def test_the_compiler_gives_the_plain_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(programs.FOLDER, str(tmp_path / "compiled"))
    workshop, fused = collected()
    workshop.finish()
    torch.testing.assert_close(pair(fused), pair(grad(loss)))
