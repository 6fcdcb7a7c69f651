"""MeritFed (Tupitsa et al. 2024): one gradient a client a round, weights by mirror descent on the target's loss.

    x⁺ = x − γ Σ_k w_k g_k(x),   w ≈ argmin_{w∈Δ} φ(w) = L_0(x − γ Σ_k w_k g_k)
    w_k ← w_k exp(−α ∂φ/∂w_k)/Z,   ∂φ/∂w_k = −γ ⟨∇L_0(x − γ Gᵀw), g_k⟩

MD asks the target for the gradient on all its validation rows, SMD on a fresh batch each mirror step. The weights
are warm-started from round to round. With a partial active set the mirror steps move weight among the active
clients only; the others keep theirs.
"""

from typing import Any, Literal, NamedTuple

from torch import Tensor

from coterie.federation import Federation
from coterie.methods.base import Method, validated
from coterie.methods.works import goal_gradient, gradient
from coterie.numerics import Draw, entropic_step, uniform
from coterie.problems.parameters import BatchSize, Count, Positive
from coterie.problems.view import View


class MeritFedState(NamedTuple):
    """The common model [d] and the client weights [K], on the simplex."""

    x: Tensor
    w: Tensor


@validated
def meritfed(
    *,
    step: Positive = 0.1,
    mirror_step: Positive = 0.1,
    mirror_steps: Count = 10,
    mirror: Literal["md", "smd"] = "md",
    mirror_batch: Count = 50,
    batch: BatchSize = "all",
) -> Method:
    """One round, and mirror_steps exchanges with the target (which cost nothing if that is the server)."""
    target_batch = mirror_batch if mirror == "smd" else "all"

    def init(problem: Any, n: int) -> MeritFedState:
        return MeritFedState(problem.start, uniform(n, like=problem.start))

    def round(fed: Federation, s: MeritFedState, draw: Draw) -> MeritFedState:
        G, ids = fed.gather(gradient, s.x, draw=draw.phase("gradient"), batch=batch)
        active = s.w[ids].sum()
        w = s.w[ids] / active
        ask = draw.phase("mirror")
        for i in range(mirror_steps):
            v = fed.ask_target(goal_gradient, s.x - step * w @ G, draw=ask.step(i), batch=target_batch)
            w = entropic_step(w, -step * G @ v, mirror_step)
        return MeritFedState(s.x - step * w @ G, s.w.index_copy(0, ids, active * w))

    needs = frozenset({"gradient", "target"})
    return Method("meritfed", init, round, lambda s: View(s.x, s.w), needs=needs)
