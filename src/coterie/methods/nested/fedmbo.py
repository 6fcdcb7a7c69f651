"""FedMBO (Huang, Zhang, Ji 2023): FedNest's frame with parallel estimates of the hypergradient, one per client.

    T times  y ← y − β mean ∇_y g_i(x, y)           mini-batch SGD, no local steps
             x ← x − α mean_j h_j                   the parallel hypergradient estimator, as many chains j as clients

Chain j starts at a random client with b_j = ∇_y f_i(x, y). In each exchange every chain goes to another client, drawn
at random, which multiplies it by its own I − ∇²_yy g_i/ℓ. After its N'_j products, p_j goes to one more client, for
h_j = ∇_x f_i − ∇²_xy g_i p_j:

    random         p_j = (N/ℓ) Π_{n ≤ N'_j} (I − H_{i(j,n)}/ℓ) b_j,   N'_j uniform on {0 … N − 1}, drawn per chain
    deterministic  p_j = (1/ℓ) Σ_{n < N} Π_{m ≤ n} (I − H_{i(j,m)}/ℓ) b_j

As the clients of a chain are independent, E p_j is the series of the mean Hessian although each client sends a product
with its own: unbiased where clients differ, with a variance that falls with the number of chains. FedNest's FedIHGP
sends one vector through the mean Hessian instead. The chains run at the same time, so they take max_j N'_j exchanges.

The paper was at hand as abstract and summary only: the chains follow its description (a parallel estimator by sampling
clients in several rounds, mini-batch SGD inside). Deviations: the deterministic series is the default, the paper's
random truncation an option. In each exchange chains are dealt to the clients of the round without repetition (`redraw`:
to a new sample of clients); a chain without a client, or whose client does not reply, is left out of the mean.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.federation import Each, Work
from coterie.methods.base import Draw, Federation, Method, validated
from coterie.methods.nested import works
from coterie.methods.nested.phases import (
    GROWTH,
    Inverse,
    LocalSeries,
    NestedState,
    clients_of,
    raise_growth,
    start,
    view,
)
from coterie.problems.nested import NestedProblem
from coterie.settings import BatchSize, Count, Positive


def deal(
    fed: Federation, work: Work, s: NestedState, V: Tensor, chains: Tensor, draw: Draw, **static: Any
) -> tuple[Tensor, Tensor]:
    """Send each of these chains, rows of V, to a client of its own; the replies, and the chains they belong to."""
    clients = fed.ids[draw.phase("deal").permutation(len(fed.ids)).to(fed.ids.device)][: len(chains)]
    chains = chains[: len(clients)]  # those beyond the number of clients get none
    of_client = torch.zeros(fed.n, dtype=torch.int64, device=V.device).index_copy(0, clients, chains)
    chosen = replace(fed, ids=clients.sort().values)
    replies, ids = chosen.gather(work, (s.x, s.y, Each(V[of_client])), draw=draw, **static)
    return replies, of_client[ids]


def parallel_hypergradient(fed: Federation, s: NestedState, inverse: Inverse, draw: Draw) -> Tensor:
    """mean_j h_j. Two exchanges, and as many as the longest chain has products."""
    at, batch = draw.phase("goal"), inverse.batch
    last = draw.phase("hypergradient")
    if s.kind in ("minimax", "single-level"):  # there is no indirect term
        mean: Tensor = fed.mean(works.hypergradient, (s.x, s.y, None), draw=last, batch=batch)
        return mean
    b, _ = clients_of(fed, inverse.redraw, at).gather(works.outer_y_gradient, (s.x, s.y), draw=at, batch=batch)
    if s.kind == "compositional":  # the Hessian is the identity, and b is exact
        inverse = inverse._replace(terms=1, lipschitz=1.0)
    P, chains = products(fed, s, b, inverse, draw)
    h, _ = deal(clients_of(fed, inverse.redraw, last), works.hypergradient, s, P, chains, last, batch=batch)
    return h.mean(0)


def products(fed: Federation, s: NestedState, b: Tensor, inverse: Inverse, draw: Draw) -> tuple[Tensor, Tensor]:
    """p_j by chain, and the chains that are left."""
    N, ell, random = inverse.terms, inverse.lipschitz, inverse.series == "random"
    counts = torch.full((len(b),), N - 1, device=b.device)
    if random:
        counts = draw.phase("truncation").integers(N, len(b)).to(b.device)
    term = first = (N if random else 1) / ell * b
    total, chains = term, torch.arange(len(b), device=b.device)
    for n in range(int(counts.max())):
        at = draw.phase("product").step(n)
        waiting, running = chains[counts[chains] <= n], chains[counts[chains] > n]
        active = clients_of(fed, inverse.redraw, at)
        hv, running = deal(active, works.hessian_product, s, term, running, at, batch=inverse.batch)
        after = term[running] - hv / ell
        _check_growth(after, hv, term[running], first[running], ell)
        term = term.index_copy(0, running, after)
        total = term if random else total.index_add(0, running, after)
        chains = torch.cat([waiting, running])
    return total, chains


def _check_growth(after: Tensor, hv: Tensor, term: Tensor, first: Tensor, ell: float) -> None:
    """Chains that grow are explained."""
    growth = after.norm(dim=1) / first.norm(dim=1).clamp(min=torch.finfo(after.dtype).tiny)
    j = int(growth.argmax())
    if float(growth[j]) > GROWTH:
        raise_growth(ell, float(growth[j]), float(hv[j] @ hv[j]) / (float(term[j] @ hv[j]) or -1e-300))


@validated
def fedmbo(
    *,
    step: Positive = 0.1,
    outer_step: Positive = 0.1,
    inner_rounds: Count = 5,
    terms: Count = 10,
    lipschitz: Positive = 10.0,
    series: LocalSeries = "deterministic",
    batch: BatchSize = 64,
    redraw: bool = False,
) -> Method:
    """Solve a nested problem by SGD inside and by hypergradients from parallel chains of clients outside.

    Symbols: α = outer_step, β = step, T = inner_rounds, N = terms, ℓ = lipschitz.

    Cost: T + N + 1 rounds per call of round (T + 2 + max N' with series="random"); fewer without an indirect term.

    Args:
        step: β, step size of the inner variable
        outer_step: α, step size of the outer variable
        series: all terms of the series in each chain, or one term, drawn at random per chain, as the paper does
        redraw: draw the clients of each exchange anew, instead of once per round

    Example:
        >>> import torch, coterie
        >>> inner = lambda x, y, batch: 0.5 * (y - x).square().sum()
        >>> outer = lambda x, y, batch: 0.5 * (y - batch.columns[0]).square().mean()
        >>> shards = [torch.full((4,), 1.0), torch.full((4,), 3.0)]
        >>> problem = coterie.Nested(inner, outer).on(shards, x=torch.zeros(1), y=torch.zeros(1))
        >>> method = coterie.methods.fedmbo(step=1.0, inner_rounds=1, outer_step=1.0, lipschitz=1.0, terms=2)
        >>> fit = coterie.fit(problem, method, rounds=2, mode="vmap")
        >>> round(float(fit.variables["x"]), 2), fit.history[-1]["communication"]["rounds"]
        (2.0, 8)
    """
    inverse = Inverse(series, terms, lipschitz, batch, redraw)

    def init(problem: NestedProblem, n: int) -> NestedState:
        return start(problem, n)

    def round(fed: Federation, s: NestedState, draw: Draw) -> NestedState:
        y = s.y
        for t in range(0 if s.kind == "single-level" else inner_rounds):
            at = draw.phase("inner").step(t)
            g = clients_of(fed, redraw, at).mean(works.inner_gradient, (s.x, y), draw=at, batch=batch)
            y = y - step * g
        s = s._replace(y=y)
        return s._replace(x=s.x - outer_step * parallel_hypergradient(fed, s, inverse, draw.phase("outer")))

    return Method("fedmbo", init, round, view, needs=frozenset({"nested"}))
