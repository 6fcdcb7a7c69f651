"""Every client is a target; the local steps of one round serve all of them (beyond MeritFed's paper).

    U_k = x_k after local steps on k's rows,   x_i⁺ = Σ_k W_ik U_k,   W_i ≈ argmin_{w∈Δ} φ_i(w) = L_i(Σ_k w_k U_k)
    W_ik ← W_ik exp(−α_i ∂φ_i/∂w_k)/Z,   ∂φ_i/∂w_k = ⟨∇L_i(·), U_k − ū⟩,   L_i on client i's validation rows

Models are mixed, not updates: with x_i⁺ = x_i + Σ_k W_ik (U_k − x_k) nothing holds the models of a group together, the
updates of others are then taken ever further from the target's own model, and the blocks fade (docs/collaborate.md).
Only differences of the U_k count on the simplex, so they are measured from their mean ū: a common part costs no digit.

The step is scale-free: α_i = c/√(Σ_rounds max_k |∂φ_i/∂w_k − ⟨w, ∂φ_i⟩|²), by target. So c (`mirror_step`) bounds the
first change of a weight to a factor e^c whatever the units of the loss and however many local steps are taken.

joint   ∇L_i is taken at x_i, where the local steps start, and sent along with U_i: one exchange per round
trial   ∇L_i at the trial mixtures themselves: one exchange more for each of `mirror_steps`
off     W stays as it starts: `own` is local training, `uniform` one averaged model for all, `groups` the known friends

`link = "logistic"` takes weights that saturate in the sums of all slopes instead of mirror steps
(methods/shared/ties.py): friends that are nearly as good as the best then have nearly equal weights.

With a partial active set the rows of absent targets and their models stay; the others move weight among active clients.
A target that holds no weight of any active client continues from its own local steps.
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Each, Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, known, validated
from coterie.methods.shared.ties import saturating
from coterie.methods.shared.works import goal_rows, gradient_on, local_sgd
from coterie.numerics import entropic_step
from coterie.settings import BatchSize, Count, Positive


class CollaborateState(NamedTuple):
    """Personal models [K, d], weights [K, K] (row i is target i's), Σ max|∂φ_i|² by target, [K], and the sums of all
    slopes [K, K] where the link is logistic."""

    X: Tensor
    W: Tensor
    reach: Tensor
    sums: tuple[Tensor, ...] = ()


@work("collaborate/validation-gradient", update=RESULT)
def validation_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇L_i(x) on client i's validation rows: all of them, or a fresh batch."""
    return gradient_on(goal_rows(shard), shard.task, shared, static.mirror_batch, draw.phase("validation"))


@work("collaborate/steps-and-gradient", update=(moved_from(), RESULT))
def steps_and_gradient(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """U_i, and ∇L_i at x_i, where the local steps start."""
    return local_sgd(shard, shared, private, static, draw), validation_gradient(shard, shared, private, static, draw)


def scale_free_step(w: Tensor, g: Tensor, reach: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """One mirror step on every row of w, as long as the gradients so far allow."""
    g = torch.where(w > 0.0, g - (w * g).sum(1, keepdim=True), 0.0)
    reach = reach + g.square().amax(1)
    alpha = step * reach.clamp(min=torch.finfo(g.dtype).tiny).rsqrt()
    return entropic_step(w, alpha[:, None] * g, 1.0), reach


@validated
def collaborate(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    mirror: Literal["joint", "trial", "off"] = "joint",
    mirror_step: Positive = 1.0,
    mirror_steps: Count = 1,
    mirror_batch: BatchSize = "all",
    start: Literal["uniform", "own", "groups"] = "uniform",
    link: Literal["softmax", "logistic"] = "softmax",
) -> Method:
    """Give every client a model of its own, mixed from all clients with learned weights.

    Client i is a target with validation rows of its own; row i of the weight matrix holds the weights of its mixture.

    Symbols: γ = step, c = mirror_step.

    Cost: 1 round per call of round, d numbers down and 2d up per client; 1 + mirror_steps rounds with mirror="trial".

    Args:
        mirror: where a target's gradient is taken: joint (at its own model, sent along with the update), trial (at
            the trial mixtures, one more round per mirror step), or off (the weights stay as they start)
        mirror_step: c; the first mirror step changes a weight by at most a factor e^c, whatever the units of the loss
        mirror_steps: mirror steps per round, with mirror="trial"
        mirror_batch: validation rows per gradient of a target
        start: first weights: uniform, own (each client alone), or groups (the known groups of the problem)
        link: softmax (mirror descent), or logistic, by which equally good clients get equal weights

    Example:
        >>> import torch, coterie
        >>> x = torch.eye(4)
        >>> friend, stranger = (x, x.sum(1)), (x, -x.sum(1))
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 1)
        >>> shards = [friend, friend, stranger]
        >>> problem = coterie.Weighting.on(shards, validation=shards, model=net, loss="squared")
        >>> coterie.fit(problem, coterie.methods.collaborate(), rounds=5, mode="vmap").clusters
        [[0, 1], [2]]
    """
    local: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch}

    def init(problem: Problem, n: int) -> CollaborateState:
        X = problem.start.repeat(n, 1)
        sums = (X.new_zeros(n, n),) if link == "logistic" else ()
        return CollaborateState(X, _start(start, problem, n).to(X), X.new_zeros(n), sums)

    def round(fed: Federation, s: CollaborateState, draw: Draw) -> CollaborateState:
        at, V = draw.phase("walk"), None
        if mirror == "joint":
            (U, V), ids = fed.gather(steps_and_gradient, Each(s.X), draw=at, **local, mirror_batch=mirror_batch)
        else:
            U, ids = fed.gather(local_sgd, Each(s.X), draw=at, **local)
        mass, w = _among(s.W, ids)
        reach, away = s.reach[ids], U - U.mean(0)
        sums = [total[ids][:, ids] for total in s.sums]

        def moved(w: Tensor, V: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
            """The weights after one step along the gradients V of the targets."""
            if link == "softmax":
                return scale_free_step(w, V @ away.T, reach, mirror_step)
            sums[0] = sums[0] + V @ away.T
            return saturating(sums[0]), reach

        if V is not None:
            w, reach = moved(w, V, reach)
        active = replace(fed, ids=ids)
        for i in range(mirror_steps if mirror == "trial" else 0):
            x, at = s.X.index_copy(0, ids, w @ U), draw.phase("mirror").step(i)
            answers, those = active.gather(validation_gradient, Each(x), draw=at, mirror_batch=mirror_batch)
            V = torch.zeros_like(s.X).index_copy(0, those, answers)[ids]  # a target without a reply stays where it is
            w, reach = moved(w, V, reach)
        X, W = s.X.index_copy(0, ids, w @ U), s.W.index_put((ids[:, None], ids), mass * w)
        totals = tuple(old.index_put((ids[:, None], ids), new) for old, new in zip(s.sums, sums, strict=True))
        return CollaborateState(X, W, s.reach.index_copy(0, ids, reach), totals)

    needs = frozenset({"gradient", "everyone"}) | ({"groups"} if start == "groups" else set())
    return Method("collaborate", init, round, lambda s: View(s.X, s.W), needs=needs)


def _start(start: str, problem: Problem, n: int) -> Tensor:
    """The first W; rows sum to 1."""
    starts = {"uniform": torch.zeros(n), "own": torch.arange(n)}
    groups = starts[start] if start in starts else known(problem.groups, "groups")
    friends = (groups[:, None] == groups).double()
    return friends / friends.sum(1, keepdim=True)


def _among(W: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The mass of each active row on active clients, [a, 1], and its distribution among them, [a, a]."""
    w = W[ids][:, ids]
    mass = w.sum(1, keepdim=True)
    return mass, torch.where(mass > 0.0, w / mass, torch.eye(len(ids), dtype=w.dtype, device=w.device))
