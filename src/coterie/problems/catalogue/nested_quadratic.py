"""`nested-quadratic`: a bilevel problem whose y*(x), f(x), ∇f(x) and x* are known. Ground truth for tests.

    g_i(x, y) = ½ yᵀH_i y − yᵀ(C_i x + c_i)           f_i(x, y) = ½‖y − a_i‖² + ½ρ_i‖x − e_i‖²
    y*(x) = H⁻¹(Cx + c)                               ∇f(x) = ρx − (ρe) + CᵀH⁻¹(y*(x) − a)    letters without i: means

Clients differ in everything. A client's train shard is one row (H_i, C_i, c_i), its validation shard (a_i, e_i, ρ_i).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from coterie.federation import Batch
from coterie.numerics import Draw
from coterie.problems.base import Context, View
from coterie.problems.nested import Nested, NestedProblem
from coterie.settings import Count, Positive


@dataclass(frozen=True)
class NestedForm:
    """Everything about the quadratic that can be known exactly, in float64. Leading dimension m: one per client."""

    H: Tensor
    C: Tensor
    c: Tensor
    a: Tensor
    e: Tensor
    rho: Tensor

    @property
    def hessian(self) -> Tensor:
        """∇²_yy g."""
        return self.H.mean(0)

    def inner(self, x: Tensor) -> Tensor:
        """y*(x)."""
        return torch.linalg.solve(self.hessian, self.C.mean(0) @ x + self.c.mean(0))

    def objective(self, x: Tensor) -> Tensor:
        """f(x) = 1/m Σ f_i(x, y*(x))."""
        near = (self.inner(x) - self.a).square().sum(1) + self.rho * (x - self.e).square().sum(1)
        return 0.5 * near.mean()

    def hypergradient(self, x: Tensor) -> Tensor:
        """∇f(x), by the implicit function theorem."""
        direct = (self.rho[:, None] * (x - self.e)).mean(0)
        return direct + self.C.mean(0).T @ torch.linalg.solve(self.hessian, self.inner(x) - self.a.mean(0))

    @property
    def optimum(self) -> Tensor:
        """x*: the root of the affine ∇f."""
        zero = torch.zeros_like(self.e[0])
        J = torch.linalg.solve(self.hessian, self.C.mean(0))
        curvature = self.rho.mean() * torch.eye(len(zero), dtype=zero.dtype) + J.T @ J
        return torch.linalg.solve(curvature, -self.hypergradient(zero))

    def gap(self, x: Tensor) -> Tensor:
        """f(x) − f(x*) = ½ (x − x*)ᵀ(∇f(x) − ∇f(x*)), without the cancellation of the difference."""
        return 0.5 * (x - self.optimum) @ (self.hypergradient(x) - self.hypergradient(self.optimum))

    def measure(self, view: View) -> dict[str, float]:
        """How far x is from x*, y from y*(x), f(x), its gap and ‖∇f(x)‖."""
        x = view.model.double().cpu()
        measures = {
            "gap": float(self.gap(x)),
            "objective": float(self.objective(x)),
            "stationarity": float(self.hypergradient(x).norm()),
            "distance_to_optimum": float((x - self.optimum).norm()),
        }
        if view.inner is not None:
            measures["inner_distance"] = float((view.inner.double().cpu() - self.inner(x)).norm())
        return measures


def inner_quadratic(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """g_i."""
    H, C, c = (column.mean(0) for column in batch.columns)
    return 0.5 * y @ H @ y - y @ (C @ x + c)


def outer_quadratic(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """f_i."""
    a, e, rho = batch.columns
    return 0.5 * ((y - a).square().sum(1) + rho * (x - e).square().sum(1)).mean()


def nested_quadratic(
    context: Context,
    *,
    clients: Count = 10,
    dimension: Count = 6,
    inner_dimension: Count = 8,
    condition: Annotated[float, Field(ge=1.0)] = 5.0,
    heterogeneity: Positive = 1.0,
) -> NestedProblem:
    """Random bilevel quadratics whose y*(x), f(x), ∇f(x) and x* are known: ground truth for tests.

    Args:
        dimension: length of the outer variable x.
        inner_dimension: length of the inner variable y.
        condition: largest eigenvalue of the H_i; the smallest is at least 1.
        heterogeneity: spread of the linear terms over the clients.

    Example:
        >>> from coterie.problems import Context
        >>> problem = nested_quadratic(Context(0), clients=3)
        >>> float(problem.exact.hypergradient(problem.exact.optimum).norm()) < 1e-9
        True
    """
    draw = Draw.of(context.seed).phase("nested-quadratic")
    ids, p, d = torch.arange(clients), inner_dimension, dimension

    def normal(name: str, *shape: int) -> Tensor:
        return draw.phase(name).client(ids).normal(*shape, dtype=torch.float64)

    spectra = condition ** draw.phase("spectrum").client(ids).uniform(p, dtype=torch.float64)
    bases = torch.linalg.qr(normal("basis", p, p)).Q
    form = NestedForm(
        H=bases * spectra[:, None, :] @ bases.mT,
        C=normal("map", p, d) / d**0.5,
        c=heterogeneity * normal("shift", p),
        a=heterogeneity * normal("goal", p),
        e=heterogeneity * normal("anchor", d),
        rho=0.5 + draw.phase("pull").client(ids).uniform(1, dtype=torch.float64)[:, 0],
    )
    return quadratic_problem(form, context)


def quadratic_problem(form: NestedForm, context: Context) -> NestedProblem:
    """The problem of a closed form, started at zero."""
    m = len(form.H)
    return Nested(inner_quadratic, outer_quadratic).on(
        [(form.H[i : i + 1], form.C[i : i + 1], form.c[i : i + 1]) for i in range(m)],
        [(form.a[i : i + 1], form.e[i : i + 1], form.rho[i : i + 1]) for i in range(m)],
        x=torch.zeros(form.e.shape[1]),
        y=torch.zeros(form.c.shape[1]),
        measures=lambda view: {},
        exact=form,
        **context.tensor_options,
    )
