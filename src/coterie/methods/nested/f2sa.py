"""F²SA (Kwon et al. 2023, Alg. 1): fully first order. Two inner sequences and a growing penalty replace the Hessian.

    min_x  f(x, y_λ(x)) + λ (g(x, y_λ(x)) − g(x, z(x))),    y_λ = argmin_y f + λ g,   z = argmin_y g

    T times  z ← z − ρ ∇_y g(x, z)        y ← y − (ρ/λ_k) (∇_y f(x, y) + λ_k ∇_y g(x, y))
             x ← x − γ (∇_x f(x, y) + λ_k (∇_x g(x, y) − ∇_x g(x, z)))
             λ_{k+1} = λ_0 (k + 2)^c

z approaches y*(x) and is what records see as the inner variable. λ (y − z) takes the place of SOBA's v: on a quadratic
inner problem it follows the same recursion, up to terms in 1/λ. The direction of x is the hypergradient up to O(1/λ),
so that the method is exact only as λ grows.

Federated: y and z share an exchange; the direction of x is at the new y and z, so that it is another one.

Deviations: the penalty is a power of k, as in the paper's theorems, instead of a sequence of differences δ_k. The steps
of y and z are ρ/λ and ρ, one setting. g sees one batch for y and z (and another for x), not two: then the noise of
λ (∇g(x, y) − ∇g(x, z)) does not grow with λ. The paper's algorithm was not at hand as a text; this follows its formulas
as benchmark_bilevel and later papers state them. x, y and z are projected where they have a set.
"""

from typing import NamedTuple

from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, View, validated
from coterie.methods.nested.steps import NESTED, SUPPORTS, Curvature, Step, StepRule
from coterie.methods.shared.works import draw_batch, goal_rows, own_rows
from coterie.problems.nested import NestedProblem
from coterie.settings import BatchSize, Count, NonNegative

ACCURACY = 0.01  # of the penalty that "auto" starts from: λ_0 = L_f/(μ · ACCURACY)


class F2saState(NamedTuple):
    """Outer x, the inner sequences y and z, the number k of finished rounds, the kind of problem, the estimates."""

    x: Tensor
    y: Tensor
    z: Tensor
    k: int
    kind: str
    curvature: Curvature


@work("f2sa/inner-gradients", update=RESULT)
def inner_gradients(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """∇_y g_i(x, z)  and  ∇_y f_i(x, y)/λ + ∇_y g_i(x, y)."""
    (x, y, z), task = shared, shard.task
    inner = draw_batch(own_rows(shard), static.batch, draw.phase("inner"))
    outer = draw_batch(goal_rows(shard), static.batch, draw.phase("outer"))
    d_y = task.outer_gradient(x, y, outer) / static.penalty + task.inner_gradient(x, y, inner)
    return task.inner_gradient(x, z, inner), d_y


@work("f2sa/outer-gradient", update=RESULT)
def outer_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇_x f_i(x, y) + λ (∇_x g_i(x, y) − ∇_x g_i(x, z)), without the second term where y is empty."""
    (x, y, z), task = shared, shard.task
    outer = draw_batch(goal_rows(shard), static.batch, draw.phase("outer"))
    d_x = task.direct_gradient(x, y, outer)
    if not len(y):
        return d_x
    inner = draw_batch(own_rows(shard), static.batch, draw.phase("inner"))
    return d_x + static.penalty * (task.inner_direct_gradient(x, y, inner) - task.inner_direct_gradient(x, z, inner))


@validated
def f2sa(
    *,
    step: Step = "auto",
    outer_step: Step = "auto",
    penalty: Step = "auto",
    growth: NonNegative = 1 / 3,
    inner_steps: Count = 1,
    batch: BatchSize = "all",
) -> Method:
    """Solve a nested problem by gradients alone, with a growing penalty on the inner loss (Alg. 1).

    Symbols: ρ = step, γ = outer_step, λ_0 = penalty, c = growth, T = inner_steps.

    Cost: T + 1 rounds per call of round, with 2 T d_y + d_x numbers per client up; 1 for single-level problems.
    Steps "auto" take at most 43 rounds more, in the first call, and these use Hessian products.

    Args:
        step: ρ, step size of z, and λ times that of y; "auto" takes 1/(L + L_f/λ_0), with the curvatures L of the
            inner and L_f of the outer loss in y
        outer_step: γ, step size of x; "auto" chooses it by a small model of the problem
        penalty: λ_0, penalty of the first round; "auto" takes 100 L_f/μ, with the least curvature μ of the inner loss
        growth: c, the penalty of round k + 1 is λ_0 (k + 1)^c; 0 keeps it
        inner_steps: T, steps of y and z per round, one exchange each
        batch: rows per gradient; 'all' uses every row of the client

    Example:
        >>> from coterie.methods import f2sa
        >>> f2sa(penalty=1000.0, growth=0.0).name
        'f2sa'
    """

    rule = StepRule(step, outer_step, inner_steps=inner_steps, fresh=True)

    def init(problem: NestedProblem, n: int) -> F2saState:
        y = problem.inner_start
        return F2saState(problem.start, y, y, 0, problem.task.kind, Curvature())

    def round(fed: Federation, s: F2saState, draw: Draw) -> F2saState:
        curvature = rule.estimated(fed, s, also=penalty == "auto")
        first = first_penalty(curvature)
        rho, gamma = rule.sizes(with_goal(curvature, first))
        lam = first * (s.k + 1) ** growth
        x, y, z = s.x, s.y, s.z
        for t in range(inner_steps if len(y) else 0):
            at = draw.phase("inner").step(t)
            d_z, d_y = fed.mean(inner_gradients, (x, y, z), draw=at, batch=batch, penalty=lam)
            z, y = fed.task.y.project(z - rho * d_z), fed.task.y.project(y - rho * d_y)
        d_x = fed.mean(outer_gradient, (x, y, z), draw=draw.phase("outer"), batch=batch, penalty=lam)
        return F2saState(fed.task.x.project(x - gamma * d_x), y, z, s.k + 1, s.kind, curvature)

    def first_penalty(c: Curvature) -> float:
        """λ_0."""
        if isinstance(penalty, str):
            return max(1.0, c.goal * c.condition / c.inner) / ACCURACY
        return penalty

    def view(s: F2saState) -> View:
        seen = View(s.x, inner=s.z if len(s.z) else None)
        if s.k == 0:
            return seen
        first = first_penalty(s.curvature)
        return seen._replace(more={**rule.record(with_goal(s.curvature, first)), "penalty": first * s.k**growth})

    return Method("f2sa", init, round, view, NESTED, SUPPORTS)


def with_goal(c: Curvature, penalty: float) -> Curvature:
    """The curvatures of g + f/λ, of which y takes steps."""
    return c._replace(inner=c.inner + c.goal / penalty)
