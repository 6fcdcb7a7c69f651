"""Flash (Babakniya et al. 2022): sparse training whose masks all clients agree on from the first round.

Stage 1, the first round: clients train the whole model, and report how much of each weight tensor is among the share p
that is largest over all tensors: its sensitivity. Stage 2 (their SPDST): with the mean sensitivity the density of each
tensor is fixed, and so is the mask, by magnitude of the initial model, which all clients know: so masks are never sent,
and smaller ones lie within larger ones (their hetero-FLASH). Clients train within their masks; each parameter takes the
mean over the clients that keep it. Deviation: in stage 1 their clients also learn sparsely; here they take plain steps,
which are then forgotten.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, View, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.submodels.carving import NEEDS, Local, Part, asked, by_level, learnt, merged
from coterie.methods.submodels.thinning import counts, densest, size, within
from coterie.problems.catalogue.submodels import SubModels
from coterie.problems.models.submodel import Anatomy, places
from coterie.settings import BatchSize, Count, Positive


class FlashState(NamedTuple):
    """The whole model, the clients' levels, the density of each weight tensor for a total of 1, rounds done."""

    x: Tensor
    levels: Tensor
    sensitivity: Tensor
    rounds: int


@work("flash/sensitivities", update=None)
def sensitivities(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """The density of each weight tensor among the largest p of all weights, by p."""
    cut, share = shard.task.anatomy, shard.task.shares[static.level]
    x = shared + learnt(shard.task, shared, shard, static, draw)
    parts = [x[s.start : s.stop].abs() for s in cut.segments if s.is_weight]
    every = torch.cat(parts)
    least = every.sort(descending=True).values[max(1, round(share * len(every))) - 1]
    return torch.stack([(part >= least).to(x).mean() for part in parts]) / share


@work("flash/fixed-steps", update=RESULT)
def fixed_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """The change within the client's mask."""
    cut, start = shard.task.anatomy, shard.task.model.start
    mask = densest(cut, start.abs(), static.kept)
    index = places(mask, size(cut, static.kept))
    theta = torch.zeros_like(start).scatter(0, index, shared)
    return (within(shard, theta, mask, static.steps, static, draw) - theta)[index]


@validated
def flash(*, step: Positive = 0.05, local_steps: Count = 10, batch: BatchSize = 20, optimiser: Rule = "sgd") -> Method:
    """Train sparse networks whose masks follow from measured sensitivities in the first round and then stay.

    Symbols: γ = step.

    Cost: 1 round per call of round; a client receives and sends its kept weights (in the first, sensitivities).

    Args:
        optimiser: rule of the clients' local steps

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
        at = draw.phase("learn")

        def judge(level: int, group: Federation) -> Tensor:
            replies, _ = group.gather(sensitivities, s.x, draw=at, level=level, **local._asdict())
            return replies

        def ask(level: int, group: Federation) -> Part:
            kept = _kept(cut, task.shares[level], s.sensitivity)
            index = places(densest(cut, start.abs(), kept), size(cut, kept))
            change, _ = group.gather(fixed_steps, s.x[index], draw=at, kept=kept, **local._asdict())
            return Part(index, change)

        groups = by_level(s.levels)
        if not bool(s.sensitivity.any()):
            found = torch.cat(asked(fed, groups, judge)).mean(0)
            largest = densest(cut, start.abs(), _kept(cut, task.shares[0], found))
            return FlashState(s.x * largest, s.levels, found, s.rounds + 1)
        return s._replace(x=merged(s.x, asked(fed, groups, ask)), rounds=s.rounds + 1)

    return Method("flash", init, round, lambda s: View(s.x), needs=NEEDS)


def _kept(cut: Anatomy, share: float, sensitivity: Tensor) -> list[int]:
    """Entries per weight tensor that a client of this share keeps; the surplus of full tensors goes to the others."""
    sizes = torch.tensor([s.stop - s.start for s in cut.segments if s.is_weight], dtype=torch.float64)
    density = share * sensitivity.double().cpu()
    for _ in range(len(sizes)):
        full = density >= 1.0
        spare = share * sizes.sum() - sizes[full].sum()
        rest = (density * sizes)[~full].sum()
        density = torch.where(full, 1.0, density * spare / rest if float(rest) > 0 else density)
    return counts(cut, density.clamp(max=1.0).tolist())
