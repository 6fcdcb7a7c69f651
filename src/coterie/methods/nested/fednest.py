"""FedNest (Tarzanagh et al. 2022, Alg. 1): federated bilevel, minimax, compositional and single-level problems.

    T times  y ← FedInn(x, y)      Alg. 4: corrected local steps on g
             x ← FedOut(x, y)      Alg. 2: corrected local steps on f along the global hypergradient (Alg. 3)

FedNest_SGD takes plain local steps in FedInn (Alg. 6). `fednest-weights` is the form for weighting problems.

Deviations: the deterministic series is the default, Alg. 3's random truncation an option (series = "random"), and
conjugate gradients another. The clients of a round are the same in all its phases (S_0 … S_N' = S) unless `redraw`:
then each FedInn, each S_n of Alg. 3 and FedOut draws its own. Global quantities (q, ∇_y f, products, h) use all rows
unless `anchor` limits them. outer_step = 0 keeps x. Beyond the paper: steps are projected where a variable has a set;
x may be the clients' own (FedOut is then one round without an upload), and f may be at the server (FedOut is then the
server's step along h; h needs one round, ∇_y f none).
"""

from functools import partial

from coterie.methods.base import Method, validated
from coterie.methods.nested.phases import Inverse, Series, StepCounts, alternating, fedinn, fedout, lfedinn
from coterie.methods.shared.works import LocalSteps
from coterie.problems.nested import AT_SERVER, OWN_X, SETS
from coterie.settings import BatchSize, Count, NonNegative, Positive

FEATURES = (AT_SERVER, SETS, OWN_X)


@validated
def fednest(
    *,
    step: Positive = 0.5,
    outer_step: NonNegative = 0.1,
    inner_rounds: Count = 1,
    local_steps: StepCounts = 5,
    outer_steps: StepCounts = 1,
    terms: Count = 5,
    lipschitz: Positive = 10.0,
    series: Series = "deterministic",
    batch: BatchSize = 64,
    anchor: BatchSize = "all",
    redraw: bool = False,
) -> Method:
    """Solve a federated nested problem by global hypergradients and variance-reduced local steps (Alg. 1).

    Symbols: α = outer_step, β = step, T = inner_rounds, N = terms, ℓ = lipschitz, τ = local_steps, outer_steps.

    Cost: 2T + N + 3 rounds per call of round for bilevel problems; fewer for the other kinds, which need no series.

    Args:
        step: β, total step size of the inner local steps; each has size β/τ
        outer_step: α, total step size of the outer local steps; 0 keeps the outer variable
        local_steps: τ, inner local steps: one number, or one per client
        outer_steps: τ of the outer local steps: one number, or one per client
        anchor: rows of every global quantity: gradients, Hessian products, hypergradients

    Example:
        >>> import torch, coterie
        >>> inner = lambda x, y, batch: 0.5 * (y - x).square().sum()
        >>> outer = lambda x, y, batch: 0.5 * (y - batch.columns[0]).square().mean()
        >>> shards = [torch.full((4,), 1.0), torch.full((4,), 3.0)]
        >>> problem = coterie.Nested(inner, outer).on(shards, x=torch.zeros(1), y=torch.zeros(1))
        >>> method = coterie.methods.fednest(step=1.0, local_steps=1, outer_step=1.0, lipschitz=1.0)
        >>> fit = coterie.fit(problem, method, rounds=2, mode="vmap")
        >>> round(float(fit.variables["x"]), 2), fit.history[-1]["communication"]["rounds"]
        (2.0, 20)
    """
    inverse = Inverse(series, terms, lipschitz, anchor, redraw)
    inner = partial(fedinn, local=LocalSteps(step, local_steps, batch), anchor=anchor)
    outer = partial(fedout, local=LocalSteps(outer_step, outer_steps, batch), inverse=inverse)
    paces = (local_steps, outer_steps)
    return alternating("fednest", inner, outer, inner_rounds, *paces, redraw=redraw, features=FEATURES)


@validated
def fednest_sgd(
    *,
    step: Positive = 0.5,
    outer_step: NonNegative = 0.1,
    inner_rounds: Count = 1,
    local_steps: StepCounts = 5,
    outer_steps: StepCounts = 1,
    terms: Count = 5,
    lipschitz: Positive = 10.0,
    series: Series = "deterministic",
    batch: BatchSize = 64,
    anchor: BatchSize = "all",
    redraw: bool = False,
) -> Method:
    """Run FedNest with plain local SGD steps in the inner problem (Alg. 6 and Alg. 2).

    Symbols: α = outer_step, β = step, T = inner_rounds, N = terms, ℓ = lipschitz, τ = local_steps, outer_steps.

    Cost: T + N + 3 rounds per call of round for bilevel problems; fewer for the other kinds, which need no series.

    Args:
        step: β, total step size of the inner local steps; each has size β/τ
        outer_step: α, total step size of the outer local steps; 0 keeps the outer variable
        local_steps: τ, inner local steps: one number, or one per client
        outer_steps: τ of the outer local steps: one number, or one per client
        anchor: rows of every global quantity: gradients, Hessian products, hypergradients

    Example:
        >>> from coterie.methods import fednest_sgd
        >>> fednest_sgd().name
        'fednest-sgd'
    """
    inverse = Inverse(series, terms, lipschitz, anchor, redraw)
    inner = partial(lfedinn, local=LocalSteps(step, local_steps, batch))
    outer = partial(fedout, local=LocalSteps(outer_step, outer_steps, batch), inverse=inverse)
    paces = (local_steps, outer_steps)
    return alternating("fednest-sgd", inner, outer, inner_rounds, *paces, redraw=redraw, features=FEATURES)
