"""FedDST (Bibikar et al. 2022): sparse networks whose masks move with training.

Clients train within a mask. Every `readjust` rounds, at the end of its steps, a client drops a share α_r of the kept
entries of each weight, the smallest, and grows as many where the gradient is largest, from 0; it then uploads its mask
too. Each parameter takes the mean over the clients that kept it (0 where all dropped it), and the server cuts its masks
by magnitude anew. α_r falls as a cosine from `change` to 0 at round `until` (theirs: half of all rounds). The densities
of the weights are ERK's. As in FedSep's comparison, the density of all weights together is the client's capacity: there
is one mask per level, and smaller ones lie within larger ones.

That is the authors' code, whose clients readjust after the last of ten local epochs. Their text also allows steps
after it (`when = "middle"`: after half of the steps). Deviations: ERK scales densities, where their code scales
sparsities; values go down with their indices in every round.
"""

from math import cos, pi
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, View, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.shared.works import draw_batch, own_rows
from coterie.methods.submodels.carving import NEEDS, Local, Part, asked, by_level, levels_of, merged
from coterie.methods.submodels.thinning import counts, densest, erdos_renyi_kernel, size, spread, within
from coterie.numerics.sparse import Sparse
from coterie.problems.catalogue.submodels import SubModels
from coterie.problems.models.submodel import Anatomy, places
from coterie.settings import BatchSize, Count, Positive, Probability


class FedDSTState(NamedTuple):
    """The whole model, the clients' levels, one mask per level [levels, d], rounds done."""

    x: Tensor
    levels: Tensor
    masks: Tensor
    rounds: int


@work("feddst/dynamic-steps", update=RESULT)
def dynamic_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The change within the mask; where the mask moves, within the new one, and its places."""
    cut = shard.task.anatomy
    start = shared.dense(len(cut.owner))
    mask = torch.zeros_like(start).scatter(0, shared.places.long(), 1.0) > 0
    if static.change == 0.0:
        x = within(shard, start, mask, static.steps, static, draw)
        return (x - start)[shared.places.long()]
    after = static.steps // 2 if static.when == "middle" else 0
    x = within(shard, start, mask, static.steps - after, static, draw)
    kept = static.kept
    own = shard.task.own(shard.task, own_rows(shard))
    slope = own.gradient(x, draw_batch(own_rows(shard), static.batch, draw.phase("grow")))
    stay = densest(cut, torch.where(mask, x.abs(), -1.0), [n - int(static.change * n) for n in kept])
    new = densest(cut, torch.where(stay, torch.inf, torch.where(mask, -1.0, slope.abs())), kept)
    x = x * (new & stay)
    x = within(shard, x, new, after, static, draw.phase("regrown")) if after else x
    index = places(new, size(cut, kept))
    return Sparse(torch.where(mask, x - start, x)[index], index.to(torch.int32))


def kept_by_any(x: Tensor, parts: list[Part]) -> Tensor:
    """Which parameters some client kept, [d] bool."""
    ones = [Part(part.places, torch.ones_like(part.change)) for part in parts]
    return merged(torch.zeros_like(x), ones) > 0


@validated
def feddst(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    batch: BatchSize = 20,
    optimiser: Rule = "sgd",
    readjust: Count = 10,
    change: Probability = 0.1,
    until: Count = 1000,
    when: Literal["end", "middle"] = "end",
    density: Literal["erk", "uniform"] = "erk",
) -> Method:
    """Train sparse networks whose masks move: drop the smallest weights, grow where gradients are large.

    Symbols: γ = step, α_0 = change.

    Cost: 1 round per call of round; a client receives its kept weights with indices, and sends their changes.

    Args:
        optimiser: rule of the clients' local steps
        readjust: rounds between two moves of the masks
        change: share of the kept weights that the first move replaces
        until: round at which the masks come to rest
        when: masks move after the last local step, or after half of them
        density: density of each weight by its shape (erk), or the same for all (uniform)

    Example:
        >>> from coterie.methods import feddst
        >>> feddst().name
        'feddst'
    """
    local = Local(step, local_steps, batch, optimiser)

    def kept(cut: Anatomy, share: float) -> list[int]:
        return spread(cut, share, erdos_renyi_kernel(cut)) if density == "erk" else counts(cut, share)

    def masks(task: Any, x: Tensor) -> Tensor:
        return torch.stack([densest(task.anatomy, x.abs(), kept(task.anatomy, share)) for share in task.shares])

    def init(problem: SubModels, n: int) -> FedDSTState:
        found = masks(problem.task, problem.start)
        return FedDSTState(problem.start * found[0], problem.levels, found, 0)

    def round(fed: Federation, s: FedDSTState, draw: Draw) -> FedDSTState:
        task, cut = fed.task, fed.task.anatomy
        moving = s.rounds % readjust == readjust - 1 and s.rounds < until
        alpha = change / 2 * (1 + cos(pi * s.rounds / until)) if moving else 0.0

        levels = levels_of(task, s.levels, draw)
        offered = torch.zeros_like(s.masks[0])

        def ask(level: int, group: Federation) -> Part:
            entries = kept(cut, task.shares[level])
            index = places(s.masks[level], size(cut, entries))
            settings: dict[str, Any] = {**local._asdict(), "kept": entries, "change": alpha, "when": when}
            message = Sparse(s.x[index], index.to(torch.int32))
            reply, _ = group.gather(dynamic_steps, message, draw=draw.phase("learn"), **settings)
            offered.logical_or_(s.masks[level])
            return Part(reply.places.long(), reply.values) if alpha else Part(index, reply)

        parts = asked(fed, by_level(levels), ask)
        x = merged(s.x, parts)
        if alpha:
            x = torch.where(offered & ~kept_by_any(x, parts), 0.0, x)
            found = masks(task, x)
            return FedDSTState(x * found[0], s.levels, found, s.rounds + 1)
        return FedDSTState(x, s.levels, s.masks, s.rounds + 1)

    return Method("feddst", init, round, lambda s: View(s.x), needs=NEEDS, whole_numbers=("feddst/dynamic-steps",))
