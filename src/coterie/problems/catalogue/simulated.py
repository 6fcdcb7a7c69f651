"""`simulated`: the quadratic bilevel problem of benchopt's benchmark_bilevel, split over clients; h, ∇h and x* known.

    g(x, y) = ½ yᵀA y + ½ xᵀB x + xᵀC y + aᵀy + bᵀx         the mean over the train rows of all clients
    f(x, y) = ½ yᵀF y + ½ xᵀH x + xᵀK y + pᵀy + qᵀx         the mean over the validation rows of all clients
    y*(x) = −A⁻¹(Cᵀx + a),     J = −A⁻¹Cᵀ,     h(x) = f(x, y*(x)),     ∇²h = H + JᵀF J + K J + (K J)ᵀ

The recipe (datasets/simulated.py and gen_matrices.py there) draws g and f alike. One row has rank-one matrices:
A_i = r rᵀ with r ~ N(0, A₀), where A₀ has logarithmically spaced eigenvalues from μ to L; B_i = s sᵀ in the same way,
where one eigenvalue of B₀ is 0; C_i = U D z zᵀ Vᵀ with z ~ N(0, I), where D is spaced from μ to the size of the mixed
terms; a_i and b_i are N(0, I). Constants: μ = 0.1, L = 1, mixed terms 0.1, 100 + 100 dimensions, 1,024 rows, started
at x = −2, y = 0. A draw whose h is not convex is drawn anew, up to 20 times.

Rows are stored as the vectors (r, s, U D z, V z, a, b), so a product costs O(d). A client has fewer rows than y has
dimensions: its own g is not strongly convex, only the mean is. Deviations: orthogonal bases are uniform (there, a
random vector is completed to a basis); the seed is that of the run; ∇²h has K J + (K J)ᵀ, as the derivative demands
(there, the draw is judged with half of it).
"""

from dataclasses import dataclass
from functools import cached_property
from math import log10
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Batch
from coterie.numerics import Draw
from coterie.numerics.roots import square_root
from coterie.problems.base import Context, View
from coterie.problems.nested import Nested, NestedProblem, batch_mean
from coterie.settings import Count, Positive

DRAWS = 20
CONVEX = 1e-12  # the least eigenvalue of ∇²h
START = -2.0
LEAST_CURVATURE = 0.1  # μ, the least non-zero eigenvalue of the expected Hessians, and least mixed singular value


class Quadratic(NamedTuple):
    """½ yᵀA y + ½ xᵀB x + xᵀC y + aᵀy + bᵀx, in float64."""

    A: Tensor
    B: Tensor
    C: Tensor
    a: Tensor
    b: Tensor

    @staticmethod
    def of(rows: tuple[Tensor, ...]) -> "Quadratic":
        """The mean over all rows of all clients, each [clients, rows, …]."""
        r, s, u, v, a, b = (column.flatten(0, 1) for column in rows)
        n = len(r)
        return Quadratic(r.T @ r / n, s.T @ s / n, u.T @ v / n, a.mean(0), b.mean(0))

    def value(self, x: Tensor, y: Tensor) -> Tensor:
        """At (x, y)."""
        return 0.5 * (y @ self.A @ y + x @ self.B @ x) + x @ self.C @ y + self.a @ y + self.b @ x

    def x_gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """By x."""
        return self.B @ x + self.C @ y + self.b

    def y_gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """By y."""
        return self.A @ y + self.C.T @ x + self.a


@dataclass(frozen=True)
class ValueFunction:
    """Everything about the problem that linear solves tell, in float64."""

    g: Quadratic
    f: Quadratic

    def inner(self, x: Tensor) -> Tensor:
        """y*(x)."""
        return -torch.linalg.solve(self.g.A, self.g.C.T @ x + self.g.a)

    @cached_property
    def jacobian(self) -> Tensor:
        """J, the derivative of y*."""
        return -torch.linalg.solve(self.g.A, self.g.C.T)

    @cached_property
    def hessian(self) -> Tensor:
        """∇²h."""
        J, mixed = self.jacobian, self.f.C @ self.jacobian
        return self.f.B + J.T @ self.f.A @ J + mixed + mixed.T

    def objective(self, x: Tensor) -> Tensor:
        """h(x) = f(x, y*(x))."""
        return self.f.value(x, self.inner(x))

    def hypergradient(self, x: Tensor) -> Tensor:
        """∇h(x) = ∇_x f + Jᵀ∇_y f at y*(x)."""
        y = self.inner(x)
        return self.f.x_gradient(x, y) + self.jacobian.T @ self.f.y_gradient(x, y)

    @cached_property
    def optimum(self) -> Tensor:
        """x*: the root of the affine ∇h."""
        return torch.linalg.solve(self.hessian, -self.hypergradient(torch.zeros_like(self.f.b)))

    @cached_property
    def least(self) -> float:
        """h*."""
        return float(self.objective(self.optimum))

    def gap(self, x: Tensor) -> Tensor:
        """h(x) − h* = ½ (x − x*)ᵀ∇²h (x − x*), without the cancellation of the difference."""
        away = x - self.optimum
        return 0.5 * away @ self.hessian @ away

    def measure(self, view: View) -> dict[str, float]:
        """h(x), its gap, ‖∇h(x)‖, how far x is from x*, and y from y*(x)."""
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


def quadratic_loss(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """g or f: the mean over a batch's rows (r, s, u, v, a, b), with A_i = r rᵀ, B_i = s sᵀ and C_i = u vᵀ."""
    r, s, u, v, a, b = batch.columns
    squares = 0.5 * ((r @ y).square() + (s @ x).square())
    return batch_mean(squares + (u @ x) * (v @ y) + a @ y + b @ x, batch)


def simulated(
    context: Context,
    *,
    clients: Count = 16,
    rows: Count = 64,
    dimension: Count = 100,
    inner_dimension: Count = 100,
    curvature: Positive = 1.0,
    cross: Positive = 0.1,
    outer_cross: Positive = 0.1,
) -> NestedProblem:
    """The simulated quadratic of benchmark_bilevel, split over clients: h(x) − h* is known by linear solves.

    Args:
        rows: rows per client for each of the two losses; 16 · 64 are the benchmark's 1,024.
        dimension: length of the outer variable x.
        inner_dimension: length of the inner variable y.
        curvature: L, the largest eigenvalue of the expected Hessians.
        cross: size of the mixed term xᵀC y of g.
        outer_cross: size of the mixed term xᵀK y of f.

    Example:
        >>> from coterie.problems import Context
        >>> problem = simulated(Context(0), clients=4, rows=16, dimension=5, inner_dimension=6)
        >>> float(problem.exact.hypergradient(problem.exact.optimum).norm()) < 1e-9
        True
    """
    if clients * rows < inner_dimension:
        raise UsageError(
            f"{clients} clients with {rows} rows each give an inner Hessian of rank {clients * rows}, below "
            f"problem.inner_dimension = {inner_dimension}: y*(x) would not be unique. Raise problem.rows or "
            "problem.clients."
        )
    sizes, spectrum = (clients, rows, dimension, inner_dimension), (LEAST_CURVATURE, curvature)
    root = Draw.of(context.seed).phase("simulated")
    for attempt in range(DRAWS):
        draw = root.step(attempt)
        train, valid = (_rows(draw.phase(w), sizes, spectrum, c) for w, c in (("inner", cross), ("outer", outer_cross)))
        exact = ValueFunction(Quadratic.of(train), Quadratic.of(valid))
        if float(torch.linalg.eigvalsh(exact.hessian).min()) >= CONVEX:
            break
    else:
        raise UsageError(
            f"none of {DRAWS} draws has a convex value function; raise problem.rows, or lower problem.outer_cross."
        )
    return Nested(quadratic_loss, quadratic_loss).on(
        [tuple(column[k] for column in train) for k in range(clients)],
        [tuple(column[k] for column in valid) for k in range(clients)],
        x=torch.full((dimension,), START),
        y=torch.zeros(inner_dimension),
        measures=lambda view: {},
        exact=exact,
        **context.tensor_options,
    )


def _rows(
    draw: Draw, sizes: tuple[int, int, int, int], spectrum: tuple[float, float], cross: float
) -> tuple[Tensor, ...]:
    """The rows (r, s, u, v, a, b) of all clients for one of the two losses, each [clients, rows, …]."""
    clients, rows, d, p = sizes
    ids, least = torch.arange(clients), spectrum[0]

    def normal(name: str, *shape: int) -> Tensor:
        return draw.phase(name).client(ids).normal(rows, *shape, dtype=torch.float64)

    def basis(name: str, n: int) -> Tensor:
        return torch.linalg.qr(draw.phase(name).normal(n, n, dtype=torch.float64)).Q

    inner, outer = basis("inner basis", p), basis("outer basis", d)
    flat = torch.cat([torch.zeros(1, dtype=torch.float64), _spaced(*spectrum, d - 1)])
    z, n = normal("mixed", p), min(d, p)
    return (
        normal("inner curvature", p) * square_root(_spaced(*spectrum, p)) @ inner.T,
        normal("outer curvature", d) * square_root(flat) @ outer.T,
        z[..., :n] * _spaced(least, cross, n) @ basis("left", d)[:, :n].T,
        z @ basis("right", p).T,
        normal("inner shift", p),
        normal("outer shift", d),
    )


def _spaced(start: float, end: float, n: int) -> Tensor:
    """n numbers from start to end, logarithmically spaced."""
    return torch.logspace(log10(start), log10(end), n, dtype=torch.float64)
