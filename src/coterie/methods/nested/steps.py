"""Steps that need no tuning: chosen from a small model of the problem, which is measured before the first round.

The directions D_x, D_y, D_v of `works.directions` are linear in (x, y, v) near a point, up to second order. Ten vectors
p_j in x and ten q_j in y are sent to the clients, one per exchange, and the directions change by

                         D_x                    D_y           D_v
    along (p, 0, 0):     ℓ_xx p                 ∇²_yx g p     ℓ_yx p
    along (0, q, q):     ℓ_xy q + ∇²_xy g q     H q           ℓ_yy q + H q

where ℓ = f + vᵀ∇_y g and H = ∇²_yy g. Every vector is an image of earlier ones, so that their spans hold what is most
curved. The products of images with vectors are the model: the same matrices in at most 20 + 10 dimensions. From it

    inner step  ρ = 1/L                       L is the largest eigenvalue of H in the model, with its error added
    outer step  γ, where x, y and v together contract fastest, but at most half of where they cease to contract

for T inner steps per outer step and a moving average of weight θ. A bound such as 1/((1 + κ/T) K), with the condition
number κ of H and the curvature K of h(x) = f(x, y*(x)), would hold for the worst coupling of x with the flattest
directions of y; on most problems the model admits steps that are many times longer. Where h is not convex, the model's
negative curvatures count as positive ones.

The model uses all rows of the clients of the first round and no randomness of the run, at the start of x, and at y and
v after one Newton step each. Steps are rounded to two digits, so that the last bits of a machine do not matter, and
kept in the state: a resumed run does not repeat the exchanges. A problem that is much more curved elsewhere needs a
step by hand.
"""

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from coterie.errors import RunError
from coterie.methods.base import Draw, Federation, View, personal_models
from coterie.methods.nested.phases import supporting
from coterie.methods.nested.works import hessian_product, joint_directions
from coterie.numerics import conjugate_gradients
from coterie.problems.nested import SETS
from coterie.settings import Positive

Step = Positive | Literal["auto"]
NESTED, SUPPORTS = frozenset({"nested"}), supporting(SETS)
"""What the solvers of one loop need of a problem: two losses; x and y may be kept within sets."""

PRODUCTS = 10  # of a Newton step, at most
TOLERANCE = 0.01  # of a Newton step
VECTORS = 10  # of the model, in x and in y
CONDITION = 100.0  # the largest L/μ that the model has; a singular inner problem has none
MARGIN = 0.5  # of the longest outer step with which the model contracts


class Curvature(NamedTuple):
    """L and μ of ∇²_yy g, L_f of f in y, K of h(x) = f(x, y*(x)), and γ. All are 0 before they are estimated."""

    inner: float = 0.0
    least: float = 0.0
    goal: float = 0.0
    outer: float = 0.0
    outer_step: float = 0.0

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
        fresh: whether the outer direction is at y after the inner steps of the same round, not before them.
        share: the part of both steps that is taken, below 1 where the directions are noisy or steps are local.
    """

    step: float | str
    outer_step: float | str
    inner_steps: int = 1
    averaging: float = 1.0
    fresh: bool = False
    share: float = 1.0

    def estimated(self, fed: Federation, s: Iterate, *, also: bool = False) -> Curvature:
        """The estimates of the state, or new ones where a step needs them and there are none.

        At most 43 exchanges, once. None where both steps are numbers.

        Args:
            fed: the clients of the first round.
            s: the state.
            also: whether another setting needs them, too.
        """
        if not (also or "auto" in (self.step, self.outer_step)) or s.curvature.outer_step > 0.0:
            return s.curvature
        return self.choose(fed, s.x, s.y, s.kind)

    def choose(self, fed: Federation, x: Tensor, y: Tensor, kind: str) -> Curvature:
        """The estimates, each rounded to two digits."""
        oracle = Oracle(fed, kind, Draw.of(0, device=x.device).phase("steps"))  # every seed gets the same steps
        y, v, goal = _near_solution(oracle, x, y)
        model = measured_model(oracle, x, y, v)
        largest, least = model.inner_curvatures()
        rho = self.step if isinstance(self.step, float) else 1.0 / largest
        gamma = model.outer_step(rho, self.inner_steps, self.averaging, self.fresh)
        outer = float(torch.linalg.matrix_norm(model.outer_curvature(), 2)) or 1.0
        return Curvature(*(float(f"{value:.2g}") for value in (largest, least, goal, outer, gamma)))

    def sizes(self, curvature: Curvature) -> tuple[float, float]:
        """ρ and γ."""
        rho = self.share / curvature.inner if isinstance(self.step, str) else self.step
        gamma = self.share * curvature.outer_step if isinstance(self.outer_step, str) else self.outer_step
        return rho, gamma

    def record(self, curvature: Curvature) -> dict[str, float]:
        """The steps that were chosen, by the names of their settings."""
        if curvature.outer_step == 0.0:
            return {}
        given = {"step": self.step, "outer_step": self.outer_step}
        sizes = zip(given, self.sizes(curvature), strict=True)
        return {name: size for name, size in sizes if given[name] == "auto"}

    def view(self, s: Iterate) -> View:
        """x is the model, y the inner variable; the record has the steps that were chosen."""
        return View(personal_models(s.x), inner=s.y if len(s.y) else None, more=self.record(s.curvature))


def indirect(kind: str, y: Tensor) -> Tensor:
    """v⁰ = 0, empty where a problem has no indirect term."""
    return torch.zeros_like(y) if kind in ("bilevel", "compositional") else y.new_zeros(0)


class Oracle(NamedTuple):
    """Directions and Hessian products over all rows of the clients."""

    fed: Federation
    kind: str
    draw: Draw

    def directions(self, x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(D_y, D_v, D_x). One exchange."""
        found: tuple[Tensor, Tensor, Tensor] = self.fed.mean(joint_directions, (x, y, v), draw=self.draw, batch="all")
        return found

    def solve(self, x: Tensor, y: Tensor, b: Tensor) -> Tensor:
        """≈ [∇²_yy g]⁻¹ b by conjugate gradients. One exchange per product; none where ∇²_yy g is the identity."""
        if self.kind == "compositional":
            return b

        def product(v: Tensor) -> Tensor:
            found: Tensor = self.fed.mean(hessian_product, (x, y, v), draw=self.draw, batch="all")
            return found

        return conjugate_gradients(product, b, steps=PRODUCTS, tolerance=TOLERANCE).x


def _near_solution(oracle: Oracle, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """y and v after a Newton step each, and L_f = ‖∇_y f(x, y') − ∇_y f(x, y)‖/‖y' − y‖.

    y stays where the step does not shrink ∇_y g.
    """
    v = indirect(oracle.kind, y)
    if not len(y):
        return y, v, 0.0
    d_y, b, _ = oracle.directions(x, y, v)
    near = y - oracle.solve(x, y, d_y)
    after, b_near, _ = oracle.directions(x, near, v)
    distance = float((near - y).norm())
    goal = float((b_near - b).norm()) / distance if distance > 0.0 else 0.0
    if float(after.norm()) <= float(d_y.norm()):
        y, b = near, b_near
    return y, -oracle.solve(x, y, b) if len(v) else v, goal


class Model(NamedTuple):
    """The derivatives of the directions on the spans of the p_j and the q_j.

    Args:
        xx: of D_x by x.
        xy: of D_x by y.
        yx: of D_y by x; its transpose is that of D_x by v.
        yy: H, of D_y by y and of D_v by v.
        vx: of D_v by x; empty where there is no v.
        vy: of D_v by y; empty where there is no v.
        gradient: ∇_y g in the span, for errors.
        error: how far an eigenvalue of the whole H is at most from the largest one here.
    """

    xx: Tensor
    xy: Tensor
    yx: Tensor
    yy: Tensor
    vx: Tensor
    vy: Tensor
    gradient: float
    error: float

    def inner_curvatures(self) -> tuple[float, float]:
        """L and μ; an inner problem that cannot be strongly convex is refused."""
        if not len(self.yy):
            return 1.0, 1.0
        values = torch.linalg.eigvalsh(self.yy)
        least, largest = float(values[0]), float(values[-1])
        size = max(abs(least), abs(largest))
        if least < -1e-3 * size:
            raise RunError(
                f"the inner loss is not convex in y near the start: its curvature is {least:.3g} along one direction "
                f"and {largest:.3g} along another, so that y*(x) is no minimiser and steps cannot be chosen. Add a "
                "ridge to the inner loss (problem.ridge where there is one), start nearer to a minimum, or give "
                "numbers for method.step and method.outer_step, which skips this check."
            )
        if size == 0.0 and self.gradient > 0.0:
            raise RunError(
                "the inner loss is linear in y near the start: its Hessian is 0 and its gradient is not, so that it "
                "has no minimiser. Add a ridge to the inner loss (problem.ridge where there is one), or check that it "
                "depends on y as you mean it."
            )
        if size == 0.0:  # constant in y: any step will do
            return 1.0, 1.0
        return largest + self.error, max(0.0, least)

    def outer_curvature(self) -> Tensor:
        """The Hessian of h(x) = f(x, y*(x)) in the span."""
        G, drive, back = self._coupled()
        return self.xx - back @ torch.linalg.solve(G, drive) if len(G) else self.xx

    def outer_step(self, rho: float, inner_steps: int = 1, averaging: float = 1.0, fresh: bool = False) -> float:
        """γ: where the model contracts fastest, but at most `MARGIN` times the longest with which it contracts.

        Args:
            rho: the inner step.
            inner_steps: T.
            averaging: θ.
            fresh: whether the outer direction is at y and v after the inner steps.
        """
        total, (G, drive, back) = self.outer_curvature(), self._coupled()
        size = float(torch.linalg.matrix_norm(total, 2))
        if size == 0.0:  # h is linear: any step will do
            return 1.0
        xx, inner = self.xx + _made_convex(total), torch.eye(len(G), dtype=torch.float64) - rho * G
        whole, moved = inner, -rho * drive
        for _ in range(inner_steps - 1):
            whole, moved = inner @ whole, inner @ moved - rho * drive
        if fresh:
            xx, back = xx + back @ moved, back @ whole
        sizes = [10.0 ** (0.05 * k) / size for k in range(-80, 31)]
        radii = [self._radius(whole, moved, xx, back, gamma, averaging) for gamma in sizes]
        limit = next((gamma for gamma, radius in zip(sizes, radii, strict=True) if radius >= 1.0), sizes[-1])
        admitted = [(radius, gamma) for gamma, radius in zip(sizes, radii, strict=True) if gamma <= MARGIN * limit]
        return min(admitted)[1] if admitted else sizes[0]

    def _coupled(self) -> tuple[Tensor, Tensor, Tensor]:
        """How (D_y, D_v) depend on (y, v) and on x, and D_x on (y, v). The Hessian's condition is at most the limit."""
        values, vectors = torch.linalg.eigh(self.yy)
        if len(values):
            values = values.clamp(min=max(float(values[-1]) / CONDITION, 1e-300))
        H = vectors * values @ vectors.T
        if not len(self.vx):
            return H, self.yx, self.xy
        G = torch.cat([torch.cat([H, torch.zeros_like(H)], 1), torch.cat([self.vy, H], 1)])
        return G, torch.cat([self.yx, self.vx]), torch.cat([self.vx.T, self.yx.T], 1)

    @staticmethod
    def _radius(whole: Tensor, moved: Tensor, xx: Tensor, back: Tensor, gamma: float, averaging: float) -> float:
        """The spectral radius of (x, u, h) ↦ (x − γ h', whole u + moved x, h'), h' = (1 − θ) h + θ (xx x + back u).

        With a moving average, θ < 1, x moves along the earlier h instead of h'.
        """
        eye, nothing = torch.eye(len(xx), dtype=torch.float64), torch.zeros_like(moved)
        newest = [averaging * xx, averaging * back, (1.0 - averaging) * eye]
        along = newest if averaging == 1.0 else [torch.zeros_like(xx), nothing.T, eye]
        by_x, by_u, by_h = (-gamma * part for part in along)
        rows = [[eye + by_x, by_u, by_h], [moved, whole, nothing], newest]
        return float(torch.linalg.eigvals(torch.cat([torch.cat(row, 1) for row in rows])).abs().max())


def _made_convex(total: Tensor) -> Tensor:
    """What makes the curvature of h positive, by the absolute values of its eigenvalues, none of them nearly 0."""
    values, vectors = torch.linalg.eigh(0.5 * (total + total.T))
    wanted = values.abs().clamp(min=1e-3 * float(values.abs().max()))
    return vectors * (wanted - values) @ vectors.T


def measured_model(oracle: Oracle, x: Tensor, y: Tensor, v: Tensor) -> Model:
    """The model at a point. One exchange, and one per vector."""
    at = oracle.directions(x, y, v)
    epsilon = float(torch.finfo(x.dtype).eps) ** (1 / 3)
    by_x, by_y = (epsilon * (1.0 + float(point.norm())) for point in (x, y))

    def change(size: float, *point: Tensor) -> list[Tensor]:
        return [(new - old) / size for new, old in zip(oracle.directions(*point), at, strict=True)]

    P, Q = Basis(x, oracle.draw.phase("x")), Basis(y, oracle.draw.phase("y"))
    along_p: list[list[Tensor]] = []
    along_q: list[list[Tensor]] = []
    next_p, next_q = [at[2]], [Q.fallback()] if len(y) else []
    for _ in range(VECTORS):
        if (p := P.add(next_p)) is not None:
            along_p.append(change(by_x, x + by_x * p, y, v))
            next_p, next_q = [along_p[-1][2]], [*next_q, along_p[-1][0]]
        if (q := Q.add(next_q)) is not None:
            d_y, d_v, d_x = change(by_y, x, y + by_y * q, v + by_y * q if len(v) else v)
            along_q.append([d_y, d_v - d_y if len(v) else d_v, d_x])
            next_p, next_q = [*next_p, d_x], [d_y]

    def product(basis: Basis, images: list[list[Tensor]], part: int) -> Tensor:
        return basis.matrix() @ _stacked([image[part] for image in images], basis.like).T

    yy, xx, none = product(Q, along_q, 0), product(P, along_p, 2), torch.zeros(0, dtype=torch.float64)
    yy = 0.5 * (yy + yy.T)
    return Model(
        xx=0.5 * (xx + xx.T),
        xy=product(P, along_q, 2),
        yx=product(Q, along_p, 0),
        yy=yy,
        vx=product(Q, along_p, 1) if len(v) else none,
        vy=product(Q, along_q, 1) if len(v) else none,
        gradient=float(at[0].norm()),
        error=_largest_error(Q, yy, along_q),
    )


def _stacked(vectors: list[Tensor], like: Tensor) -> Tensor:
    """The vectors as rows, for the server's own arithmetic."""
    rows = torch.stack(vectors) if vectors else like.new_zeros(0, len(like))
    return rows.double().cpu()


def _largest_error(Q: "Basis", yy: Tensor, along_q: list[list[Tensor]]) -> float:
    """‖H u − λ u‖ for the largest eigenvalue λ of the model, with u in the span."""
    if not len(yy):
        return 0.0
    values, vectors = torch.linalg.eigh(yy)
    images = _stacked([image[0] for image in along_q], Q.like)
    return float((vectors[:, -1] @ images - values[-1] * vectors[:, -1] @ Q.matrix()).norm())


class Basis:
    """Orthonormal vectors of one variable, which grows by directions that are not yet in its span."""

    def __init__(self, like: Tensor, draw: Draw) -> None:
        self.like, self.draw = like, draw
        self.vectors: list[Tensor] = []

    def add(self, candidates: list[Tensor]) -> Tensor | None:
        """The unit vector of the sum of the directions, or of a fixed one, beyond the span; None where it is full."""
        if len(self.vectors) >= len(self.like):
            return None
        units = [d / d.norm() for d in candidates if bool(d.any())]
        tried = [torch.stack(units).sum(0)] if units else []
        for d in [*tried, self.fallback()]:
            beyond = d
            for _ in range(2):  # twice is enough to keep the basis orthogonal
                for u in self.vectors:
                    beyond = beyond - (u @ beyond) * u
            if float(beyond.norm()) > 1e-3 * float(d.norm()):
                self.vectors.append(beyond / beyond.norm())
                return self.vectors[-1]
        return None

    def fallback(self) -> Tensor:
        """A vector that no other knows of."""
        return self.draw.step(len(self.vectors)).normal(len(self.like), dtype=self.like.dtype)

    def matrix(self) -> Tensor:
        """The vectors as rows."""
        return _stacked(self.vectors, self.like)
