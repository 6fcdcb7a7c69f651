"""The paper's algorithms 2 to 6, each as a function of the federation. FedNest and its variants are built from them.

Rounds are upload barriers, one per verb:

    FedInn   2        mean q_i, mean y_i
    LFedInn  1        mean y_i
    FedIHGP  1 + N    mean ∇_y f_i, then a product with the mean Hessian each time (series = deterministic or cg)
             1 + N'   with the random truncation, N' ≤ N − 1
    FedOut   2        mean h_i, mean x_i; FedIHGP before it
    LFedOut  1        mean x_i

So an epoch of FedNest with T inner rounds takes 2T + (1 + N) + 2 = 2T + N + 3. The deterministic series needs N − 1
products for its N terms; the N-th measures its residual, ‖b − Hp‖/‖b‖ = ‖(I − H/ℓ)ᴺ b‖/‖b‖, and so shows whether it
converges at all. Minimax and single-level problems have no indirect term, hence no FedIHGP; for compositional ones the
Hessian is the identity and p = mean ∇_y f_i is exact.
"""

from collections.abc import Callable, Iterator
from itertools import count
from math import ceil, inf, log10
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.errors import RunError, UsageError
from coterie.federation import Tree, Work
from coterie.methods.base import Draw, Federation, Method, View
from coterie.methods.nested import works
from coterie.methods.nested.works import Pace
from coterie.methods.shared.works import LocalSteps
from coterie.numerics import conjugate_gradients
from coterie.numerics.linear import Matvec
from coterie.problems.nested import NestedProblem
from coterie.settings import Count

StepCounts = Count | list[Count]
Series = Literal["deterministic", "random", "cg"]
LocalSeries = Literal["deterministic", "random"]
Phase = Callable[..., Tensor]  # `fedinn`, `lfedinn`, `fedout` or `lfedout` with its settings
GROWTH = 2.0  # a series may grow a little where the inner loss is not quite convex


class NestedState(NamedTuple):
    """Outer x, inner y, and the kind of problem, which decides on the indirect term."""

    x: Tensor
    y: Tensor
    kind: str


class Inverse(NamedTuple):
    """How H⁻¹b is approximated: series, its N terms, ℓ ≥ ‖H‖, rows per product, whether each has its own clients."""

    series: Series
    terms: int
    lipschitz: float
    batch: int | str
    redraw: bool = False


def start(problem: NestedProblem, n: int, *paces: Pace) -> NestedState:
    """The start of a nested problem; every list of local steps must fit the number of clients."""
    check_paces(n, *paces)
    return NestedState(problem.start, problem.inner_start, problem.task.kind)


def check_paces(n: int, *paces: Pace) -> None:
    """A list of local steps has one number per client."""
    for steps in paces:
        if isinstance(steps, list) and len(steps) != n:
            raise UsageError(f"a list of {len(steps)} local step numbers was given for {n} clients; give {n}, or one.")


def view(s: NestedState) -> View:
    """x is the model, y the inner variable."""
    return View(s.x, inner=None if s.kind == "single-level" else s.y)


def clients_of(fed: Federation, redraw: bool, draw: Draw) -> Federation:
    """The clients of a phase: those of the round, or a sample of its own."""
    return fed.sample(draw=draw) if redraw else fed


def stepped(fed: Federation, what: Work, shared: tuple[Any, ...], local: LocalSteps, draw: Draw, **more: Any) -> Tree:
    """The mean over clients after their local steps; each receives its own τ behind the shared values. One round."""
    tau, steps = works.pace(local.steps, shared[0])
    settings = {**local._asdict(), **more, "steps": steps}
    return fed.mean(what, (*shared, tau), draw=draw.phase("walk"), **settings)


def fedinn(fed: Federation, x: Tensor, y: Tensor, draw: Draw, *, local: LocalSteps, anchor: int | str) -> Tensor:
    """Alg. 4: y⁺ by corrected local steps. Two rounds."""
    q = fed.mean(works.inner_gradient, (x, y), draw=draw.phase("anchor"), batch=anchor)
    return stepped(fed, works.inner_svrg_steps, (x, y, q), local, draw)


def lfedinn(fed: Federation, x: Tensor, y: Tensor, draw: Draw, *, local: LocalSteps) -> Tensor:
    """Alg. 6: y⁺ by plain local steps. One round."""
    return stepped(fed, works.inner_sgd_steps, (x, y), local, draw)


def fedihgp(fed: Federation, s: NestedState, inverse: Inverse, draw: Draw) -> Tensor | None:
    """Alg. 3: p ≈ [∇²_yy g]⁻¹ ∇_y f at (x, y), or None where the problem has no indirect term."""
    if s.kind in ("minimax", "single-level"):
        return None
    at = draw.phase("goal")
    first = clients_of(fed, inverse.redraw, at)  # S_0
    b: Tensor = first.mean(works.outer_y_gradient, (s.x, s.y), draw=at, batch=inverse.batch)
    if s.kind == "compositional":
        return b
    draws = product_draws(inverse, draw)

    def product(v: Tensor) -> Tensor:
        at = next(draws)
        active = clients_of(fed, inverse.redraw, at)  # S_n
        return active.mean(works.hessian_product, (s.x, s.y, v), draw=at, batch=inverse.batch)

    return solve(product, b, inverse, draw)


def product_draws(inverse: Inverse, draw: Draw) -> Iterator[Draw]:
    """Rows (and clients) anew for every product of a series, but not of conjugate gradients, which need one matrix."""
    products = draw.phase("product")
    return (products if inverse.series == "cg" else products.step(n) for n in count())


def solve(product: Matvec, b: Tensor, inverse: Inverse, draw: Draw) -> Tensor:
    """≈ H⁻¹b with at most N products."""
    if inverse.series == "cg":
        return conjugate_gradients(product, b, steps=inverse.terms, tolerance=torch.finfo(b.dtype).eps).x
    if inverse.series == "random":
        return _random_term(product, b, inverse, draw)
    return _series(product, b, inverse)


def _series(product: Matvec, b: Tensor, inverse: Inverse) -> Tensor:
    """(1/ℓ) Σ_{n<N} (I − H/ℓ)ⁿ b, with N products as the paper counts; the last, of the last term, adds nothing."""
    first = term = b / inverse.lipschitz
    total = term
    for n in range(inverse.terms):
        hv = product(term)
        if n + 1 < inverse.terms:
            term = _next(hv, term, first, inverse.lipschitz)
            total = total + term
    return total


def _random_term(product: Matvec, b: Tensor, inverse: Inverse, draw: Draw) -> Tensor:
    """(N/ℓ)(I − H/ℓ)^N' b with N' uniform on {0 … N − 1}: unbiased for the series of N terms."""
    first = term = inverse.terms / inverse.lipschitz * b
    for _ in range(int(draw.phase("truncation").integers(inverse.terms, 1))):
        term = _next(product(term), term, first, inverse.lipschitz)
    return term


def _next(hv: Tensor, term: Tensor, first: Tensor, lipschitz: float) -> Tensor:
    """(I − H/ℓ) term; terms that grow are explained, for then the series does not converge."""
    after = term - hv / lipschitz
    growth = float(after.norm()) / max(float(first.norm()), 1e-300)
    if growth > GROWTH:
        raise_growth(lipschitz, growth, float(hv @ hv) / (float(term @ hv) or -1e-300))
    return after


def raise_growth(lipschitz: float, growth: float, curvature: float) -> None:
    """ℓ is too small, or the inner loss is not convex. ‖Hv‖²/vᵀHv never exceeds the largest eigenvalue of H ≥ 0."""
    if lipschitz < curvature < inf:
        remedy = _rounded_up(1.2 * curvature)
        raise RunError(
            f"method.lipschitz = {lipschitz:g} is too small: the inner Hessian has a curvature of at least "
            f"{curvature:.3g}, so the terms of the series grow ({growth:.3g}-fold) instead of shrinking. "
            f"Set method.lipschitz={remedy:g}, or method.series=cg, which needs none."
        )
    raise RunError(
        f"the terms of the series grow ({growth:.3g}-fold) because the inner loss is not convex in y at this point. "
        "Add a ridge to the inner loss (problem.ridge where there is one), lower method.terms, raise "
        "method.lipschitz, or set method.series=cg, which stops there."
    )


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (ceil(log10(value)) - 2)
    return ceil(value / unit) * unit


def fedout(fed: Federation, s: NestedState, draw: Draw, *, local: LocalSteps, inverse: Inverse) -> Tensor:
    """Alg. 2: x⁺ by local steps along the global hypergradient. Two rounds, and those of FedIHGP; none at step 0."""
    if local.step == 0.0:
        return s.x
    return stepped(fed, works.outer_svrg_steps, (s.x, s.y, global_hypergradient(fed, s, inverse, draw)), local, draw)


def global_hypergradient(fed: Federation, s: NestedState, inverse: Inverse, draw: Draw) -> Tensor:
    """h = 1/m Σ h_i ≈ ∇f(x), exact at y = y*(x) with p exact (Alg. 2, lines 3–8). One round, and those of FedIHGP."""
    p = fedihgp(fed, s, inverse, draw.phase("ihgp"))
    return fed.mean(works.hypergradient, (s.x, s.y, p), draw=draw.phase("hypergradient"), batch=inverse.batch)


def lfedout(fed: Federation, s: NestedState, draw: Draw, *, local: LocalSteps, inverse: Inverse) -> Tensor:
    """Alg. 5: x⁺ by local steps along the clients' own hypergradients. One round."""
    (x,) = with_series(fed, works.local_outer_steps, (s.x, s.y), local, inverse, draw)
    return x


def with_series(
    fed: Federation, what: Work, shared: tuple[Any, ...], local: LocalSteps, inverse: Inverse, draw: Draw, **more: Any
) -> list[Tensor]:
    """`stepped` along the clients' own hypergradients. Local series that grow are explained, by their mean."""
    series = {"series": inverse.series, "terms": inverse.terms, "lipschitz": inverse.lipschitz}
    *means, series_stats = stepped(fed, what, shared, local, draw, **series, **more)
    growth, curvature = series_stats.tolist()
    if growth > GROWTH:
        raise_growth(inverse.lipschitz, growth, curvature)
    return means


def alternating(name: str, inner: Phase, outer: Phase, inner_rounds: int, *paces: Pace, redraw: bool = False) -> Method:
    """Alg. 1: T times y ← inner(x, y), then x ← outer(x, y), with the clients of the round or each with its own."""

    def init(problem: NestedProblem, n: int) -> NestedState:
        return start(problem, n, *paces)

    def round(fed: Federation, s: NestedState, draw: Draw) -> NestedState:
        y = s.y
        if s.kind != "single-level":
            for t in range(inner_rounds):
                at = draw.phase("inner").step(t)
                y = inner(clients_of(fed, redraw, at), s.x, y, at)
        s, at = s._replace(y=y), draw.phase("outer")
        return s._replace(x=outer(clients_of(fed, redraw, at), s, at))

    return Method(name, init, round, view, needs=frozenset({"nested"}))
