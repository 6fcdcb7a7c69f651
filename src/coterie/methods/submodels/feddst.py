"""FedDST (Bibikar et al. 2022): sparse networks whose masks move with training.

Clients train within a mask. Every `readjust` rounds, halfway through its steps, a client drops a share α_r of the kept
entries of each weight, the smallest, and grows as many where the gradient is largest, from 0; it then uploads its mask
too. Each parameter takes the mean over the clients that kept it, and the server cuts its masks by magnitude anew. α_r
falls as a cosine from `change` to 0 at round `until`. As in FedSep's comparison, the density is the client's capacity:
there is one mask per level, and smaller ones lie within larger ones. Deviations: every weight has the same density
(theirs follow from the shape of the layer); masks start by magnitude; values go down with their indices in every round.
"""

from math import cos, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, View, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.shared.works import draw_batch, own_rows
from coterie.methods.submodels.carving import NEEDS, Local, Part, asked, by_level, merged
from coterie.methods.submodels.thinning import counts, densest, size, within
from coterie.numerics.sparse import Sparse
from coterie.problems.catalogue.submodels import SubModels
from coterie.problems.models.submodel import places
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
    half = static.steps // 2
    x = within(shard, start, mask, static.steps - half, static, draw)
    kept = counts(cut, shard.task.shares[static.level])
    slope = shard.task.gradient(x, draw_batch(own_rows(shard), static.batch, draw.phase("grow")))
    stay = densest(cut, torch.where(mask, x.abs(), -1.0), [n - int(static.change * n) for n in kept])
    new = densest(cut, torch.where(stay, torch.inf, torch.where(mask, -1.0, slope.abs())), kept)
    x = within(shard, x * (new & mask), new, half, static, draw.phase("regrown"))
    index = places(new, size(cut, kept))
    return Sparse(torch.where(mask, x - start, x)[index], index.to(torch.int32))


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
) -> Method:
    """Train sparse networks whose masks move: drop the smallest weights, grow where gradients are large.

    Symbols: γ = step, α_0 = change.

    Cost: 1 round per call of round; a client receives its kept weights with indices, and sends their changes.

    Args:
        optimiser: rule of the clients' local steps
        readjust: rounds between two moves of the masks
        change: share of the kept weights that the first move replaces
        until: round at which the masks come to rest

    Example:
        >>> from coterie.methods import feddst
        >>> feddst().name
        'feddst'
    """
    local = Local(step, local_steps, batch, optimiser)

    def masks(task: Any, x: Tensor) -> Tensor:
        return torch.stack([densest(task.anatomy, x.abs(), counts(task.anatomy, share)) for share in task.shares])

    def init(problem: SubModels, n: int) -> FedDSTState:
        found = masks(problem.task, problem.start)
        return FedDSTState(problem.start * found[0], problem.levels, found, 0)

    def round(fed: Federation, s: FedDSTState, draw: Draw) -> FedDSTState:
        task, cut = fed.task, fed.task.anatomy
        moving = s.rounds % readjust == readjust - 1 and s.rounds < until
        alpha = change / 2 * (1 + cos(pi * s.rounds / until)) if moving else 0.0

        def ask(level: int, group: Federation) -> Part:
            index = places(s.masks[level], size(cut, counts(cut, task.shares[level])))
            settings: dict[str, Any] = {**local._asdict(), "level": level, "change": alpha}
            message = Sparse(s.x[index], index.to(torch.int32))
            reply, _ = group.gather(dynamic_steps, message, draw=draw.phase("learn"), **settings)
            return Part(reply.places.long(), reply.values) if alpha else Part(index, reply)

        x = merged(s.x, asked(fed, by_level(s.levels), ask))
        if alpha:
            found = masks(task, x)
            return FedDSTState(x * found[0], s.levels, found, s.rounds + 1)
        return FedDSTState(x, s.levels, s.masks, s.rounds + 1)

    return Method("feddst", init, round, lambda s: View(s.x), needs=NEEDS, whole_numbers=("feddst/dynamic-steps",))
