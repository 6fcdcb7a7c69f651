"""A fused function has the plain one's values, under any nesting of vmap, and survives a broken compiler."""

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from coterie.numerics import compiled as module
from coterie.numerics.compiled import Fused

compiler = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
X = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss(x: Tensor, rows: Tensor) -> Tensor:
    return (rows @ x).tanh().square().sum()


@compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.slow
def test_vectorised_twice_it_is_the_plain_function() -> None:
    plain = grad(loss)
    fused = Fused(plain)

    def pair(of: Callable[..., Tensor]) -> Tensor:
        return vmap(vmap(of, in_dims=(0, None)))(X, Y)

    torch.testing.assert_close(pair(fused), pair(plain))
    inner = fused.over((0, None))
    assert list(inner._vectorised) == [(0, 0)]
    assert inner.over((0, 0))._by_shape, "it was compiled where both vmaps had been taken in"


def test_a_compiler_that_gives_another_value_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch, "compile", lambda graph, **_: lambda *operands: graph(*operands) + 1.0)
    fused = Fused(grad(loss))
    with pytest.warns(RuntimeWarning, match="another value"):
        value = fused(X[0, 0], Y[0])
    assert torch.equal(value, grad(loss)(X[0, 0], Y[0]))


def test_a_compiler_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: object, **_: object) -> object:
        raise torch._dynamo.exc.TorchDynamoException("no compiler here")

    monkeypatch.setattr(module.torch, "compile", broken)
    with pytest.warns(RuntimeWarning, match="no compiler here"):
        value = Fused(grad(loss))(X[0, 0], Y[0])
    assert torch.equal(value, grad(loss)(X[0, 0], Y[0]))


def test_it_cannot_be_differentiated_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch, "compile", lambda graph, **_: graph)
    fused = Fused(loss)
    x = X[0, 0].clone().requires_grad_()
    assert not fused(x, Y[0]).requires_grad
