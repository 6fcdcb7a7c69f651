"""MeritFed (Tupitsa et al. 2024): one gradient per client and round, weights by mirror descent on the target's loss.

Published as "Selective collaboration for robust federated learning" (CPAL 2026, PMLR 328).

    x⁺ = x − γ Σ_k w_k g_k(x),   w ≈ argmin_{w∈Δ} φ(w) = L_0(x − γ Σ_k w_k g_k)
    w_k ← w_k exp(−α ∂φ/∂w_k)/Z,   ∂φ/∂w_k = −γ ⟨∇L_0(x − γ Gᵀw), g_k⟩

MD asks the target for the gradient on all its rows, SMD on a fresh batch each mirror step; `data` chooses the rows
(methods/weights/mirror.py). MD on fresh rows takes one block per round, SMD one per mirror step. The weights are
warm-started from round to round unless `restart`. With a partial active set the mirror steps move weight among the
active clients only; the others keep theirs. From the authors' code, off by default: `average = "continue"` starts each
mirror step from the mean of the iterates so far and ends at that mean, `cut` divides α by 10 after that many rounds.
`average = true` takes the mean of the iterates and leaves them as they are.

α is 0.1 unless it is set. Where the loss is quadratic and its target is at the server, so that φ is known exactly, it
is the inverse of the largest curvature of φ, max_{jk} |∂²φ/∂w_j∂w_k|, and of the tie penalty.

Beyond the paper. `solver = "projected"` takes the same mirror steps from sums and single numbers, for secure runs: each
asks for the sum Gᵀw and for one number ⟨∇L_0, g_k⟩ per client. `solver = "lagged"` asks for one sum and one number in
all: the model moves with the weights of the round before, x⁺ = x − γGᵀw, and all mirror steps go along the slope at x⁺,
so that no two sums of the same gradients can be compared; where no client shows its number, the model takes the step
and the weights stay. `solver = "quadratic"` takes all mirror steps on the second-order model of φ, for which one
exchange is enough. `local_steps`: clients take local steps, and g_k = (x − x_k)/γ, so that φ judges the mean of their
models. `server`: the direction Gᵀw goes through momentum, Adam or Yogi with a step of its own; φ still judges the plain
step. `tie`: the penalty of methods/shared/ties.py on the weights of the active clients. `link = "logistic"`: weights by
a saturating function of the slopes summed over all mirror steps (methods/shared/ties.py), so that clients of nearly
equal merit have nearly equal weights; it has no step size.
"""

from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.errors import NoClients, UsageError
from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.optimisers import Moments, ServerRule, UpdateRule
from coterie.methods.shared.ties import saturating
from coterie.methods.shared.works import gradient, local_sgd, own_gradient
from coterie.methods.weights.mirror import (
    FEW,
    Averaging,
    Data,
    Judge,
    Slope,
    first_order,
    goal_gradient,
    mirror_descent,
    second_order,
)
from coterie.numerics import uniform
from coterie.settings import BatchSize, Count, NonNegative, Positive

Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class MeritFedState(NamedTuple):
    """The common model [d], the client weights [K] on the simplex, the moments of the server's rule, rounds done, and
    the sums of all slopes [K] where the link is logistic."""

    x: Tensor
    w: Tensor
    moments: Moments
    rounds: int
    sums: tuple[Tensor, ...] = ()


def own_direction(shard: Shard, x: Tensor, static: Static, draw: Draw) -> Tensor:
    """g_k: the gradient at x, or (x − x_k)/γ after local steps."""
    if static.steps == 1:
        return own_gradient(shard, x, static.batch, draw)
    moved: Tensor = local_sgd(shard, x, None, static, draw)
    return (x - moved) / static.step


@work("meritfed/direction", update=RESULT)
def direction(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """g_k, for a weighted sum."""
    return own_direction(shard, shared, static, draw)


@work("meritfed/projection", update=RESULT)
def projection(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """⟨v, g_k⟩, one number."""
    x, v = shared
    return own_direction(shard, x, static, draw) @ v


def weighted_direction(fed: Federation, x: Tensor, w: Tensor, at: Draw, local: dict[str, Any]) -> Tensor:
    """Gᵀw over the active clients, of which w holds the weights, [K]."""
    mean: Tensor = fed.mean(direction, x, weights=w, draw=at, **local)
    return mean


def sharpness(slope: Slope, like: Tensor) -> float:
    """max_{jk} |∂²φ/∂w_j∂w_k| of a quadratic φ with this slope: differences of slopes. 0 for many clients."""
    if len(like) > FEW:
        return 0.0
    rows = torch.stack([slope(e, 0) for e in torch.eye(len(like)).to(like)])
    return float((rows - slope(torch.zeros_like(like), 0)).abs().max())


@validated
def meritfed(
    *,
    step: Positive = 0.1,
    mirror_step: Positive | None = None,
    mirror_steps: Whole = 10,
    mirror: Literal["md", "smd"] = "md",
    mirror_batch: Count = 50,
    data: Data = "validation",
    restart: bool = False,
    average: Averaging = False,
    cut: Count | None = None,
    solver: Literal["mirror", "quadratic", "projected", "lagged"] = "mirror",
    rank: Whole | None = None,
    local_steps: Count = 1,
    batch: BatchSize = "all",
    server: ServerRule = "sgd",
    server_step: Positive | None = None,
    momentum: Share = 0.9,
    second_momentum: Share = 0.999,
    tie: NonNegative = 0.0,
    link: Literal["softmax", "logistic"] = "softmax",
) -> Method:
    """Learn client weights by mirror descent on the target's loss after the weighted step.

    In every round clients send one gradient (or local steps). The server chooses the weights of their mean so that the
    model after the step has a small loss on the target's rows, and then takes the step.

    Symbols: γ = step, α = mirror_step, η = server_step (γ unless given).

    With solver="projected" there are 2 mirror_steps + 1 rounds per call, with "lagged" 2, and 1 exchange.

    Cost: 1 round per call of round, and mirror_steps exchanges with the target (1 with solver="quadratic").

    Args:
        mirror_step: α, step size of the mirror descent; if not set, 0.1 or by the curvature of a quadratic loss
        mirror_steps: mirror steps per round; 0 keeps the weights
        mirror_batch: rows of the target per mirror step, with mirror="smd" or data="fresh"
        average: take the mean of the mirror iterates; "continue" starts each mirror step from the mean so far
        cut: after this many rounds the mirror step is divided by 10; never if not set
        rank: leading directions of the gradients that the second-order model uses, with solver="quadratic"; all if not
            set
        local_steps: local steps of each client; with 1, clients send a gradient
        server_step: η of the server's rule where that does not say it; γ if not set
        momentum: β of the server's rule where that does not say it
        second_momentum: β₂ of the server's rule where that does not say it
        link: softmax (mirror descent), or logistic, by which equally good clients get equal weights

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4)
        >>> friend, stranger = (x, x.sum(1)), (x, -x.sum(1))
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 1)
        >>> problem = coterie.Weighting.on([friend, stranger], friend, model=net, loss="squared")
        >>> fit = coterie.fit(problem, coterie.methods.meritfed(mirror_step=1.0), rounds=5, mode="vmap")
        >>> [round(w, 2) for w in fit.weights.tolist()]
        [1.0, 0.0]
    """
    if link == "logistic" and (restart or average or tie or cut is not None):
        raise UsageError(
            'method.link = "logistic" sums the slopes of all rounds and has no step size; leave out method.restart, '
            "method.average, method.tie and method.cut."
        )
    by_block = mirror == "smd" or data == "fresh"
    judge = Judge(data, mirror_batch if by_block else "all", max(1, mirror_steps) if mirror == "smd" else 1)
    whole = judge.batch == "all"
    rule = UpdateRule.of(server, step=server_step or step, momentum=momentum, second_momentum=second_momentum)

    def init(problem: Problem, n: int) -> MeritFedState:
        judge.check(problem)
        w = uniform(n, like=problem.start)
        sums = (torch.zeros_like(w),) if link == "logistic" else ()
        return MeritFedState(problem.start, w, rule.start(problem.start), 0, sums)

    def among(w: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of the active clients together, and their shares of it: equal ones where they have no weight."""
        active, equal = w[ids].sum(), uniform(len(ids), like=w)
        return active, equal if restart else torch.where(active > 0.0, w[ids] / active, equal)

    def learned(
        s: MeritFedState, ids: Tensor, w: Tensor, slope: Slope, size: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The weights among the active clients after the mirror steps, and the sums of slopes."""
        if link == "softmax":
            settings: dict[str, Any] = {"steps": mirror_steps, "average": average, "tie": tie}
            return mirror_descent(w, slope, step=size, **settings), ()
        total = s.sums[0][ids]
        for i in range(mirror_steps):
            total = total + slope(w, i)
            w = saturating(total)
        return w, (s.sums[0].index_copy(0, ids, total),)

    def directions(fed: Federation, x: Tensor, at: Draw) -> tuple[Tensor, Tensor]:
        if local_steps == 1:
            return fed.gather(gradient, x, draw=at, batch=batch)
        models, ids = fed.gather(local_sgd, x, draw=at, step=step, steps=local_steps, batch=batch)
        return (x - models) / step, ids

    def projected(fed: Federation, s: MeritFedState, draw: Draw) -> MeritFedState:
        """The same round, but the server learns Gᵀw and ⟨∇L_0, g_k⟩ instead of G."""
        ids, at = fed.ids, draw.phase("gradient")
        active, start = among(s.w, ids)
        ask = judge.at(fed, s.rounds, draw.phase("mirror"))
        local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch}

        def mixed(w: Tensor) -> Tensor:
            return weighted_direction(fed, s.x, s.w.index_copy(0, ids, w), at, local)

        def slope_at(p: Tensor, w: Tensor, i: int) -> Tensor:
            v = ask(goal_gradient, s.x - step * p, i)
            dots, who = fed.gather(projection, (s.x, v), draw=at, **local)
            usual = w[torch.isin(ids, who)] @ dots / w[torch.isin(ids, who)].sum()  # for whoever is missing
            return -step * usual.expand(fed.n).index_copy(0, who, dots)[ids]

        if solver == "lagged":
            p = mixed(start)
            try:
                fixed = slope_at(p, start, 0)
            except NoClients as error:  # the step is taken all the same: another sum at this model tells too much
                x, moments = rule.move(s.x, p, s.moments, s.rounds + 1)
                error.state = MeritFedState(x, s.w, moments, s.rounds + 1, s.sums)
                raise
            w, sums = learned(s, ids, start, lambda w, i: fixed, alpha(s))
        else:
            w, sums = learned(s, ids, start, lambda w, i: slope_at(mixed(w), w, i), alpha(s))
            p = mixed(w)
        x, moments = rule.move(s.x, p, s.moments, s.rounds + 1)
        return MeritFedState(x, s.w.index_copy(0, ids, active * w), moments, s.rounds + 1, sums)

    def alpha(s: MeritFedState, curvature: float = 0.0) -> float:
        """α; where it is not set, 0.1 or the inverse of the curvature of φ, where that is known."""
        size = mirror_step or (1.0 / curvature if curvature else 0.1)
        return size / 10 if cut is not None and s.rounds >= cut else size

    def round(fed: Federation, s: MeritFedState, draw: Draw) -> MeritFedState:
        if solver in ("projected", "lagged"):
            return projected(fed, s, draw)
        G, ids = directions(fed, s.x, draw.phase("gradient"))
        active, w = among(s.w, ids)
        ask = judge.at(fed, s.rounds, draw.phase("mirror"))
        exact = whole and fed.target == "server" and fed.task.quadratic
        if solver == "mirror" and not exact:
            slope = first_order(ask, s.x, G, step=step)
        else:  # for a quadratic loss at the server the model is exact, and exchanges cost nothing
            slope = second_order(ask, s.x, G, w, step=step, rank=rank)
        sharp = sharpness(slope, w) + tie if exact and batch == "all" and mirror_step is None else 0.0
        w, sums = learned(s, ids, w, slope, alpha(s, sharp))
        x, moments = rule.move(s.x, w @ G, s.moments, s.rounds + 1)
        return MeritFedState(x, s.w.index_copy(0, ids, active * w), moments, s.rounds + 1, sums)

    needs = {"gradient", "target"} | ({"hvp"} if solver == "quadratic" else set())
    return Method("meritfed", init, round, lambda s: View(s.x, s.w), needs=frozenset(needs))
