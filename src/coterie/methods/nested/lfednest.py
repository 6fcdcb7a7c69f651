"""Light FedNest (Tarzanagh et al. 2022, App. A): every client estimates the hypergradient from its own data alone.

LFedNest is Alg. 6 inside Alg. 5; LFedNest_SVRG is Alg. 4 inside Alg. 5; LFedNest-NonAlt (App. H.1) updates y_i and then
x_i at each client before anything is averaged. Cheap where clients are alike, biased where they are not: a mean of
local inverses is not the inverse of the mean. With `redraw` each LFedInn (or FedInn) and LFedOut has its own clients.

Where y_i is the client's own (`PerClient`), local hypergradients are right, and one round per call of round is enough:
y_i stays, and x_i alone is averaged (`lfednest` with all its T · τ inner steps, `lfednest-nonalt` with τ).

Deviations: Alg. 5's line 6 prints ∇_x f_i for the last factor, which must be ∇_y f_i; its random truncation is an
option, the deterministic series the default.
"""

from functools import partial

from coterie.federation import Memory
from coterie.methods.base import Draw, Federation, Method, validated
from coterie.methods.nested import phases
from coterie.methods.nested.phases import Inverse, LocalSeries, NestedState, StepCounts
from coterie.methods.nested.works import local_nested_steps, pace
from coterie.methods.shared.works import LocalSteps
from coterie.problems.nested import OWN_Y, SETS, NestedProblem
from coterie.settings import BatchSize, Count, Positive


@validated
def lfednest(
    *,
    step: Positive = 0.5,
    outer_step: Positive = 0.1,
    inner_rounds: Count = 1,
    local_steps: StepCounts = 5,
    outer_steps: StepCounts = 1,
    terms: Count = 5,
    lipschitz: Positive = 10.0,
    series: LocalSeries = "deterministic",
    batch: BatchSize = 64,
    redraw: bool = False,
) -> Method:
    """Solve a nested problem with hypergradients that every client estimates from its own data (Alg. 6 and Alg. 5).

    Symbols: α = outer_step, β = step, T = inner_rounds, N = terms, ℓ = lipschitz, τ = local_steps, outer_steps.

    Cost: T + 1 rounds per call of round.

    Args:
        step: β, total step size of the inner local steps; each has size β/τ
        outer_step: α, total step size of the outer local steps
        local_steps: τ, inner local steps: one number, or one per client
        outer_steps: τ of the outer local steps: one number, or one per client

    Example:
        >>> from coterie.methods import lfednest
        >>> lfednest().name
        'lfednest'
    """
    inverse = Inverse(series, terms, lipschitz, batch)
    steps, local = LocalSteps(step, local_steps, batch), LocalSteps(outer_step, outer_steps, batch)
    return phases.alternating(
        "lfednest",
        partial(phases.lfedinn, local=steps),
        partial(phases.lfedout, local=local, inverse=inverse),
        inner_rounds,
        local_steps,
        outer_steps,
        redraw=redraw,
        features=(SETS, OWN_Y),
        own=partial(phases.own_inner, inner=phases.repeated(steps, inner_rounds), local=local, inverse=inverse),
    )


@validated
def lfednest_svrg(
    *,
    step: Positive = 0.5,
    outer_step: Positive = 0.1,
    inner_rounds: Count = 1,
    local_steps: StepCounts = 5,
    outer_steps: StepCounts = 1,
    terms: Count = 5,
    lipschitz: Positive = 10.0,
    series: LocalSeries = "deterministic",
    batch: BatchSize = 64,
    anchor: BatchSize = "all",
    redraw: bool = False,
) -> Method:
    """Run light FedNest with variance-reduced local steps in the inner problem (Alg. 4 and Alg. 5).

    Symbols: α = outer_step, β = step, T = inner_rounds, N = terms, ℓ = lipschitz, τ = local_steps, outer_steps.

    Cost: 2T + 1 rounds per call of round.

    Args:
        step: β, total step size of the inner local steps; each has size β/τ
        outer_step: α, total step size of the outer local steps
        local_steps: τ, inner local steps: one number, or one per client
        outer_steps: τ of the outer local steps: one number, or one per client
        anchor: rows of the global inner gradient

    Example:
        >>> from coterie.methods import lfednest_svrg
        >>> lfednest_svrg().name
        'lfednest-svrg'
    """
    inverse = Inverse(series, terms, lipschitz, batch)
    inner = partial(phases.fedinn, local=LocalSteps(step, local_steps, batch), anchor=anchor)
    outer = partial(phases.lfedout, local=LocalSteps(outer_step, outer_steps, batch), inverse=inverse)
    paces = (local_steps, outer_steps)
    return phases.alternating("lfednest-svrg", inner, outer, inner_rounds, *paces, redraw=redraw, features=(SETS,))


@validated
def lfednest_nonalt(
    *,
    step: Positive = 0.5,
    outer_step: Positive = 0.1,
    local_steps: StepCounts = 5,
    outer_steps: StepCounts = 1,
    terms: Count = 5,
    lipschitz: Positive = 10.0,
    series: LocalSeries = "deterministic",
    batch: BatchSize = 64,
) -> Method:
    """Let each client solve its own nested problem, first y and then x, and average both.

    Symbols: α = outer_step, β = step, N = terms, ℓ = lipschitz, τ = local_steps, outer_steps.

    Cost: 1 round per call of round.

    Args:
        step: β, total step size of the inner local steps; each has size β/τ
        outer_step: α, total step size of the outer local steps
        local_steps: τ, inner local steps: one number, or one per client
        outer_steps: τ of the outer local steps: one number, or one per client

    Example:
        >>> from coterie.methods import lfednest_nonalt
        >>> lfednest_nonalt().name
        'lfednest-nonalt'
    """
    local, inverse = LocalSteps(outer_step, outer_steps, batch), Inverse(series, terms, lipschitz, batch)

    def init(problem: NestedProblem, n: int) -> NestedState:
        return phases.start(problem, n, local_steps, outer_steps)

    def round(fed: Federation, s: NestedState, draw: Draw) -> NestedState:
        if isinstance(s.y, Memory):
            own = LocalSteps(step, local_steps, batch)
            return phases.own_inner(fed, s, draw, inner=own, local=local, inverse=inverse)
        tau, steps = pace(local_steps, s.y)
        inner = {"inner_step": step, "inner_steps": steps}
        x, y = phases.with_series(fed, local_nested_steps, (s.x, s.y, tau), local, inverse, draw, **inner)
        return s._replace(x=x, y=y)

    supports = phases.supporting(SETS, OWN_Y)
    return Method("lfednest-nonalt", init, round, phases.view, needs=frozenset({"nested"}), alternatives=supports)
