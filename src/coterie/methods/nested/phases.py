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

Where x_i is the client's own (`PerClient`), FedOut is one round without an upload: client i steps along its own
h_i = ∇_x f_i − ∇²_xy g_i p, which is m times the derivative by x_i, and keeps x_i. Where y_i is the client's own, its
inner problem and its inverse are its own too, and the light methods need one round for x alone. Where f is at the
server, the server computes ∇_y f and ∇_x f without a round, and takes the step in x itself.
"""

from collections.abc import Callable, Iterator
from itertools import chain, combinations, count
from math import ceil, inf, log10
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.errors import RunError, UsageError
from coterie.federation import Memory, Tree, Work
from coterie.methods.base import Draw, Federation, Method, View, personal_models
from coterie.methods.nested import works
from coterie.methods.nested.works import Pace
from coterie.methods.shared.works import LocalSteps
from coterie.numerics import conjugate_gradients
from coterie.numerics.linear import Matvec
from coterie.numerics.tracing import assumed
from coterie.problems.nested import NestedProblem, offer
from coterie.settings import Count

StepCounts = Count | list[Count]
Series = Literal["deterministic", "random", "cg"]
LocalSeries = Literal["deterministic", "random"]
Phase = Callable[..., Any]  # `fedinn`, `lfedinn`, `fedout` or `lfedout` with its settings
GROWTH = 2.0  # a series may grow a little where the inner loss is not quite convex


class NestedState(NamedTuple):
    """Outer x, inner y, and the kind of problem, which decides on the indirect term.

    x, or y, is a memory where every client has its own.
    """

    x: Any
    y: Any
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
    x, y = (
        Memory.start(value, n) if problem.task.own == name else value
        for name, value in (("x", problem.start), ("y", problem.inner_start))
    )
    return NestedState(x, y, problem.task.kind)


def check_paces(n: int, *paces: Pace) -> None:
    """A list of local steps has one number per client."""
    for steps in paces:
        if isinstance(steps, list) and len(steps) != n:
            raise UsageError(f"a list of {len(steps)} local step numbers was given for {n} clients; give {n}, or one.")


def view(s: NestedState) -> View:
    """x is the model, y the inner variable."""
    return View(personal_models(s.x), inner=None if s.kind == "single-level" else personal_models(s.y))


def supporting(*features: str, kind: str = "nested") -> tuple[frozenset[str], ...]:
    """`Method.alternatives` of a method that supports these features of a problem, each with or without the others."""
    some = chain.from_iterable(combinations(features, n) for n in range(1, len(features) + 1))
    return tuple(frozenset({offer(kind, chosen)}) for chosen in some)


def clients_of(fed: Federation, redraw: bool, draw: Draw) -> Federation:
    """The clients of a phase: those of the round, or a sample of its own."""
    return fed.sample(draw=draw) if redraw else fed


def stepped(fed: Federation, what: Work, shared: tuple[Any, ...], local: LocalSteps, draw: Draw, **more: Any) -> Tree:
    """The mean over clients after their local steps; each receives its own τ behind the shared values. One round."""
    tau, settings = paced(local, shared)
    return averaged(fed, what, (*shared, tau), draw=draw.phase("walk"), **settings, **more)


def paced(local: LocalSteps, shared: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
    """τ as a payload, and the settings of the local steps."""
    like = next(value for value in shared if isinstance(value, Tensor))
    tau, steps = works.pace(local.steps, like)
    return tau, {**local._asdict(), "steps": steps}


def averaged(fed: Federation, what: Work, shared: tuple[Any, ...], **more: Any) -> Any:
    """`fed.mean` of a work on (x, y, …), one of which may be what the clients keep; that stays as it is."""
    kept = [value for value in shared if isinstance(value, Memory)]
    if not kept:
        return fed.mean(what, shared, **more)
    sent = tuple(None if isinstance(value, Memory) else value for value in shared)
    return fed.mean(what, sent, memory=kept[0], **more)[0]


def fedinn(fed: Federation, x: Tensor, y: Tensor, draw: Draw, *, local: LocalSteps, anchor: int | str) -> Tensor:
    """Alg. 4: y⁺ by corrected local steps. Two rounds."""
    q = averaged(fed, works.inner_gradient, (x, y), draw=draw.phase("anchor"), batch=anchor)
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
    b = goal_gradient(first, works.outer_y_gradient, s, at, inverse.batch)
    if s.kind == "compositional":
        return b
    draws = product_draws(inverse, draw)

    def product(v: Tensor) -> Tensor:
        at = next(draws)
        active = clients_of(fed, inverse.redraw, at)  # S_n
        return averaged(active, works.hessian_product, (s.x, s.y, v), draw=at, batch=inverse.batch)

    return solve(product, b, inverse, draw)


def goal_gradient(fed: Federation, what: Work, s: NestedState, draw: Draw, batch: int | str) -> Tensor:
    """The mean of a derivative of the f_i, or that of f at the server; f there does not depend on what clients keep."""
    if not fed.task.at_server:
        return averaged(fed, what, (s.x, s.y), draw=draw, batch=batch)
    x = fed.task.x.start if isinstance(s.x, Memory) else s.x
    return fed.ask_target(what, (x, s.y), draw=draw, batch=batch)


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
    if not assumed(~(after.norm() > GROWTH * first.norm())):
        growth = float(after.norm()) / max(float(first.norm()), 1e-300)
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


def fedout(fed: Federation, s: NestedState, draw: Draw, *, local: LocalSteps, inverse: Inverse) -> Any:
    """Alg. 2: x⁺ by local steps along the global hypergradient. Two rounds, and those of FedIHGP; none at step 0."""
    if local.step == 0.0:
        return s.x
    if isinstance(s.x, Memory):
        return own_fedout(fed, s, draw, local=local, inverse=inverse)
    if fed.task.at_server:
        return fed.task.x.project(s.x - local.step * global_hypergradient(fed, s, inverse, draw))
    return stepped(fed, works.outer_svrg_steps, (s.x, s.y, global_hypergradient(fed, s, inverse, draw)), local, draw)


def global_hypergradient(fed: Federation, s: NestedState, inverse: Inverse, draw: Draw) -> Tensor:
    """h = 1/m Σ h_i ≈ ∇f(x), exact at y = y*(x) with p exact (Alg. 2, lines 3–8). One round, and those of FedIHGP."""
    p = fedihgp(fed, s, inverse, draw.phase("ihgp"))
    at = draw.phase("hypergradient")
    h = fed.mean(works.hypergradient, (s.x, s.y, p), draw=at, batch=inverse.batch)
    return h + goal_gradient(fed, works.direct_gradient, s, at, inverse.batch) if fed.task.at_server else h


def own_fedout(fed: Federation, s: NestedState, draw: Draw, *, local: LocalSteps, inverse: Inverse) -> Memory:
    """x_i ← Π(x_i − α_i h_i) at every client, which keeps it. One round without an upload, and those of FedIHGP."""
    p = fedihgp(fed, s, inverse, draw.phase("ihgp"))
    tau, settings = paced(local, (s.y,))
    at = draw.phase("hypergradient")
    settings = {**settings, "batch": inverse.batch}
    _, x = fed.mean(works.own_outer_steps, (None, s.y, p, tau), memory=s.x, draw=at, **settings)
    return x


def lfedout(fed: Federation, s: NestedState, draw: Draw, *, local: LocalSteps, inverse: Inverse) -> Tensor:
    """Alg. 5: x⁺ by local steps along the clients' own hypergradients. One round."""
    (x,) = with_series(fed, works.local_outer_steps, (s.x, s.y), local, inverse, draw)
    return x


def with_series(
    fed: Federation, what: Work, shared: tuple[Any, ...], local: LocalSteps, inverse: Inverse, draw: Draw, **more: Any
) -> list[Tensor]:
    """`stepped` along the clients' own hypergradients. Local series that grow are explained, by their mean."""
    *means, series_stats = stepped(fed, what, shared, local, draw, **_series_settings(inverse), **more)
    _check_growth(series_stats, inverse)
    return means


def own_inner(
    fed: Federation, s: NestedState, draw: Draw, *, inner: LocalSteps, local: LocalSteps, inverse: Inverse
) -> NestedState:
    """Where y_i is the client's own: its steps in y_i, which it keeps, then in x along h_i, and mean x_i. One round."""
    tau, inner_settings = paced(inner, (s.x,))
    outer_tau, settings = paced(local, (s.x,))
    own = {"inner_step": inner.step, "inner_steps": inner_settings["steps"], **_series_settings(inverse)}
    shared, at = (s.x, None, tau, outer_tau), draw.phase("walk")
    (x, series_stats), y = fed.mean(works.own_nested_steps, shared, memory=s.y, draw=at, **settings, **own)
    _check_growth(series_stats, inverse)
    return s._replace(x=x, y=y)


def repeated(local: LocalSteps, times: int) -> LocalSteps:
    """The local steps of several rounds, taken in one."""
    steps = [times * tau for tau in local.steps] if isinstance(local.steps, list) else times * local.steps
    return local._replace(step=times * local.step, steps=steps)


def _series_settings(inverse: Inverse) -> dict[str, Any]:
    return {"series": inverse.series, "terms": inverse.terms, "lipschitz": inverse.lipschitz}


def _check_growth(series_stats: Tensor, inverse: Inverse) -> None:
    growth, curvature = series_stats.tolist()
    if growth > GROWTH:
        raise_growth(inverse.lipschitz, growth, curvature)


def alternating(
    name: str,
    inner: Phase,
    outer: Phase,
    inner_rounds: int,
    *paces: Pace,
    redraw: bool = False,
    features: tuple[str, ...] = (),
    own: Callable[..., NestedState] | None = None,
) -> Method:
    """Alg. 1: T times y ← inner(x, y), then x ← outer(x, y), with the clients of the round or each with its own.

    Args:
        name: the method's.
        inner: a phase for y.
        outer: a phase for x.
        inner_rounds: T.
        paces: the numbers of local steps, of y and of x.
        redraw: whether each phase has its own clients.
        features: which features of problems the phases support.
        own: both phases in one round, where y is the client's own.
    """

    def init(problem: NestedProblem, n: int) -> NestedState:
        if problem.task.at_server and paces[1] != 1:
            raise UsageError(
                f"method.outer_steps = {paces[1]} needs validation rows at every client, and this problem has them at "
                "the server; set method.outer_steps=1."
            )
        return start(problem, n, *paces)

    def round(fed: Federation, s: NestedState, draw: Draw) -> NestedState:
        if own is not None and isinstance(s.y, Memory):
            return own(fed, s, draw)
        y = s.y
        if s.kind != "single-level":
            for t in range(inner_rounds):
                at = draw.phase("inner").step(t)
                y = inner(clients_of(fed, redraw, at), s.x, y, at)
        s, at = s._replace(y=y), draw.phase("outer")
        return s._replace(x=outer(clients_of(fed, redraw, at), s, at))

    return Method(name, init, round, view, needs=frozenset({"nested"}), alternatives=supporting(*features))
