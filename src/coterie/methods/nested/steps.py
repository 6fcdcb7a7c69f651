"""Steps that need no tuning: a rule from curvatures that are estimated over the federation before the first round.

    L, μ    largest and least eigenvalue of ∇²_yy g, by Lanczos' method: one Hessian product per exchange
    L_f     curvature of f along y, from the gradients at the start and after a Newton step in y
    K       largest curvature of h(x) = f(x, y*(x)), by power iteration on the derivative of the hypergradient

    inner step  ρ = 1/L                            contracts y and v by 1 − 1/κ per step, κ = L/μ
    outer step  γ = 1/((1/θ + κ/T) K)              gradient descent on h, slowed down by the lag of y and v

y and v trail their targets by about κ steps, that is κ/T outer steps where there are T inner steps for each, and a
moving average of weight θ trails by 1/θ. On quadratics, γ = 1/K is stable without a lag, and the loop of x → y → v → x
is stable up to about 1.7 times the γ above for every κ.

The estimates use all rows of the clients of the first round, and no randomness of the run. They are rounded to two
digits, so that the last bits of a machine do not matter, and kept in the state: a resumed run does not repeat them.
They start from what y and x start from; a problem that is much more curved elsewhere needs a step by hand.
"""

from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from coterie.errors import RunError
from coterie.methods.base import Draw, Federation, View, personal_models
from coterie.methods.nested.works import hessian_product, joint_directions
from coterie.numerics import conjugate_gradients
from coterie.numerics.spectrum import extreme_eigenvalues
from coterie.settings import Positive

Step = Positive | Literal["auto"]

PRODUCTS = 10  # of Lanczos' method, and of every system at most
TOLERANCE = 0.01  # of the systems; the estimates need no more
ITERATIONS = 2  # of the power iteration on the derivative of the hypergradient
CONDITION = 100.0  # the largest κ that the rule assumes; a singular inner problem has none


class Curvature(NamedTuple):
    """The estimates: L, μ, L_f and K. All are 0 before they are made, and stay so where no step asks for them."""

    inner: float = 0.0
    least: float = 0.0
    goal: float = 0.0
    outer: float = 0.0

    @property
    def condition(self) -> float:
        """κ = L/μ, at least 1 and at most `CONDITION`."""
        return max(1.0, self.inner / max(self.least, self.inner / CONDITION))


class Iterate(Protocol):
    """The state of a method whose steps are chosen by a `StepRule`: x, y, the kind of problem, and the estimates."""

    @property
    def x(self) -> Tensor:
        """The outer variable."""

    @property
    def y(self) -> Tensor:
        """The inner variable, empty for single-level problems."""

    @property
    def kind(self) -> str:
        """The kind of problem."""

    @property
    def curvature(self) -> Curvature:
        """The estimates, or zeros before the first round."""


class StepRule(NamedTuple):
    """How the two steps of a nested method are chosen.

    Args:
        step: ρ, or "auto".
        outer_step: γ, or "auto".
        inner_steps: T, inner steps per outer step.
        averaging: θ, the weight of the newest term in a moving average of the outer direction; 1 without one.
        share: the part of both steps that is taken, below 1 where the directions are noisy or steps are local.
    """

    step: float | str
    outer_step: float | str
    inner_steps: int = 1
    averaging: float = 1.0
    share: float = 1.0

    def estimated(self, fed: Federation, s: Iterate, *, also: bool = False) -> Curvature:
        """The estimates of the state, or new ones where a step needs them and there are none.

        At most 80 exchanges, once, and far fewer where κ is small. None where both steps are numbers.

        Args:
            fed: the clients of the first round.
            s: the state.
            also: whether another setting needs them, too.
        """
        if not (also or "auto" in (self.step, self.outer_step)) or s.curvature.outer > 0.0:
            return s.curvature
        return estimated_curvature(fed, s.x, s.y, s.kind)

    def sizes(self, curvature: Curvature) -> tuple[float, float]:
        """ρ and γ."""
        rho, gamma = self.step, self.outer_step
        if isinstance(rho, str):
            rho = self.share / curvature.inner
        if isinstance(gamma, str):
            lag = 1.0 / self.averaging + curvature.condition / self.inner_steps
            gamma = self.share / (lag * curvature.outer)
        return rho, gamma

    def record(self, curvature: Curvature) -> dict[str, float]:
        """The steps that were chosen, by the names of their settings."""
        if curvature.outer == 0.0:
            return {}
        given = {"step": self.step, "outer_step": self.outer_step}
        sizes = zip(given, self.sizes(curvature), strict=True)
        return {name: size for name, size in sizes if given[name] == "auto"}

    def view(self, s: Iterate) -> View:
        """x is the model, y the inner variable; the record has the steps that were chosen."""
        return View(personal_models(s.x), inner=s.y if len(s.y) else None, more=self.record(s.curvature))


class Oracle(NamedTuple):
    """Directions and Hessian products over all rows of the clients."""

    fed: Federation
    kind: str
    draw: Draw

    def directions(self, x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(D_y, D_v, D_x). One exchange."""
        found: tuple[Tensor, Tensor, Tensor] = self.fed.mean(joint_directions, (x, y, v), draw=self.draw, batch="all")
        return found

    def product(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """∇²_yy g v. One exchange, none where ∇²_yy g is the identity."""
        if self.kind == "compositional":
            return v
        found: Tensor = self.fed.mean(hessian_product, (x, y, v), draw=self.draw, batch="all")
        return found

    def solve(self, x: Tensor, y: Tensor, b: Tensor) -> Tensor:
        """≈ [∇²_yy g]⁻¹ b by conjugate gradients."""
        if self.kind == "compositional":
            return b
        return conjugate_gradients(partial(self.product, x, y), b, steps=PRODUCTS, tolerance=TOLERANCE).x


def indirect(kind: str, y: Tensor) -> Tensor:
    """v⁰ = 0, empty where a problem has no indirect term."""
    return torch.zeros_like(y) if kind in ("bilevel", "compositional") else y.new_zeros(0)


def estimated_curvature(fed: Federation, x: Tensor, y: Tensor, kind: str) -> Curvature:
    """L, μ, L_f and K at the start, rounded to two digits."""
    fixed = Draw.of(0, device=x.device).phase("curvature")  # not the run's own: every seed gets the same steps
    oracle, v = Oracle(fed, kind, fixed), indirect(kind, y)
    d_y, b, _ = oracle.directions(x, y, v)
    inner, least = _inner_curvature(oracle, x, y, d_y, fixed)
    near, b_near = _nearer(oracle, x, y, d_y, inner) if len(y) else (y, b)
    distance = float((near - y).norm())
    goal = float((b_near - b).norm()) / distance if distance > 0.0 else 0.0
    v = -oracle.solve(x, near, b_near) if len(v) else v
    outer = _outer_curvature(oracle, x, near, v, fixed)
    return Curvature(*(float(f"{value:.2g}") for value in (inner, least, goal, outer)))


def _inner_curvature(oracle: Oracle, x: Tensor, y: Tensor, d_y: Tensor, draw: Draw) -> tuple[float, float]:
    """L and μ; an inner problem that cannot be strongly convex is refused."""
    if oracle.kind in ("compositional", "single-level"):
        return 1.0, 1.0
    start = draw.phase("inner").normal(len(y), dtype=y.dtype)
    found = extreme_eigenvalues(partial(oracle.product, x, y), start, products=PRODUCTS)
    size = max(abs(found.least), abs(found.largest))
    if found.least < -size * float(torch.finfo(y.dtype).eps) ** 0.5:
        raise RunError(
            f"the inner loss is not convex in y at the start: its curvature is {found.least:.3g} along one direction "
            f"and {found.largest:.3g} along another, so that y*(x) is no minimiser and steps cannot be chosen. Add a "
            "ridge to the inner loss (problem.ridge where there is one), start nearer to a minimum, or give numbers "
            "for method.step and method.outer_step, which skips this check."
        )
    if size == 0.0 and bool(d_y.any()):
        raise RunError(
            "the inner loss is linear in y at the start: its Hessian is 0 and its gradient is not, so that it has no "
            "minimiser. Add a ridge to the inner loss (problem.ridge where there is one), or check that it depends on "
            "y as you mean it."
        )
    if size == 0.0:  # constant in y: any step will do
        return 1.0, 1.0
    return found.largest + found.largest_error, max(0.0, found.least - found.least_error)


def _nearer(oracle: Oracle, x: Tensor, y: Tensor, d_y: Tensor, inner: float) -> tuple[Tensor, Tensor]:
    """A point nearer to y*(x), and ∇_y f there: a Newton step, or a gradient step where that does not shrink ∇_y g."""
    v = indirect(oracle.kind, y)
    near = y - oracle.solve(x, y, d_y)
    after, b, _ = oracle.directions(x, near, v)
    if float(after.norm()) <= float(d_y.norm()):
        return near, b
    near = y - d_y / inner
    return near, oracle.directions(x, near, v)[1]


def _outer_curvature(oracle: Oracle, x: Tensor, y: Tensor, v: Tensor, draw: Draw) -> float:
    """K = ‖∂h/∂x‖ at y ≈ y*(x) and v ≈ v*(x), where h is the hypergradient.

    Along d, y moves by y' with ∇²_yy g y' = −∂D_y/∂x d, then v by v' with ∇²_yy g v' = −∂D_v/∂(x, y) (d, y'), and h by
    h' = ∂D_x/∂(x, y, v) (d, y', v'). The partial derivatives are differences; the systems are solved for y' and v'
    themselves, so that their errors are not divided by the small ε.
    """
    at = oracle.directions(x, y, v)
    epsilon = float(torch.finfo(x.dtype).eps) ** (1 / 3) * (1.0 + float(x.norm()))

    def change(part: int, *point: Tensor) -> Tensor:
        return (oracle.directions(*point)[part] - at[part]) / epsilon

    def derivative(d: Tensor) -> Tensor:
        moved, y_d, v_d = x + epsilon * d, y, v
        if len(y):
            y_d = y - epsilon * oracle.solve(x, y, change(0, moved, y, v))
        if len(v):
            v_d = v - epsilon * oracle.solve(x, y, change(1, moved, y_d, v))
        return change(2, moved, y_d, v_d)

    d, largest = at[2], 0.0
    for _ in range(ITERATIONS):
        d = d / d.norm() if bool(d.any()) else _direction(x, draw)
        d = derivative(d)
        largest = max(largest, float(d.norm()))
    return largest or 1.0  # h is linear: any step will do


def _direction(x: Tensor, draw: Draw) -> Tensor:
    """A unit vector, for where the hypergradient is 0."""
    d = draw.phase("outer").normal(len(x), dtype=x.dtype)
    return d / d.norm()
