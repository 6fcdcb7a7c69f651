"""Ditto (Li et al. 2021, Algorithm 2), personalised for the target, or for everyone.

All clients take r steps from the global model x, which the server averages; the target takes s proximal steps v ← v −
γ(∇L_0(v) + λ(v − x)) on its own rows. The target's v is the model that is judged; clients' own personal models do not
enter it and are not kept. With `everyone` the clients keep them, trained on their training rows; then those are judged.
"""

from typing import Any, NamedTuple

from torch import Tensor

from coterie.federation import Memory, Rows, Shard, Static, Tree, moved_from, work
from coterie.methods.base import Draw, Federation, Method, Problem, View, personal_models, validated
from coterie.methods.shared.works import goal_rows, local_sgd, own_rows, proximal_steps, slopes
from coterie.settings import Count, Positive


class DittoState(NamedTuple):
    """The global model, and the personal model of the target or those that the clients keep."""

    x: Tensor
    v: Tensor | Memory


def pulled_steps(task: Any, rows: Rows, x: Tensor, v: Tensor, steps: int, static: Static, draw: Draw) -> Tensor:
    """Steps of v ← v − γ(∇L_B(v) + λ(v − x))."""
    return proximal_steps(slopes(rows, task, static.batch, steps, draw), v, x, static.step, static.penalty)


@work("ditto/personal-model", update=moved_from(1))
def personal_model(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """The target's personal model: v after s steps."""
    x, v = shared
    return pulled_steps(shard.task, goal_rows(shard), x, v, static.steps, static, draw)


@work("ditto/both-models", update=moved_from())
def both_models(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The client's upload, r steps from x, and its personal model v after s steps."""
    own = draw.phase("personal")
    v = pulled_steps(shard.task, own_rows(shard), shared, private, static.personal_steps, static, own)
    return local_sgd(shard, shared, None, static, draw), v


@validated
def ditto(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    personal_steps: Count = 25,
    penalty: Positive = 0.1,
    batch: Count = 50,
    everyone: bool = False,
) -> Method:
    """Train a global model by averaging and a personal one by proximal steps towards it.

    Symbols: γ = step, r = local_steps, s = personal_steps, λ = penalty.

    Cost: 1 round per call of round, and 1 exchange with the target (none with everyone).

    Args:
        local_steps: r, local steps on the global model
        personal_steps: s, proximal steps on the personal model
        penalty: λ, pull of the personal model towards the global one

    Example:
        >>> from coterie.methods import ditto
        >>> ditto(penalty=0.2).settings["penalty"]
        0.2
    """
    knobs: dict[str, Any] = {"step": step, "batch": batch, "penalty": penalty}

    def init(problem: Problem, n: int) -> DittoState:
        return DittoState(problem.start, Memory.start(problem.start, n) if everyone else problem.start)

    def round(fed: Federation, s: DittoState, draw: Draw) -> DittoState:
        own, at = draw.phase("personal"), draw.phase("walk")
        if isinstance(s.v, Memory):
            steps: dict[str, Any] = {"steps": local_steps, "personal_steps": personal_steps}
            return DittoState(*fed.mean(both_models, s.x, memory=s.v, draw=at, **steps, **knobs))
        v = fed.ask_target(personal_model, (s.x, s.v), draw=own, steps=personal_steps, **knobs)
        return DittoState(fed.mean(local_sgd, s.x, draw=at, step=step, steps=local_steps, batch=batch), v)

    needs = frozenset({"gradient", "everyone" if everyone else "target"})
    return Method("ditto", init, round, lambda s: View(personal_models(s.v)), needs=needs)
