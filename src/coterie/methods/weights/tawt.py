"""TAWT (Chen et al. 2021, "Weighted training for cross-task learning"), the heuristic by cosines, as a baseline.

    every second round   w_k ← w_k exp(c cos(g_0, g_k))/Z,   then   x ← x − γ Σ_k w_k g_k(x)

g_0 is the target's gradient at x. The cosine stands for the hypergradient of the representation distance, which needs
an inverse Hessian. A gradient of 0 has cosine 0. With a partial active set weight moves among the active clients only.
g_0 is taken on the target's validation rows. `angle = "client"` is the baseline of MeritFed's authors: g_0 is the
gradient that the target itself sends as a client, on a batch of its training rows (in a round without it the weights
stay), and c = 100 γ.
"""

from typing import Literal, NamedTuple

from torch import Tensor
from torch.nn.functional import cosine_similarity

from coterie.methods.base import GRADIENTS_AND_TARGET, Draw, Federation, Method, Problem, View, validated
from coterie.methods.shared.works import goal_gradient, gradient, target_row
from coterie.numerics import entropic_step, uniform
from coterie.settings import BatchSize, Count, Positive


class TAWTState(NamedTuple):
    """The common model [d], the client weights [K] on the simplex, and rounds done."""

    x: Tensor
    w: Tensor
    rounds: int


@validated
def tawt(
    *,
    step: Positive = 0.1,
    mirror_step: Positive | None = None,
    angle: Literal["target", "client"] = "target",
    every: Count = 2,
    batch: BatchSize = "all",
    target_batch: BatchSize = "all",
) -> Method:
    """Weight clients by the cosine between their gradient and the target's.

    Symbols: γ = step, c = mirror_step.

    Cost: 1 round per call of round, and 1 exchange with the target in every `every`-th call with angle="target".

    Args:
        mirror_step: c, step size of the multiplicative update of the weights; if not set 0.1, or 100 γ with
            angle="client"
        angle: the cosine to the gradient on the target's validation rows, or to the one that the target sends as a
            client (federation.target, or client 0)

    Example:
        >>> from coterie.methods import tawt
        >>> tawt().name
        'tawt'
    """
    c = mirror_step or (100.0 * step if angle == "client" else 0.1)

    def init(problem: Problem, n: int) -> TAWTState:
        return TAWTState(problem.start, uniform(n, like=problem.start), 0)

    def at_target(fed: Federation, x: Tensor, draw: Draw) -> Tensor:
        g0: Tensor = fed.ask_target(goal_gradient, x, draw=draw.phase("target"), batch=target_batch)
        return g0

    def round(fed: Federation, s: TAWTState, draw: Draw) -> TAWTState:
        G, ids = fed.gather(gradient, s.x, draw=draw.phase("gradient"), batch=batch)
        active = s.w[ids].sum()
        w = s.w[ids] / active
        if s.rounds % every == 0:
            g0 = target_row(fed, G, ids) if angle == "client" else at_target(fed, s.x, draw)
            w = w if g0 is None else entropic_step(w, -cosine_similarity(G, g0[None]), c)
        return TAWTState(s.x - step * w @ G, s.w.index_copy(0, ids, active * w), s.rounds + 1)

    needs = GRADIENTS_AND_TARGET if angle == "target" else frozenset({"gradient"})
    return Method("tawt", init, round, lambda s: View(s.x, s.w), needs=needs)
