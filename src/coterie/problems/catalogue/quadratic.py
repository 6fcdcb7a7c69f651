"""`quadratic`: linear regression whose θ*(w), F(w), ∇F(w) and w* are known in closed form. Ground truth for tests.

Client k has rows X_k with X_kᵀX_k/n = H_k exactly and labels X_k θ_k without noise, so L_k(θ) = ½ (θ−θ_k)ᵀH_k(θ−θ_k)
and θ*(w) = (Σ w_k H_k)⁻¹ Σ w_k H_k θ_k. The target's optimum is set to θ*(w*), so F is least, and 0, at w*. With equal
Hessians (`curvature = 1`) F is convex in w.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from coterie.errors import UsageError
from coterie.numerics import Draw, project_capped_simplex
from coterie.numerics.roots import square_root
from coterie.problems.base import Context, Curvature, View
from coterie.problems.models import FlatModel
from coterie.problems.weighting import Weighting, weighting
from coterie.settings import Count


@dataclass(frozen=True)
class ClosedForm:
    """Everything about the quadratic that can be known exactly, in float64."""

    hessians: Tensor  # [K, d, d]
    optima: Tensor  # [K, d]
    target_hessian: Tensor  # [d, d]
    target_optimum: Tensor  # [d]
    weights: Tensor  # w*, [K]

    @property
    def curvature(self) -> Curvature:
        """μ and L₁ of all losses; their Hessians are constant."""
        spectra = torch.linalg.eigvalsh(torch.cat([self.hessians, self.target_hessian[None]]))
        return Curvature(float(spectra.min()), float(spectra.max()), 0.0)

    def theta(self, w: Tensor) -> Tensor:
        """θ*(w)."""
        h = torch.einsum("k,kij->ij", w.double(), self.hessians)
        # two operands at a time: with opt_einsum installed, torch would choose an order, and other bits
        c = torch.einsum("kij,kj->i", torch.einsum("k,kij->kij", w.double(), self.hessians), self.optima)
        return torch.linalg.solve(h, c)

    def objective(self, w: Tensor) -> Tensor:
        """F(w) = L_0(θ*(w))."""
        gap = self.theta(w) - self.target_optimum
        return 0.5 * gap @ self.target_hessian @ gap

    def hypergradient(self, w: Tensor) -> Tensor:
        """∇F(w), by the implicit function theorem."""
        theta = self.theta(w)
        h = torch.einsum("k,kij->ij", w.double(), self.hessians)
        adjoint = torch.linalg.solve(h, self.target_hessian @ (theta - self.target_optimum))
        gradients = torch.einsum("kij,kj->ki", self.hessians, theta - self.optima)
        return -gradients @ adjoint

    def stationarity(self, w: Tensor, cap: float = 1.0) -> Tensor:
        """‖w − Π(w − s∇F(w))‖ / s, with s = 0.001."""
        w = w.double()
        return (w - project_capped_simplex(w - 0.001 * self.hypergradient(w), cap)).norm() / 0.001

    def measure(self, view: View) -> dict[str, float]:
        """Distance to the target's optimum and, where weights are learned, F and stationarity."""
        measures = {"distance_to_optimum": float((view.model.double().cpu() - self.target_optimum).norm())}
        if view.weights is not None and view.weights.dim() == 1:
            w = view.weights.double().cpu()
            measures |= {"objective": float(self.objective(w)), "stationarity": float(self.stationarity(w))}
        return measures


def quadratic(
    context: Context,
    *,
    clients: Count = 6,
    friends: Count = 3,
    dimension: Count = 8,
    rows: Count = 40,
    curvature: Annotated[float, Field(ge=1.0)] = 1.0,
) -> Weighting:
    """Linear regressions whose θ*(w), F(w), ∇F(w) and w* are known in closed form: ground truth for tests.

    Args:
        friends: number of clients over which w* is spread; they come first.
        rows: rows per client, at least the dimension.
        curvature: largest condition number of the Hessians; with 1, F is convex in w.

    Example:
        >>> from coterie.problems import Context
        >>> problem = quadratic(Context(0), clients=4, friends=2)
        >>> float(problem.exact.objective(problem.best_weights)) < 1e-12
        True
    """
    if friends > clients:
        raise UsageError(f"problem.friends is {friends}, but there are only {clients} clients; lower it.")
    if rows < dimension:
        raise UsageError(f"problem.rows = {rows} rows cannot fix {dimension} unknowns; give at least {dimension}.")
    draw = Draw.of(context.seed).phase("quadratic")
    wide = torch.float64
    ids = torch.arange(clients + 1)
    spectra = curvature ** draw.phase("spectrum").client(ids).uniform(dimension, dtype=wide)
    bases = torch.linalg.qr(draw.phase("basis").client(ids).normal(dimension, dimension, dtype=wide)).Q
    roots = bases * square_root(spectra)[:, None, :]  # H_k = R_k R_kᵀ
    hessians = roots @ roots.mT
    optima = draw.phase("optimum").client(ids[:clients]).normal(dimension, dtype=wide)
    shares = 0.5 + draw.phase("weights").uniform(friends, dtype=wide)
    weights = torch.zeros(clients, dtype=wide)
    weights[:friends] = shares / shares.sum()
    form = ClosedForm(hessians[:clients], optima, hessians[clients], torch.zeros(dimension, dtype=wide), weights)
    form = ClosedForm(form.hessians, optima, form.target_hessian, form.theta(weights), weights)
    frames = torch.linalg.qr(draw.phase("rows").client(ids).normal(rows, dimension, dtype=wide)).Q
    inputs = rows**0.5 * frames @ roots.mT  # XᵀX/n = R Rᵀ exactly
    truths = torch.cat([optima, form.target_optimum[None]])
    labels = torch.einsum("kni,ki->kn", inputs, truths)
    net = nn.Linear(dimension, 1, bias=False)
    nn.init.zeros_(net.weight)
    return weighting(
        [(inputs[k], labels[k]) for k in range(clients)],
        (inputs[clients], labels[clients]),
        FlatModel(net),
        "squared",
        friends=friends,
        **context.tensor_options,
        exact=form,
        curvature=form.curvature,
        best_weights=form.weights,
    )
