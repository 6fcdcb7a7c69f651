"""Small nested problems of all four kinds, none of them quadratic, and an exact solver for their inner problem."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian

from coterie.federation import Batch
from coterie.numerics import Draw
from coterie.problems.nested import Compositional, Minimax, Nested, NestedProblem, SingleLevel

WIDE: dict[str, Any] = {"dtype": torch.float64}


def rows(clients: int, n: int, width: int, name: str) -> list[tuple[Tensor, Tensor]]:
    """Regressions that differ from client to client."""
    draw = Draw.of(0).phase(name)
    x = draw.phase("x").client(torch.arange(clients)).normal(n, width, dtype=torch.float64)
    y = draw.phase("y").client(torch.arange(clients)).normal(n, dtype=torch.float64)
    return [(x[k], y[k] + 0.3 * k) for k in range(clients)]


def ridge_inner(x: dict[str, Tensor], y: Tensor, batch: Batch) -> Tensor:
    """Smooth regression with a learned scale of inputs and a learned penalty."""
    out = (batch.inputs * torch.tanh(x["scale"] + 1.0)) @ y
    return F.softplus(out - batch.labels).mean() + 0.5 * (x["penalty"].exp() * y.square()).sum()


def ridge_outer(x: dict[str, Tensor], y: Tensor, batch: Batch) -> Tensor:
    return (batch.inputs @ y - batch.labels).square().mean() + 0.05 * x["scale"].square().sum()


def game(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """Convex in x where it matters, strongly concave in y."""
    return (torch.sin(batch.inputs @ x) * (batch.inputs @ y)).mean() - y.square().sum() - 0.1 * y.pow(4).sum()


def composed(x: Tensor, batch: Batch) -> Tensor:
    return torch.tanh(batch.inputs * x).mean(0) + x.square()


def of_composed(y: Tensor, batch: Batch) -> Tensor:
    return (batch.inputs @ y - batch.labels).cosh().mean()


def single(x: Tensor, batch: Batch) -> Tensor:
    return F.softplus(batch.inputs @ x * batch.labels.sign()).mean() + 0.1 * x.square().sum()


def bilevel_case() -> NestedProblem:
    x = {"scale": torch.tensor([0.3, -0.2, 0.5]), "penalty": torch.tensor([-1.0, 0.0, 0.5])}
    return Nested(ridge_inner, ridge_outer).on(rows(4, 6, 3, "t"), rows(4, 5, 3, "v"), x=x, y=torch.zeros(3), **WIDE)


def minimax_case() -> NestedProblem:
    return Minimax(game).on(rows(4, 6, 3, "t"), x=torch.tensor([0.3, -0.2, 0.5]), y=torch.zeros(3), **WIDE)


def compositional_case() -> NestedProblem:
    x = torch.tensor([0.3, -0.2, 0.5])
    return Compositional(composed, of_composed).on(rows(4, 6, 3, "t"), rows(4, 5, 3, "v"), x=x, **WIDE)


def single_case() -> NestedProblem:
    return SingleLevel(single).on(rows(4, 6, 3, "t"), x=torch.tensor([0.3, -0.2, 0.5]), **WIDE)


CASES = {
    "bilevel": bilevel_case,
    "minimax": minimax_case,
    "compositional": compositional_case,
    "single-level": single_case,
}


def mean_inner(problem: NestedProblem, x: Tensor, y: Tensor) -> Tensor:
    values = [problem.task.g(x, y, problem.train.client(k).all()) for k in range(problem.clients)]
    return torch.stack(values).mean()


def mean_outer(problem: NestedProblem, x: Tensor, y: Tensor) -> Tensor:
    goal = problem.valid or problem.train
    return torch.stack([problem.task.f(x, y, goal.client(k).all()) for k in range(problem.clients)]).mean()


def best_inner(problem: NestedProblem, x: Tensor, near: Tensor | None = None) -> Tensor:
    """y*(x), by Newton's method."""
    y = problem.inner_start if near is None else near
    if problem.task.kind == "single-level":
        return y

    def g(y_: Tensor) -> Tensor:
        return mean_inner(problem, x, y_)

    slope = grad(g)(y)
    while float(slope.norm()) > 1e-12:
        y = y - torch.linalg.solve(hessian(g)(y), slope)
        slope = grad(g)(y)
    return y


def finite_differences(problem: NestedProblem, x: Tensor, step: float = 1e-5) -> Tensor:
    """∇f(x) of f(x) = 1/m Σ f_i(x, y*(x)), by central differences."""
    slopes, y = [], best_inner(problem, x)
    for e in torch.eye(len(x), dtype=x.dtype):
        up, down = (mean_outer(problem, z, best_inner(problem, z, y)) for z in (x + step * e, x - step * e))
        slopes.append((up - down) / (2.0 * step))
    return torch.stack(slopes)
