"""Projected descent on client weights with steps that need no tuning: spectral steps with a non-monotone safeguard.

    s = w − w',  y = ∂F − ∂F' without its mean, which the simplex does not see
    η = sᵀs/sᵀy and sᵀy/yᵀy in turn (Barzilai and Borwein 1988; Dai and Fletcher 2005), 2η where sᵀy ≤ 0
    w ← Π(w − η ∂F)

A point whose F is above the largest of the last five is left again: the step is a quarter, from the last good point
(Birgin, Martínez and Raydan 2000). The first step moves no weight by more than 0.05. This is for exact or nearly exact
hypergradients, that is for all clients and all rows; noise needs constant or decreasing steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MEMORY = 5
FIRST = 0.05  # of weight, in the first step
SLACK = 1e-10  # relative; F is not more exact


class Spectral(NamedTuple):
    """The last good weights, ∂F and the last values of F there, η and the number of good points."""

    w: Tensor
    gradient: Tensor
    values: Tensor
    step: float
    points: int


def spectral(w: Tensor) -> Spectral:
    """Before the first step.

    Args:
        w: the weights to start from.
    """
    return Spectral(w, torch.zeros_like(w), w.new_full((MEMORY,), torch.finfo(w.dtype).min), 0.0, 0)


def advance(
    s: Spectral, w: Tensor, gradient: Tensor, value: Tensor | None, project: Callable[[Tensor], Tensor]
) -> tuple[Spectral, Tensor, bool]:
    """The new state, the next weights, and whether w was good.

    Args:
        s: the state.
        w: the weights that were tried.
        gradient: ∂F there.
        value: F there; where it is None every point is good, and a step grows fourfold at most.
        project: Π.
    """
    if s.points and value is not None and float(value) > float(s.values.max()) + SLACK * abs(float(value)):
        s = s._replace(step=s.step / 4)
        return s, project(s.w - s.step * s.gradient), False
    step = _first(gradient) if s.points == 0 else _next(s, w, gradient)
    if value is None and s.points:
        step = min(step, 4.0 * s.step)
    values = s.values if value is None else torch.cat([s.values[1:], value.reshape(1).to(s.values)])
    return Spectral(w, gradient, values, step, s.points + 1), project(w - step * gradient), True


def _first(gradient: Tensor) -> float:
    steepest = float((gradient - gradient.mean()).abs().max())
    return FIRST / steepest if steepest > 0.0 else 1.0


def _next(s: Spectral, w: Tensor, gradient: Tensor) -> float:
    moved, change = w - s.w, gradient - s.gradient
    change = change - change.mean()
    curved, length = float(moved @ change), float(moved @ moved)
    if length == 0.0:
        return s.step
    if curved <= 0.0:
        return 2.0 * s.step
    return length / curved if s.points % 2 else curved / float(change @ change)
