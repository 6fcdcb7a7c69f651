"""`minimax-quadratic`: the saddle-point problem of the FedNest paper (section 4.3), b_i kept, saddle point known.

    f_i(x, y) = −[½h_i‖y‖² − b_iᵀy + t_i yᵀx] + ½λ_i‖x‖²,   t_i ~ U(0, 0.1),   b_i ~ N(0, scale² I), centred
    saddle:  h y = b − t x,   λ x = t y                                                letters without i: means

The paper has h_i = 1 and λ_i = λ for all clients. Then all local Hessians in y, and all in x, are equal, the mean of
the clients after local steps is where local steps on the mean loss end, and no alternating method drifts, whatever the
b_i. `spread` makes curvatures differ, h_i ~ U(1 ∓ spread) and λ_i ~ λ U(1 ∓ spread), both with mean 1; spread = 0 is
the paper's problem.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from coterie.federation import Batch
from coterie.numerics import Draw
from coterie.problems.base import Context, View
from coterie.problems.nested import Minimax, NestedProblem
from coterie.settings import Count, NonNegative, Positive

COUPLING = 0.1  # the largest t_i


@dataclass(frozen=True)
class Saddle:
    """The saddle point, in float64."""

    x: Tensor
    y: Tensor

    def measure(self, view: View) -> dict[str, float]:
        """‖(x, y) − (x*, y*)‖, and the part of x alone."""
        gap = (view.model.double().cpu() - self.x).norm()
        y = self.y if view.inner is None else view.inner.double().cpu()
        return {
            "distance_to_optimum": float(torch.hypot(gap, (y - self.y).norm())),
            "outer_distance": float(gap),
        }


def payoff(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """f_i."""
    h, lam, t, b = (column.mean(0) for column in batch.columns)
    return -(0.5 * h * y @ y - b @ y + t * y @ x) + 0.5 * lam * x @ x


def minimax_quadratic(
    context: Context,
    *,
    clients: Count = 100,
    dimension: Count = 10,
    ridge: Positive = 10.0,
    scale: NonNegative = 1.0,
    spread: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5,
    centred: bool = True,
) -> NestedProblem:
    """The saddle-point problem of the FedNest paper; it starts at ones, and with centred b_i the saddle point is 0.

    Args:
        dimension: length of x and of y.
        ridge: λ, mean curvature in x.
        scale: standard deviation of the b_i.
        spread: relative spread of the curvatures over the clients; 0 is the paper's problem.
        centred: subtract the mean of the b_i.

    Example:
        >>> from coterie.problems import Context
        >>> problem = minimax_quadratic(Context(0), clients=4)
        >>> float(problem.exact.x.norm()) < 1e-12
        True
    """
    draw = Draw.of(context.seed).phase("minimax-quadratic")
    ids = torch.arange(clients)

    def uniform(name: str) -> Tensor:
        return draw.phase(name).client(ids).uniform(1, dtype=torch.float64)[:, 0]

    def around_one(name: str) -> Tensor:
        u = 2.0 * uniform(name) - 1.0
        return 1.0 + spread * (u - u.mean()) / (u - u.mean()).abs().max().clamp(min=1.0)

    h, lam, t = around_one("inner curvature"), ridge * around_one("outer curvature"), COUPLING * uniform("coupling")
    b = scale * draw.phase("shift").client(ids).normal(dimension, dtype=torch.float64)
    if centred:
        b = b - b.mean(0)
    x = t.mean() * b.mean(0) / (h.mean() * lam.mean() + t.mean() ** 2)
    saddle = Saddle(x, (b.mean(0) - t.mean() * x) / h.mean())
    return Minimax(payoff).on(
        [(h[i : i + 1], lam[i : i + 1], t[i : i + 1], b[i : i + 1]) for i in range(clients)],
        x=torch.ones(dimension),
        y=torch.ones(dimension),
        measures=lambda view: {},
        exact=saddle,
        **context.tensor_options,
    )
