"""Perceptrons: linear maps with rectified units between them, run and differentiated without a module around.

A call of a small module is mostly the exchange of its tensors, and a derivative mostly autograd's bookkeeping. Here are
the operations alone, the same ones in the same order, so that numbers have the bits of the module and of autograd.

    h_0 = x,   h_i = relu(z_i),   z_i = W_i h_{i−1} + b_i,   e_i = ∂L/∂z_i
    ∂L/∂W_i = e_iᵀ h_{i−1},   ∂L/∂b_i = Σ e_i,   e_{i−1} = (e_i W_i) ∘ [h_{i−1} > 0]
"""

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Perceptron(NamedTuple):
    """What is to be known of such a module. θ has each layer's matrix, then its offset.

    Args:
        shapes: the shapes of the matrices, outputs × inputs.
        flattens: whether inputs may have any shape behind the rows.
    """

    shapes: tuple[tuple[int, int], ...]
    flattens: bool

    @staticmethod
    def of(module: nn.Module) -> "Perceptron | None":
        """The perceptron that a module is; None where it is something else, or where somebody listens to its layers."""
        parts = list(module) if type(module) is nn.Sequential else []
        first = parts[0] if parts else None
        flattens = type(first) is nn.Flatten and (first.start_dim, first.end_dim) == (1, -1)
        layers = parts[flattens:]
        maps, units = layers[::2], layers[1::2]
        shapes = [(part.out_features, part.in_features) for part in maps if type(part) is nn.Linear and trained(part)]
        whole = len(shapes) == len(maps) == len(units) + 1 and all(type(unit) is nn.ReLU for unit in units)
        return Perceptron(tuple(shapes), flattens) if whole and not any(map(heard, module.modules())) else None

    def takes(self, inputs: object) -> TypeGuard[Tensor]:
        """Whether inputs are one matrix, or become one.

        Args:
            inputs: what a model is given.
        """
        return isinstance(inputs, Tensor) and (inputs.dim() == 2 or (self.flattens and inputs.dim() > 2))

    def outputs(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """z of the last layer, as the module gives it.

        Args:
            theta: the parameters.
            inputs: one row per example.
        """
        h = inputs.flatten(1) if self.flattens else inputs
        *hidden, (W, b) = self._layers(theta)
        for matrix, offset in hidden:
            h = torch.relu(linear(h, matrix, offset))
        return linear(h, W, b)

    def gradient(self, theta: Tensor, inputs: Tensor, slope: Callable[[Tensor], Tensor]) -> Tensor:
        """∇L(θ); it composes with vmap, and is not to be differentiated again.

        Args:
            theta: the parameters.
            inputs: one row per example.
            slope: from the outputs to the derivative of L by them.
        """
        layers = self._layers(theta)
        seen = [inputs.flatten(1) if self.flattens else inputs]  # what each layer is given
        for matrix, offset in layers[:-1]:
            seen.append(torch.relu(torch.addmm(offset, seen[-1], matrix.t())))
        W, b = layers[-1]
        e = slope(torch.addmm(b, seen[-1], W.t()))
        found: list[Tensor] = []
        for i in reversed(range(len(layers))):
            found += [e.sum(0), e.t().mm(seen[i]).reshape(-1)]
            if i:
                e = torch.ops.aten.threshold_backward(e.mm(layers[i][0]), seen[i], 0)
        return torch.cat(found[::-1])

    def _layers(self, theta: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's matrix and offset, views into θ."""
        parts = theta.split_with_sizes([length for rows, columns in self.shapes for length in (rows * columns, rows)])
        return [(W.view(shape), b) for shape, W, b in zip(self.shapes, parts[::2], parts[1::2], strict=True)]


def trained(layer: nn.Linear | nn.Conv2d | nn.BatchNorm2d) -> bool:
    """Whether it has an offset, and both are trained.

    Args:
        layer: a layer with weights.
    """
    return layer.bias is not None and layer.weight.requires_grad and layer.bias.requires_grad


def heard(module: nn.Module) -> bool:
    """Whether somebody's hooks are to be called when the module is.

    Args:
        module: any module.
    """
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


__all__ = ["Perceptron", "heard", "trained"]
