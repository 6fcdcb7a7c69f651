"""LASSO through a sketch, and its derivative: y(x) = argmin_y ½‖Sy − x‖² + β‖y‖₁, matrix-free.

y solves y = Q_{γβ}(y + γSᵀ(x − Sy)), Q the soft threshold. On the support U = {|y + γSᵀ(x − Sy)| > γβ} that is a linear
equation, so y moves with x as ∂y/∂x = (S_UᵀS_U)⁻¹S_Uᵀ = S_U⁺ and stays 0 elsewhere. For β = 0 and p < d the solution is
not unique; the one nearest to a start y₀ is y₀ + S⁺(x − Sy₀), and ∂y/∂x = S⁺. Both pull a vector back by the same
formula, (∂y/∂x)ᵀv = (S_Uᵀ)⁺v, with U everything in the second case.

Everything here takes a fixed number of steps and branches on no value, so it runs under `vmap`; rows that have
converged stand still.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.numerics.linear import Matvec
from coterie.numerics.proximal import soft_threshold
from coterie.numerics.roots import square_root
from coterie.numerics.sketches import Sketch


class LassoPoint(NamedTuple):
    """y, its support [d] bool, and how far y is from optimal: ‖y − y⁺‖_∞/γ for one more proximal step to y⁺."""

    y: Tensor
    support: Tensor
    gap: Tensor


def fixed_conjugate_gradients(matvec: Matvec, b: Tensor, *, steps: int) -> Tensor:
    """H⁺b for symmetric H ≥ 0 and b in its range, by so many steps of conjugate gradients from 0."""
    x, r, p = torch.zeros_like(b), b, b
    eps = torch.finfo(b.dtype).eps
    rr = b.square().sum()
    floor, largest = rr * (8 * eps) ** 2, torch.zeros_like(rr)  # what is left below the floor is rounding
    for _ in range(steps):
        hp = matvec(p)
        curvature, length = (p * hp).sum(), p.square().sum()
        largest = torch.maximum(largest, curvature / length.clamp(min=torch.finfo(b.dtype).tiny))
        # a direction that H hardly sees is not in its range: also rounding
        active = (rr > floor) & (curvature > eps * largest * length)
        alpha = torch.where(active, rr / torch.where(active, curvature, 1.0), 0.0)
        x, r = x + alpha * p, r - alpha * hp
        new = torch.where(active, r.square().sum(), rr)
        p = torch.where(active, r + new / torch.where(active, rr, 1.0) * p, p)
        rr = new
    return x


def safe_step(S: Sketch, step: float | None) -> float:
    """γ, by default the largest safe one, 1/‖S‖²; a larger one is refused, because the decode would not converge."""
    largest = 1.0 / S.norm_squared
    if step is not None and step > largest * (1 + 1e-6):
        raise UsageError(
            f"a decode step of {step:g} is above 1/‖S‖² = {largest:.4g}, where proximal gradient need not converge; "
            f"lower it, or leave it out to take {largest:.4g}."
        )
    return largest if step is None else step


def lasso(
    S: Sketch, x: Tensor, penalty: float, *, steps: int, step: float | None = None, start: Tensor | None = None
) -> LassoPoint:
    """y(x) for β = penalty > 0 by accelerated proximal gradient (FISTA), restarted where momentum points uphill."""
    gamma = safe_step(S, step)

    def ahead(z: Tensor) -> Tensor:
        return z + gamma * S.adjoint(x - S.apply(z))

    y = x.new_zeros(S.dimension) if start is None else start
    z, t = y, x.new_ones(())
    for _ in range(steps):
        new = soft_threshold(ahead(z), gamma * penalty)
        uphill = ((z - new) * (new - y)).sum() > 0.0
        t = torch.where(uphill, 1.0, t)
        following = 0.5 * (1.0 + square_root(1.0 + 4.0 * t.square()))
        z = torch.where(uphill, new, new + (t - 1.0) / following * (new - y))
        y, t = new, following
    u = ahead(y)
    gap = (soft_threshold(u, gamma * penalty) - y).abs().amax() / gamma
    return LassoPoint(y, u.abs() > gamma * penalty, gap)


def lasso_support(S: Sketch, x: Tensor, y: Tensor, penalty: float, *, step: float | None = None) -> Tensor:
    """U = {|y + γSᵀ(x − Sy)| > γβ}: where the next proximal step from y is not 0."""
    gamma = safe_step(S, step)
    return (y + gamma * S.adjoint(x - S.apply(y))).abs() > gamma * penalty


def least_norm(S: Sketch, x: Tensor, *, steps: int, start: Tensor | None = None) -> Tensor:
    """The solution of Sy = x that is nearest to the start (default 0): the limit of the decode for β = 0."""
    x = x if start is None else x - S.apply(start)
    y = S.adjoint(_solve_rows(S, x, steps))
    return y if start is None else start + y


def pull_back(S: Sketch, v: Tensor, *, steps: int, support: Tensor | None = None) -> Tensor:
    """(∂y/∂x)ᵀv = (S_Uᵀ)⁺v: the w of least length that minimises ‖S_Uᵀw − v_U‖. Without a support, U is everything."""
    if support is None:
        return _solve_rows(S, S.apply(v), steps)
    kept = support.to(v)
    return fixed_conjugate_gradients(lambda w: S.apply(kept * S.adjoint(w)), S.apply(kept * v), steps=steps)


def _solve_rows(S: Sketch, x: Tensor, steps: int) -> Tensor:
    """(SSᵀ)⁻¹x."""
    if S.orthogonal:
        return x
    return fixed_conjugate_gradients(lambda w: S.apply(S.adjoint(w)), x, steps=steps)
