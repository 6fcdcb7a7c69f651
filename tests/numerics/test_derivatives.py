"""Derivatives have the bits of torch.func, under vmap and inside of each other, and leave the compiler alone."""

import pytest
import torch
from torch import Tensor, func
from torch.func import vmap

from coterie.numerics.derivatives import grad, gradient, hessian_vector, mixed_vector, value_and_grad, vector_jacobian

K, N, D, H = 5, 6, 4, 3
stream = torch.Generator().manual_seed(3)
THETA, V = (torch.randn(K, D * H + H, generator=stream) for _ in range(2))
X, Y = torch.randn(K, N, D, generator=stream), torch.randn(K, N, generator=stream)


def loss(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    hidden = (x @ theta[: D * H].view(D, H)).tanh()
    return (hidden @ theta[D * H :] - y).square().mean()


def by_torch(theta: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return func.grad(lambda t: func.grad(loss)(t, x, y) @ v)(theta)


def same(ours, theirs) -> bool:
    """Whether both give the same bits under vmap and client after client."""
    operands = (THETA, V, X, Y)
    rows = list(zip(*operands, strict=True))
    together = torch.equal(vmap(ours)(*operands), vmap(theirs)(*operands))
    return together and all(torch.equal(ours(*row), theirs(*row)) for row in rows)


def test_gradients_have_the_bits_of_torch_func():
    assert same(lambda t, v, x, y: grad(loss)(t, x, y), lambda t, v, x, y: func.grad(loss)(t, x, y))
    assert same(
        lambda t, v, x, y: grad(loss, argnums=1)(t, x, y), lambda t, v, x, y: func.grad(loss, argnums=1)(t, x, y)
    )


def test_value_and_gradient_are_those_of_one_pass():
    def ours(t, v, x, y):
        value, slope = value_and_grad(loss)(t, x, y)
        return torch.cat([value[None], slope])

    def theirs(t, v, x, y):
        slope, value = func.grad_and_value(loss)(t, x, y)
        return torch.cat([value[None], slope])

    assert same(ours, theirs)


def test_products_have_the_bits_of_torch_func():
    assert same(lambda t, v, x, y: hessian_vector(lambda s: loss(s, x, y), t, v), by_torch)
    assert same(
        lambda t, v, x, y: vector_jacobian(lambda s: grad(loss)(s, x, y), t, v),
        lambda t, v, x, y: func.vjp(lambda s: func.grad(loss)(s, x, y), t)[1](v)[0],
    )
    assert same(
        lambda t, v, x, y: mixed_vector(lambda x_, t_: loss(t_, x_, y), x, t, v),
        lambda t, v, x, y: func.vjp(lambda x_: func.grad(loss)(t, x_, y), x)[1](v)[0],
    )


def test_they_compose_with_torch_func():
    assert same(lambda t, v, x, y: func.grad(lambda s: grad(loss)(s, x, y) @ v)(t), by_torch)
    assert same(
        lambda t, v, x, y: func.jacrev(lambda s: grad(loss)(s, x, y))(t) @ v, lambda t, v, x, y: _hessian(t, x, y) @ v
    )
    assert same(
        lambda t, v, x, y: func.jvp(lambda s: grad(loss)(s, x, y), (t,), (v,))[1],
        lambda t, v, x, y: _forward(t, v, x, y),
    )


def _hessian(t, x, y):
    return func.jacrev(lambda s: func.grad(loss)(s, x, y))(t)


def _forward(t, v, x, y):
    return func.jvp(lambda s: func.grad(loss)(s, x, y), (t,), (v,))[1]


def test_autograd_around_a_gradient_sees_through_it():
    t = THETA[0].clone().requires_grad_()
    for slope in (gradient(lambda s: loss(s, X[0], Y[0]), t), grad(loss)(t, X[0], Y[0])):
        found = torch.autograd.grad(slope @ V[0], t)[0]
        torch.testing.assert_close(found, by_torch(THETA[0], V[0], X[0], Y[0]))
    t = THETA.clone().requires_grad_()  # and through a vmap
    found = torch.autograd.grad((vmap(grad(loss))(t, X, Y) * V).sum(), t)[0]
    torch.testing.assert_close(found, vmap(by_torch)(THETA, V, X, Y))


def test_a_function_that_ignores_its_argument_has_gradient_0():
    assert grad(lambda x, y: y.sum())(X[0], Y[0]).equal(torch.zeros(N, D))
    assert grad(lambda x, y: y.sum())(X[0], Y[0].clone().requires_grad_()).equal(torch.zeros(N, D))
    assert vector_jacobian(lambda x: Y[0], X[0], Y[0]).equal(torch.zeros(N, D))


def test_a_function_with_several_numbers_is_refused():
    with pytest.raises(RuntimeError, match="one number"):
        grad(lambda x: x)(Y[0])
