"""Shared by methods on sub-models: one capacity at a time, local training, and the merge of overlapping parts.

Clients of different capacities train networks of different shapes, so they are asked capacity by capacity. That is
one round: they work at the same time, and the ledger counts one barrier. A client receives θ[index] and replies with
its change Δθ, so the ledger counts the size of its sub-model.

What the public code of HeteroFL and FedRolex does beyond their papers is offered as settings: gradients clipped to a
norm (`clip`), weight decay (`l2`), and rows of the output layer averaged over the clients that have the class
(`output`); the problem has their loss mask, capacities drawn anew in each round, and rounding.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from coterie.errors import NoClients
from coterie.federation import RESULT, Batch, Each, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, View
from coterie.methods.shared.optimisers import Rule, UpdateRule
from coterie.methods.shared.works import batches, own_rows
from coterie.problems.catalogue.submodels import SubModels, SubModelTask
from coterie.problems.models.submodel import Anatomy
from coterie.problems.tasks.supervised import Supervised

Key = TypeVar("Key")
Reply = TypeVar("Reply")
Slope = Callable[[Tensor, Batch], Tensor]
Output = Literal["clients", "holders"]
NEEDS = frozenset({"gradient", "submodels"})


class Local(NamedTuple):
    """How a client trains, or a network learns from its teachers: step γ, steps, batch, and update rule.

    clip is the largest norm of a gradient (None: no limit), l2 the weight decay that is added to it first.
    """

    step: float
    steps: int
    batch: int | str
    rule: Rule
    clip: float | None = None
    l2: float = 0.0


class LevelledState(NamedTuple):
    """The whole model, where kernels that no client has are 0, and the clients' levels."""

    x: Tensor
    levels: Tensor


class Part(NamedTuple):
    """The changes of clients of one capacity: Δθ [c, k] at the places [k] of θ, or at their own places [c, k].

    counted, [c, k] bool, is which of them enter the means; all if None.
    """

    places: Tensor
    change: Tensor
    counted: Tensor | None = None


def moved(theta: Tensor, slope: Slope, shard: Shard, steps: int, static: Static, draw: Draw) -> Tensor:
    """θ after steps of the local rule against slope(θ, batch), on batches of the client's rows."""
    rule = UpdateRule(static.rule, static.step)

    def bounded(x: Tensor, batch: Batch) -> Tensor:
        g = slope(x, batch)
        g = g + static.l2 * x if static.l2 else g
        return g if static.clip is None else g * (static.clip / g.norm().clamp(min=static.clip))

    return rule.along(theta, batches(own_rows(shard), static.batch, steps, draw), bounded)


def learnt(oracles: Supervised, theta: Tensor, shard: Shard, static: Static, draw: Draw) -> Tensor:
    """Δθ: the update by the local rule from θ on the client's rows."""
    oracles = shard.task.own(oracles, own_rows(shard))
    return moved(theta, oracles.gradient, shard, static.steps, static, draw) - theta


@work("submodels/learn", update=RESULT)
def learn(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """Δθ of the sub-model of static.level, from the parameters that the client received."""
    return learnt(shard.task.at(static.level, scaled=static.scaled), shared, shard, static, draw)


def by_level(levels: Tensor) -> dict[int, Tensor]:
    """The clients of each level, the largest capacity first."""
    return {level: (levels == level).nonzero()[:, 0] for level in sorted(set(levels.tolist()))}


def levels_of(task: SubModelTask, levels: Tensor, draw: Draw) -> Tensor:
    """The clients' levels in this round: theirs, or where the problem is dynamic, drawn anew."""
    if not task.dynamic:
        return levels
    clients = torch.arange(len(levels), device=levels.device)
    return draw.phase("capacity").client(clients).integers(len(task.shares)).to(levels)


def asked(fed: Federation, groups: Mapping[Key, Tensor], ask: Callable[[Key, Federation], Reply]) -> list[Reply]:
    """The replies of the active clients of each group, in one round; a group without replies is left out."""
    replies, phase = [], None
    for key, group in fed.parts(groups):
        try:
            replies.append(ask(key, group))
        except NoClients as error:  # noted by the federation; the round continues with the other groups
            phase = error.phase
    if not replies:
        raise NoClients("no client of any capacity answered", phase)
    return replies


def sent(x: Tensor, index: Tensor, ids: Tensor) -> Tensor | Each:
    """x[index], the same for all, or one row for each of these clients."""
    return x[index] if index.dim() == 1 else Each(x[index], ids)


def answered(index: Tensor, asked_ids: Tensor, ids: Tensor) -> Tensor:
    """The rows of index that belong to the replies."""
    return index if index.dim() == 1 else index[torch.searchsorted(asked_ids, ids)]


def trained(
    fed: Federation,
    x: Tensor,
    levels: Tensor,
    kernels: Callable[[float, Tensor], Tensor],
    draw: Draw,
    local: Local,
    *,
    scaled: bool = True,
    output: Output = "clients",
) -> list[Part]:
    """One round: each client trains the kernels(share, ids), [K] or [c, K], that it receives.

    With output = "holders", a row of the output layer counts only where the client has the class.
    """
    task = fed.task

    def ask(level: int, group: Federation) -> Part:
        share = task.shares[level]
        index = task.anatomy.index(kernels(share, group.ids), share)
        settings: dict[str, Any] = {**local._asdict(), "level": level, "scaled": scaled}
        change, ids = group.gather(learn, sent(x, index, group.ids), draw=draw, **settings)
        index = answered(index, group.ids, ids)
        return Part(index, change, known_classes(task, index, ids) if output == "holders" else None)

    return asked(fed, by_level(levels), ask)


def known_classes(task: SubModelTask, index: Tensor, ids: Tensor) -> Tensor:
    """Whether a parameter belongs to a class that the client has, or to no class, [c, k]."""
    of_class = task.anatomy.output[index].expand(len(ids), -1)
    return (of_class < 0) | task.holds[ids].gather(1, of_class.clamp(min=0))


def carved(
    name: str,
    start: Callable[[SubModels], LevelledState],
    kernels: Callable[[Anatomy, float, Tensor, Draw], Tensor],
    local: Local,
    *,
    scaled: bool = True,
    output: Output = "clients",
    everyone_alike: bool = False,
) -> Method:
    """A method whose clients of share p train kernels(anatomy, p, ids, draw) of the model, and average them.

    With everyone_alike, capacities are those of the start in every round, also where the problem is dynamic.
    """

    def round(fed: Federation, s: LevelledState, draw: Draw) -> LevelledState:
        def chosen(share: float, ids: Tensor) -> Tensor:
            return kernels(fed.task.anatomy, share, ids, draw)

        levels = s.levels if everyone_alike else levels_of(fed.task, s.levels, draw)
        parts = trained(fed, s.x, levels, chosen, draw.phase("learn"), local, scaled=scaled, output=output)
        return s._replace(x=merged(s.x, parts))

    return Method(name, lambda problem, n: start(problem), round, lambda s: View(s.x), needs=NEEDS)


def merged(x: Tensor, parts: list[Part], *, everyone: bool = False) -> Tensor:
    """x plus the mean change of each parameter over the clients that trained it; an untrained one keeps every bit.

    With everyone, the mean is over all replies, as if the other clients had sent no change.
    """
    total, holders = torch.zeros_like(x), torch.zeros_like(x)
    for index, change, counted in parts:
        counts = torch.ones_like(change) if counted is None else counted.to(change)
        if index.dim() == 1:
            total = total.index_add(0, index, (change * counts).sum(0))
            holders = holders.index_add(0, index, counts.sum(0))
        else:
            inside = (index >= 0) & (index < len(total))  # clients choose these; invalid places are ignored
            total = total.index_add(0, index[inside], (change * counts)[inside])
            holders = holders.index_add(0, index[inside], counts[inside])
    divisor = torch.full_like(x, sum(len(part.change) for part in parts)) if everyone else holders
    return torch.where(holders > 0, x + total / divisor.clamp(min=1.0), x)


def alone(task: Any, level: int, start: Tensor) -> Tensor:
    """The sub-model of a level as a network of its own, within the whole model, where the other kernels are 0.

    Its weights are as large as if it had been initialised alone: ∝ 1/√inputs.
    """
    cut, share = task.anatomy, task.shares[level]
    grown = [(size / count) ** 0.5 for size, count in zip(cut.sizes, cut.counts(share), strict=True)]
    by_kernel = torch.repeat_interleave(torch.tensor([*grown, 1.0]), torch.tensor([*cut.sizes, 1]))
    kept = torch.zeros_like(start).index_fill(0, cut.index(cut.first(share), share), 1.0)
    return start * kept * by_kernel.to(start)[cut.feeder]
