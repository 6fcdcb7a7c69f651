"""stocBiO (Ji, Yang and Liang 2021, Alg. 2): inner steps, a Neumann series, an outer step.

    T times  y ← y − α ∇_y g(x, y)
             v_0 = ∇_y f(x, y),   p = η Σ_{q=0}^{Q} (I − η ∇²_yy g(x, y))^q v_0       Q products, each on its own batch
             x ← x − β (∇_x f(x, y) − ∇²_xy g(x, y) p)

y is kept from round to round. Federated: each gradient and each product is a mean over the clients, so that the series
is that of the mean Hessian, not a mean of local series (which would be biased where clients differ; see LFedNest).

The truncated series solves the system up to a factor: p = (I − (I − ηH)^{Q+1}) H⁻¹ v_0. So stocBiO ends near x*, within
about (1 − μ/L)^{Q+1}; raise `terms` for more accuracy.

Deviations: η = α, as benchmark_bilevel has it. Batches of the Q products are equally large; the paper lets them shrink.
Minimax and single-level problems have no series, and for compositional ones p = v_0 is exact. The paper's text was not
at hand; the series follows benchmark_bilevel's account of its Algorithm 3. x and y are projected where they have a set.
"""

from functools import partial
from itertools import count
from typing import NamedTuple

from torch import Tensor

from coterie.methods.base import Draw, Federation, Method, validated
from coterie.methods.nested.steps import NESTED, SUPPORTS, Curvature, Step, StepRule, indirect
from coterie.methods.nested.works import hessian_product, hypergradient, inner_gradient, outer_y_gradient
from coterie.numerics import neumann
from coterie.problems.nested import NestedProblem
from coterie.settings import BatchSize, Count


class StocBioState(NamedTuple):
    """Outer x, inner y, the kind of problem, and the estimates for the steps."""

    x: Tensor
    y: Tensor
    kind: str
    curvature: Curvature


@validated
def stocbio(
    *,
    step: Step = "auto",
    outer_step: Step = "auto",
    inner_steps: Count = 10,
    terms: Count = 10,
    batch: BatchSize = "all",
) -> Method:
    """Take inner steps, estimate the hypergradient by a Neumann series, and take an outer step (Alg. 2).

    Symbols: α = η = step, β = outer_step, T = inner_steps, Q = terms.

    Cost: T + Q + 2 rounds per call of round, with (T + Q + 1) d_y + d_x numbers per client up.
    T + 2 for compositional problems, T + 1 for minimax and 1 for single-level ones.
    Steps "auto" take at most 43 rounds more, in the first call.

    Args:
        step: α and η, step size of y and of the series; "auto" takes 1/L, with the curvature L of the inner loss
        outer_step: β, step size of x; "auto" chooses it by a small model of the problem
        inner_steps: T, inner steps per round, one exchange each
        terms: Q, Hessian products of the series, which has Q + 1 terms
        batch: rows per gradient and product; 'all' uses every row of the client

    Example:
        >>> from coterie.methods import stocbio
        >>> stocbio(inner_steps=5, terms=20).name
        'stocbio'
    """
    rule = StepRule(step, outer_step, inner_steps=inner_steps, fresh=True)

    def init(problem: NestedProblem, n: int) -> StocBioState:
        return StocBioState(problem.start, problem.inner_start, problem.task.kind, Curvature())

    def round(fed: Federation, s: StocBioState, draw: Draw) -> StocBioState:
        curvature = rule.estimated(fed, s)
        alpha, beta = rule.sizes(curvature)
        x, y, mean = s.x, s.y, partial(fed.mean, batch=batch)
        for t in range(inner_steps if len(y) else 0):
            y = fed.task.y.project(y - alpha * mean(inner_gradient, (x, y), draw=draw.phase("inner").step(t)))
        p = _inverse_product(mean, s._replace(y=y), alpha, draw) if len(indirect(s.kind, y)) else None
        h = mean(hypergradient, (x, y, p), draw=draw.phase("hypergradient"))
        return StocBioState(fed.task.x.project(x - beta * h), y, s.kind, curvature)

    def _inverse_product(mean: partial[Tensor], s: StocBioState, eta: float, draw: Draw) -> Tensor:
        """p ≈ [∇²_yy g]⁻¹ ∇_y f, with Q products; none where ∇²_yy g is the identity."""
        steps = map(draw.phase("product").step, count())

        def product(v: Tensor) -> Tensor:
            return mean(hessian_product, (s.x, s.y, v), draw=next(steps))

        v_0 = mean(outer_y_gradient, (s.x, s.y), draw=draw.phase("goal"))
        return v_0 if s.kind == "compositional" else neumann(product, v_0, scale=1.0 / eta, terms=terms + 1)

    return Method("stocbio", init, round, rule.view, NESTED, SUPPORTS)
