"""Derivatives of losses on a batch, by torch.func. They compose with vmap."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vjp

from coterie.numerics.control import transformed

Loss = Callable[..., Tensor]


def hessian_vector(loss: Callable[[Tensor], Tensor], theta: Tensor, v: Tensor) -> Tensor:
    """∇² loss(θ) v, reverse over reverse: the gradient of ⟨∇loss(θ), v⟩.

    Measured 1.1 to 3 times faster than forward over reverse on the papers' networks, which splits every derivative
    formula into elementary operations.
    """
    return grad(lambda t: grad(loss)(t) @ v)(theta)


def gradient(loss: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """∇ loss(θ), by autograd alone where nothing is around it that asks for more."""
    return grad(loss)(theta) if transformed() or theta.requires_grad else native_gradient(loss, theta)


def native_gradient(loss: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """∇ loss(θ) by autograd alone, which keeps nothing for a second derivative as `grad` does; no vmap around it."""
    leaf = theta.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(loss(leaf), leaf)[0]


def native_hessian_vector(loss: Callable[[Tensor], Tensor], theta: Tensor, v: Tensor) -> Tensor:
    """∇² loss(θ) v by autograd alone; no vmap around it."""
    leaf = theta.detach().requires_grad_()
    with torch.enable_grad():
        first = torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0]
        if not first.requires_grad:  # the loss is linear
            return torch.zeros_like(theta)
        return torch.autograd.grad(first, leaf, v, materialize_grads=True)[0]


def mixed_vector(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """∇²_xy loss(x, y) v, with v like y and the result like x: the x-gradient of ⟨∇_y loss(x, y), v⟩."""
    pull = vjp(lambda x_: grad(loss, argnums=1)(x_, y), x)[1]
    return pull(v)[0]
