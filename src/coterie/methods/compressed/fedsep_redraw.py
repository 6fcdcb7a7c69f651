"""FedSep with a fresh sketch every round: x_t ∈ R^p is the sketch of one round's step, by S_t.

    client   θ ← θ + S_{t−1}⁺x,   v = Δθ + e_k,   sends S_t v,   e_k ← v − S_t⁺S_t v
    server   x = η_g mean S_t v,   θ ← θ + S_t⁺x

Not in the paper. Its fixed S confines training to p dimensions; here every round has p others, so nothing is out of
reach, and error feedback has something to send. The price: clients keep a copy of the model (and with error feedback,
off by default, their error, which is some d/p rounds old when it is sent). Without error feedback η_g defaults as for
`fedsep`; with it, 1. (S v is −Enc{v} where SSᵀ = I.)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, validated
from coterie.methods.compressed.fedsep import Seed, server_gain, sketch_of
from coterie.methods.compressed.replicas import Replicas
from coterie.methods.shared.works import local_sgd
from coterie.numerics.lasso import least_norm
from coterie.numerics.sketches import Kind, Sketch
from coterie.settings import BatchSize, Count, Positive


class FedSepRedrawState(NamedTuple):
    """The model [d], its last step as sent [p], and the clients' copies and errors."""

    theta: Tensor
    x: Tensor
    replicas: Replicas


def drawn(static: Any, dimension: int, t: int) -> Sketch:
    """S_t."""
    seed = (static.sketch_seed << 32) + t + 1
    return sketch_of(Static(sketch=static.sketch, size=static.size, sketch_seed=seed), dimension)


@work("fedsep-redraw/client-round", update=RESULT)
def redrawn_round(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The client's step in the space of S_t; it keeps its copy and the residual."""
    copy, error = private
    d, t, steps = len(copy), static.round, static.solve_steps
    whole = shared.shape[0] == d  # a step has p < d numbers
    theta = shared if whole else copy + least_norm(drawn(static, d, t - 1), shared, steps=steps)
    v = local_sgd(shard, theta, None, static, draw) - theta + error
    S = drawn(static, d, t)
    sent = S.apply(v)
    return sent, (theta, v - least_norm(S, sent, steps=steps) if static.error_feedback else error)


@validated
def fedsep_redraw(
    *,
    size: Count | None = None,
    sketch: Kind = "hadamard",
    sketch_seed: Seed = 0,
    solve_steps: Count = 10,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 32,
    server_step: Positive | None = None,
    error_feedback: bool = False,
) -> Method:
    """Run FedSep with a new sketch in every round, and optionally error feedback.

    Symbols: p = size, η = step, I = local_steps, η_g = server_step.

    Cost: 1 round per call of round; p numbers each way per client (d down to clients that missed a round).

    Args:
        size: p, numbers that are sent; one twentieth of the parameters if not set
        solve_steps: steps of the solver that decodes a sketch
        step: η, step size of the local steps
        server_step: η_g, step size of the server; as for fedsep if not set, 1 with error feedback

    Example:
        >>> from coterie.methods import fedsep_redraw
        >>> fedsep_redraw().name
        'fedsep-redraw'
    """
    knobs: dict[str, Any] = {"size": size, "sketch": sketch, "sketch_seed": sketch_seed, "solve_steps": solve_steps}
    knobs |= {"step": step, "steps": local_steps, "batch": batch, "error_feedback": error_feedback}
    static = Static(**knobs)

    def init(problem: Problem, n: int) -> FedSepRedrawState:
        theta = problem.start
        S = drawn(static, len(theta), 0)
        return FedSepRedrawState(theta, theta.new_zeros(S.size), Replicas.start((theta, torch.zeros_like(theta)), n))

    def round(fed: Federation, s: FedSepRedrawState, draw: Draw) -> FedSepRedrawState:
        d, t = len(s.theta), s.replicas.latest
        at = draw.phase("client")
        rows, replicas = s.replicas.gather(fed, redrawn_round, s.x, s.theta, at, round=t, **knobs)
        gain = server_step or (1.0 if error_feedback else server_gain(len(s.x), d))
        x = gain * rows.mean(0)
        theta = s.theta + least_norm(drawn(static, d, t), x, steps=solve_steps)
        return FedSepRedrawState(theta, x, replicas)

    return Method("fedsep-redraw", init, round, lambda s: View(s.theta))
