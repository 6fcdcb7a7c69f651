"""Where every loss is constantly 0, every update must be 0: this shows whether works declare what they contribute."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie.experiment.build import Parts
from coterie.federation import Call, Replies
from coterie.federation.stages.base import Staged
from coterie.federation.tree import mapped, tensors
from coterie.federation.work import name_of
from coterie.numerics import Draw

MODELS = ("x", "y", "theta", "X", "v")
"""Fields of states that are models; works that start from one that is 0 would hide a wrong declaration."""

ORACLES = {
    **dict.fromkeys(("gradient", "full_gradient"), 0),
    **dict.fromkeys(("hvp", "full_hvp"), 1),
    "inner_gradient": 1,
    "outer_gradient": 1,
    "direct_gradient": 0,
    "inner_direct_gradient": 0,
    "inner_hvp": 2,
    "cross": 0,
}
"""Derivatives that tasks offer, and which argument they have the form of."""


@dataclass(frozen=True)
class Watched(Staged):
    """An engine that looks at updates as stages do; `moved` lists the works of which one is not 0."""

    asked: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)

    def execute(self, call: Call, ids: Tensor) -> Iterator[Replies]:
        """Run a work at clients, and look at their updates."""
        for replies in self.engine.execute(call, ids):
            self.look(call, replies.ids, replies.values)
            yield replies

    def execute_at_target(self, call: Call) -> Any:
        """Run a work at the target, and look at its update."""
        result = self.engine.execute_at_target(call)
        self.look(call, torch.tensor([-1]), mapped(lambda leaf: leaf[None], result))
        return result

    def look(self, call: Call, ids: Tensor, values: Any) -> None:
        """Note the work, and whether one of its updates is not 0."""
        self.asked.append(name_of(call.work))
        if any(bool(leaf.any()) for leaf in tensors(call.updates(ids, values)) if real(leaf)):
            self.moved.append(name_of(call.work))


def real(leaf: Any) -> bool:
    """Whether this is a tensor of real numbers."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def flat(task: Any) -> Any:
    """The same task where every loss is constantly 0, so that nothing moves."""

    def derivative(place: int) -> Any:
        return lambda self, *points: torch.zeros_like(points[place])

    def loss(self: Any, theta: Any, rows: Any) -> Any:
        return theta.new_zeros(())

    def both(self: Any, theta: Any, rows: Any) -> Any:
        return theta.new_zeros(()), torch.zeros_like(theta)

    def at(self: Any, *which: Any, **settings: Any) -> Any:
        return flat(type(task).at(self, *which, **settings))

    changed = {name: derivative(place) for name, place in ORACLES.items() if hasattr(task, name)}
    changed |= {name: loss for name in ("loss", "full_loss") if hasattr(task, name)}
    changed |= {name: both for name in ("loss_and_gradient", "full_loss_and_gradient") if hasattr(task, name)}
    changed |= {"at": at} if hasattr(task, "at") else {}
    same = copy.copy(task)
    object.__setattr__(same, "__class__", type("Flat", (type(task),), changed))
    return same


def watch_rounds(parts: Parts, rounds: int = 2) -> Watched:
    """Some rounds where nothing moves, two by default, so that works of the second round are seen too."""
    watch = watching(parts)
    fed, state = replace(parts.fed, engine=watch), away(parts.method.init(parts.problem, parts.fed.n))
    for t in range(rounds):
        draw = Draw.of(0).round(t)
        state = parts.method.round(fed.begin(t, draw), state, draw)
    return watch


def watching(parts: Parts) -> Watched:
    """The engine of a federation where nothing moves, watched."""
    engine: Any = parts.fed.engine
    target = None if engine.target is None else replace(engine.target, task=flat(engine.target.task))
    return Watched(replace(engine, task=flat(engine.task), target=target), (), {})


def away(state: Any) -> Any:
    """The same state with models that are not 0."""
    return state._replace(**{name: getattr(state, name) + 0.5 for name in MODELS if real(getattr(state, name, None))})
