"""pFedMe (T Dinh et al. 2020, Algorithm 1), personalised for the target, or for everyone.

R times per round a client draws a batch, solves θ ≈ argmin f_B(θ) + λ/2 ‖θ − x_k‖² by gradient descent (at most 20
steps, until ‖gradient‖² ≤ δ) and moves x_k ← x_k − ηλ(x_k − θ); the server mixes x ← (1 − β)x + β mean x_k. The model
that is judged is the last θ of the same steps at the target, from the new x, on its own rows; it uploads nothing. No
later round needs that θ, so `personal_every` may leave it out where nobody looks; the models that remain are the same.
With `everyone` each client keeps the last θ of its own steps, as in the paper, and those are judged.
"""

from typing import Any, NamedTuple

from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Memory, Rows, Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, personal_models, validated
from coterie.methods.shared.works import goal_rows, own_rows
from coterie.numerics.proximal import Pull
from coterie.settings import Count, Positive, Probability


class PFedMeState(NamedTuple):
    """The global model, the personal model of the target or those that the clients keep, and rounds so far."""

    x: Tensor
    theta: Tensor | Memory
    rounds: int = 0


def envelope_steps(task: Any, rows: Rows, x: Tensor, static: Static, draw: Draw) -> tuple[Tensor, Tensor]:
    """R steps on the Moreau envelope: the last x and the last θ."""
    theta = x
    pull = Pull(penalty=static.penalty, step=static.inner_step, steps=static.inner_steps, accuracy=static.accuracy)
    for index in draw.batches(rows.count, static.batch, static.steps):
        theta = task.proximal_point(x, rows.take(index), pull)
        x = x - static.step * static.penalty * (x - theta)
    return x, theta


@work("pfedme/moreau-steps", update=moved_from())
def moreau_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """The client's upload: its last x_k."""
    return envelope_steps(shard.task, own_rows(shard), shared, static, draw)[0]


@work("pfedme/both-models", update=moved_from())
def both_models(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The client's upload, its last x_k, and its personal model, its last θ."""
    return envelope_steps(shard.task, own_rows(shard), shared, static, draw)


@work("pfedme/personal-model", update=moved_from())
def personal_model(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """The target's personal model: its last θ."""
    return envelope_steps(shard.task, goal_rows(shard), shared, static, draw)[1]


@validated
def pfedme(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    penalty: Positive = 10.0,
    accuracy: Positive = 0.005,
    inner_steps: Count = 20,
    inner_step: Positive = 0.05,
    mixing: Probability = 1.0,
    batch: Count = 50,
    everyone: bool = False,
    personal_every: Count = 1,
) -> Method:
    """Train a global model on Moreau envelopes of the local losses; their minimisers are the personal models.

    Symbols: η = step, R = local_steps, λ = penalty, δ = accuracy, β = mixing.

    Cost: 1 round per call of round, and 1 exchange with the target (none with everyone, 1/n with personal_every = n).

    Args:
        step: η, step size on the envelope
        local_steps: R, local steps, each with a proximal problem of its own
        penalty: λ, pull of the personal model towards the global one
        accuracy: δ, squared norm of the gradient at which a proximal problem counts as solved
        inner_steps: largest number of steps per proximal problem
        inner_step: step size of these
        mixing: β, how far the global model moves to the mean
        personal_every: rounds after which the target computes its personal model anew, best a divisor of run.record and
            run.rounds; not for everyone

    Example:
        >>> from coterie.methods import pfedme
        >>> pfedme().name
        'pfedme'
    """
    if everyone and personal_every > 1:
        raise UsageError("personal_every is for the target's model; with everyone clients find theirs in every round.")
    knobs: dict[str, Any] = {"step": step, "steps": local_steps, "batch": batch, "penalty": penalty}
    knobs |= {"accuracy": accuracy, "inner_steps": inner_steps, "inner_step": inner_step}

    def init(problem: Problem, n: int) -> PFedMeState:
        return PFedMeState(problem.start, Memory.start(problem.start, n) if everyone else problem.start)

    def round(fed: Federation, s: PFedMeState, draw: Draw) -> PFedMeState:
        rounds = s.rounds + 1
        if isinstance(s.theta, Memory):
            mean, theta = fed.mean(both_models, s.x, memory=s.theta, draw=draw.phase("walk"), **knobs)
            return PFedMeState((1.0 - mixing) * s.x + mixing * mean, theta, rounds)
        mean = fed.mean(moreau_steps, s.x, draw=draw.phase("walk"), **knobs)
        x = (1.0 - mixing) * s.x + mixing * mean
        if personal_every > 1 and rounds % personal_every:
            return PFedMeState(x, s.theta, rounds)
        return PFedMeState(x, fed.ask_target(personal_model, x, draw=draw.phase("personal"), **knobs), rounds)

    needs = frozenset({"gradient", "everyone" if everyone else "target"})
    return Method("pfedme", init, round, lambda s: View(personal_models(s.theta)), needs=needs)
