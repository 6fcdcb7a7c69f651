"""`ridge-path`: penalties of a ridge regression, one per feature or one per client, tuned on validation rows.

    g_k(x, y) = ½ mean (aᵀy − b)² + ½ Σ_j exp(x_j) y_j²       over client k's train rows (a, b), x common
    g_k(x_k, y) = ½ mean (aᵀy − b)² + ½ exp(x_k) ‖y‖²         the same with a penalty that client k keeps
    f_k(y) = ½ mean (aᵀy − b)²                                 over client k's validation rows

Few features matter, rows are few, and the noise of labels grows from client to client. y*(x) solves a linear system, so
h(x) = f(y*(x)) and ∇h are known exactly. h is not convex: h* is that of the minimum which Newton's method reaches from
the start, and a gap below 0 tells of a better one.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.func import hessian

from coterie.federation import Batch
from coterie.numerics import Draw
from coterie.numerics.derivatives import grad
from coterie.problems.base import Context, View
from coterie.problems.nested import Nested, NestedProblem, batch_mean
from coterie.problems.tasks.sets import Box
from coterie.problems.tasks.variables import PerClient
from coterie.settings import Count

START, BOUND = -2.0, 8.0  # log-penalties; without bounds those of useless features would grow for ever
TOLERANCE = 1e-11


@dataclass(frozen=True)
class RidgeForm:
    """The exact value function, in float64: means over clients of AᵀA/n and Aᵀb/n, for train and validation rows.

    Args:
        by_client: whether x has one number per client, [m, 1], instead of one per feature.
        start: where the search for the optimum begins.
    """

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    constant: float
    by_client: bool
    start: Tensor

    def inner(self, x: Tensor) -> Tensor:
        """y*(x)."""
        G, c = self.train
        penalty = x.exp().mean().expand(len(c)) if self.by_client else x.exp()
        return torch.linalg.solve(G + torch.diag(penalty), c)

    def objective(self, x: Tensor) -> Tensor:
        """h(x) = f(y*(x))."""
        G, c = self.valid
        y = self.inner(x)
        return 0.5 * y @ G @ y - c @ y + self.constant

    def hypergradient(self, x: Tensor) -> Tensor:
        """∇h(x)."""
        return grad(self.objective)(x)

    @cached_property
    def least(self) -> float:
        """h* of the minimum near the start, within the bounds: projected Newton steps, halved until h falls."""
        x = self.start
        for _ in range(500):
            slope = self.hypergradient(x)
            free = ~(((x >= BOUND) & (slope < 0)) | ((x <= -BOUND) & (slope > 0)))
            if float((slope * free).norm()) < TOLERANCE:
                break
            x = self._better(x, slope * free, free)
        return float(self.objective(x))

    def _better(self, x: Tensor, slope: Tensor, free: Tensor) -> Tensor:
        """A point with a lower h along Newton's direction in the free entries, made to descend."""
        flat = slope.flatten()
        values, vectors = torch.linalg.eigh(hessian(self.objective)(x).reshape(len(flat), len(flat)))
        direction = (vectors @ ((vectors.T @ flat) / values.abs().clamp(min=1e-9))).reshape(x.shape) * free
        if float((direction * slope).sum()) <= 0.0:
            direction = slope
        size, now = 1.0, self.objective(x)
        while size > 1e-12:
            tried = (x - size * direction).clamp(-BOUND, BOUND)
            if bool(self.objective(tried) < now):
                return tried
            size *= 0.5
        return x

    def measure(self, view: View) -> dict[str, float]:
        """h(x), its gap, ‖∇h(x)‖ and how far y is from y*(x)."""
        x = view.model.double().cpu()
        measures = {
            "gap": float(self.objective(x)) - self.least,
            "objective": float(self.objective(x)),
            "stationarity": float(self.hypergradient(x).norm()),
        }
        if view.inner is not None:
            measures["inner_distance"] = float((view.inner.double().cpu() - self.inner(x)).norm())
        return measures


def ridge_inner(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """g_k; one penalty stands for all features."""
    return ridge_outer(x, y, batch) + 0.5 * (x.exp() * y.square()).sum()


def ridge_outer(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """f_k."""
    return 0.5 * batch_mean((batch.inputs @ y - batch.labels).square(), batch)


def ridge_path(
    context: Context,
    *,
    clients: Count = 8,
    penalty: Literal["features", "clients"] = "features",
    features: Count = 20,
    relevant: Count = 5,
    rows: Count = 12,
) -> NestedProblem:
    """Penalties of a ridge regression, one per feature or one kept by every client; h(x) − h* is known.

    Args:
        penalty: one per feature, which all clients share, or one per client, which it keeps.
        features: inputs of a row, and length of y.
        relevant: features that the labels depend on; the others are useless.
        rows: train rows of a client, and as many for validation; the deviation of their noise grows from 0 to 1.

    Example:
        >>> from coterie.problems import Context
        >>> problem = ridge_path(Context(0), clients=4, features=6, relevant=2)
        >>> len(problem.start), ridge_path(Context(0), penalty="clients").offers
        (6, frozenset({'nested with sets and x per client'}))
    """
    draw, ids = Draw.of(context.seed).phase("ridge-path"), torch.arange(clients)
    truth = draw.phase("truth").normal(features, dtype=torch.float64) * (torch.arange(features) < relevant)

    def dealt(name: str) -> tuple[Tensor, Tensor]:
        at = draw.phase(name).client(ids)
        a = at.phase("inputs").normal(rows, features, dtype=torch.float64)
        spread = torch.linspace(0.0, 1.0, clients, dtype=torch.float64)[:, None]
        return a, a @ truth + spread * at.phase("noise").normal(rows, dtype=torch.float64)

    train, valid = dealt("train"), dealt("validation")
    by_client = penalty == "clients"
    start = torch.full((1 if by_client else features,), START, dtype=torch.float64)
    form = RidgeForm(
        _moments(*train),
        _moments(*valid),
        0.5 * float(valid[1].square().mean()),
        by_client,
        start.repeat(clients, 1) if by_client else start,
    )
    return Nested(ridge_inner, ridge_outer).on(
        list(zip(*train, strict=True)),
        list(zip(*valid, strict=True)),
        x=PerClient(start) if by_client else start,
        y=torch.zeros(features),
        x_set=Box(-BOUND, BOUND),
        measures=lambda view: {},
        exact=form,
        **context.tensor_options,
    )


def _moments(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """1/m Σ AᵀA/n and 1/m Σ Aᵀb/n."""
    return (a.mT @ a).mean(0) / a.shape[1], (a * b[..., None]).mean((0, 1))
