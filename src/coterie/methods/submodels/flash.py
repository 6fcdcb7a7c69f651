"""Flash (Babakniya et al. 2022): sparse training whose masks all clients agree on from the first round.

Stage 1, the first round: clients train sparsely for `stage_epochs` times `local_steps` steps, from a random mask with
the density p of their capacity. After each but the last, a client drops a share of the kept entries of every weight
tensor, the smallest (from `change` falling to 0), and grows as many at random, where a tensor gets entries in
proportion to the mean magnitude of those that it had. The densities that result are the tensors' sensitivities; the
training is forgotten. Stage 2 (their SPDST): the mean sensitivities fix the density of each tensor, and so the mask,
which is random (or by the initial magnitudes, `mask = "magnitude"`) and follows from what all clients know: so masks
are never sent, and smaller ones lie within larger ones. Clients train within their masks; each parameter takes the mean
over the clients that keep it.

Deviations: all active clients take part in stage 1, at their own densities (theirs: a tenth of the clients, at one
density); in their hetero-FLASH smaller masks are cut from the server's weights by magnitude in every round, here they
stay.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, View, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.submodels.carving import NEEDS, Local, Part, asked, by_level, levels_of, merged
from coterie.methods.submodels.thinning import counts, densest, size, spread, within
from coterie.problems.catalogue.submodels import SubModels
from coterie.problems.models.submodel import places
from coterie.settings import BatchSize, Count, Positive, Probability


class FlashState(NamedTuple):
    """The whole model, the clients' levels, the density of each weight tensor for a total of 1, rounds done."""

    x: Tensor
    levels: Tensor
    sensitivity: Tensor
    rounds: int


def by_rank(score: Tensor, kept: Tensor) -> Tensor:
    """The entries with the largest scores, so many, [n] bool; the number may depend on values, also under vmap."""
    rank = score.argsort(descending=True, stable=True).argsort(stable=True)
    return rank < kept


def regrown(removed: Tensor, magnitude: Tensor, free: Tensor) -> Tensor:
    """How many of all removed entries each tensor grows [tensors]: by magnitude; what does not fit, the others grow."""
    wanted = removed.sum() * magnitude / magnitude.sum().clamp(min=torch.finfo(magnitude.dtype).tiny)
    for _ in range(len(free)):
        given = torch.minimum(wanted, free)
        room = (free - given) > 0
        wanted = given + torch.where(room, (wanted - given).sum() / room.sum().clamp(min=1), 0.0)
    return torch.minimum(wanted, free).floor()


def rearranged(parts: list[Tensor], masks: list[Tensor], rate: float, draw: Draw) -> list[Tensor]:
    """The masks after the smallest entries of each tensor, a share rate, were dropped and as many grown at random."""
    kept = torch.stack([mask.sum() for mask in masks]).to(parts[0])
    removed = (rate * kept).ceil()
    magnitude = torch.stack([(x.abs() * m).sum() / m.sum().clamp(min=1) for x, m in zip(parts, masks, strict=True)])
    sizes = torch.tensor([float(len(x)) for x in parts], dtype=kept.dtype, device=kept.device)
    grown = regrown(removed, magnitude, sizes - (kept - removed))
    new = []
    for i, (x, mask) in enumerate(zip(parts, masks, strict=True)):
        stay = by_rank(torch.where(mask, x.abs(), -1.0), kept[i] - removed[i])
        lot = draw.step(i).uniform(len(x), dtype=x.dtype)
        new.append(stay | by_rank(torch.where(stay, -1.0, lot), grown[i]))
    return new


@work("flash/sensitivities", update=None)
def sensitivities(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """The density of each weight tensor after sparse training from a random mask, by p."""
    cut, share = shard.task.anatomy, shard.task.shares[static.level]
    weights = [s for s in cut.segments if s.is_weight]

    def of(x: Tensor) -> list[Tensor]:
        return [x[s.start : s.stop] for s in weights]

    x, at = shared, draw.phase("mask")
    lots = [at.step(i).uniform(s.stop - s.start, dtype=x.dtype) for i, s in enumerate(weights)]
    kept = torch.tensor(counts(cut, share), device=x.device)
    masks = [by_rank(lot, n) for lot, n in zip(lots, kept, strict=True)]
    for epoch in range(static.stage_epochs):
        if epoch:
            rate = static.change * (1 - epoch / static.stage_epochs)
            masks = rearranged(of(x), masks, rate, draw.phase("grow").step(epoch))
        mask = torch.ones_like(x, dtype=torch.bool)
        for s, part in zip(weights, masks, strict=True):
            mask = torch.cat([mask[: s.start], part, mask[s.stop :]])
        x = within(shard, x * mask, mask, static.steps, static, draw.phase("train").step(epoch))
    return torch.stack([m.to(x).mean() for m in masks]) / share


def ranking(start: Tensor, mask: str) -> Tensor:
    """Scores of all entries that everybody knows: at random, the same in every run, or by initial magnitude."""
    if mask == "magnitude":
        return start.abs()
    return Draw.of(0, device=start.device).phase("flash").uniform(len(start), dtype=start.dtype)


@work("flash/fixed-steps", update=RESULT)
def fixed_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """The change within the client's mask."""
    cut, start = shard.task.anatomy, shard.task.model.start
    mask = densest(cut, ranking(start, static.mask), static.kept)
    index = places(mask, size(cut, static.kept))
    theta = torch.zeros_like(start).scatter(0, index, shared)
    return (within(shard, theta, mask, static.steps, static, draw) - theta)[index]


@validated
def flash(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    batch: BatchSize = 20,
    optimiser: Rule = "sgd",
    stage_epochs: Count = 10,
    change: Probability = 0.25,
    mask: Literal["random", "magnitude"] = "random",
) -> Method:
    """Train sparse networks whose masks follow from measured sensitivities in the first round and then stay.

    Symbols: γ = step.

    Cost: 1 round per call of round; a client receives and sends its kept weights (in the first, sensitivities).

    Args:
        optimiser: rule of the clients' local steps
        stage_epochs: how often stage 1 takes the local steps
        change: share of the kept weights that the first move of stage 1 replaces
        mask: entries that are kept in stage 2, at random or those with the largest initial magnitudes

    Example:
        >>> from coterie.methods import flash
        >>> flash().name
        'flash'
    """
    local = Local(step, local_steps, batch, optimiser)

    def init(problem: SubModels, n: int) -> FlashState:
        tensors = sum(s.is_weight for s in problem.task.anatomy.segments)
        return FlashState(problem.start, problem.levels, problem.start.new_zeros(tensors), 0)

    def round(fed: Federation, s: FlashState, draw: Draw) -> FlashState:
        task, cut, start = fed.task, fed.task.anatomy, fed.task.model.start
        at, score = draw.phase("learn"), ranking(start, mask)
        stage: dict[str, Any] = {**local._asdict(), "stage_epochs": stage_epochs, "change": change}

        def judge(level: int, group: Federation) -> Tensor:
            replies, _ = group.gather(sensitivities, s.x, draw=at, level=level, **stage)
            return replies

        def ask(level: int, group: Federation) -> Part:
            kept = spread(cut, task.shares[level], s.sensitivity)
            index = places(densest(cut, score, kept), size(cut, kept))
            moved, _ = group.gather(fixed_steps, s.x[index], draw=at, kept=kept, mask=mask, **local._asdict())
            return Part(index, moved)

        groups = by_level(levels_of(task, s.levels, draw))
        if not bool(s.sensitivity.any()):
            found = torch.cat(asked(fed, groups, judge)).mean(0)
            largest = densest(cut, score, spread(cut, task.shares[0], found))
            return FlashState(s.x * largest, s.levels, found, s.rounds + 1)
        return s._replace(x=merged(s.x, asked(fed, groups, ask)), rounds=s.rounds + 1)

    return Method("flash", init, round, lambda s: View(s.x), needs=NEEDS)
