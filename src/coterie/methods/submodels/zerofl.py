"""ZeroFL (Qiu et al. 2022): clients compute with their largest weights, and upload those.

At every step the gradient is taken at the p largest weights of each tensor, the others at 0, and moves all weights
(SWAT). They upload the changes of the weights that are largest in the end ('Diff on Top-K-W'), a share `extra` more
than they computed with. The server takes the mean over all clients of the round, a change that was not sent being 0;
`average = "holders"` takes it over the clients that sent it, as the other methods on sub-models do. The whole model is
sent down. As in FedSep's comparison, the density is the client's capacity. Deviation: SWAT also drops small activations
in the backward pass, to save work; here they are kept, and no time is saved.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from coterie.federation import RESULT, Batch, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, View, validated
from coterie.methods.shared.optimisers import Rule
from coterie.methods.shared.works import own_rows
from coterie.methods.submodels.carving import (
    NEEDS,
    LevelledState,
    Local,
    Part,
    asked,
    by_level,
    levels_of,
    merged,
    moved,
)
from coterie.methods.submodels.thinning import counts, densest, size
from coterie.numerics.sparse import Sparse
from coterie.problems.catalogue.submodels import SubModels
from coterie.problems.models.submodel import places
from coterie.settings import BatchSize, Count, NonNegative, Positive


@work("zerofl/sparse-steps", update=(RESULT, None))
def sparse_steps(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """The change of the weights that are largest in the end."""
    task, cut = shard.task, shard.task.anatomy
    own, used = task.own(task, own_rows(shard)), counts(cut, task.shares[static.level])
    uploaded = counts(cut, min(1.0, task.shares[static.level] + static.extra))

    def slope(x: Tensor, batch: Batch) -> Tensor:
        return own.gradient(x * densest(cut, x.abs(), used), batch)

    x = moved(shared, slope, shard, static.steps, static, draw)
    index = places(densest(cut, x.abs(), uploaded), size(cut, uploaded))
    return Sparse((x - shared)[index], index.to(torch.int32))


@validated
def zerofl(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    batch: BatchSize = 20,
    optimiser: Rule = "sgd",
    extra: NonNegative = 0.1,
    average: Literal["active", "holders"] = "active",
) -> Method:
    """Let clients compute with their largest weights and upload the changes of those.

    Symbols: γ = step.

    Cost: 1 round per call of round; d numbers down per client, and its share p + extra of them up, with indices.

    Args:
        optimiser: rule of the clients' local steps
        extra: share of the weights that is uploaded beyond the client's capacity
        average: mean of a change over all active clients, or over those that sent it

    Example:
        >>> from coterie.methods import zerofl
        >>> zerofl().name
        'zerofl'
    """
    local = Local(step, local_steps, batch, optimiser)

    def init(problem: SubModels, n: int) -> LevelledState:
        return LevelledState(problem.start, problem.levels)

    def round(fed: Federation, s: LevelledState, draw: Draw) -> LevelledState:
        def ask(level: int, group: Federation) -> Part:
            settings: dict[str, Any] = {**local._asdict(), "level": level, "extra": extra}
            change, _ = group.gather(sparse_steps, s.x, draw=draw.phase("learn"), **settings)
            return Part(change.places.long(), change.values)

        parts = asked(fed, by_level(levels_of(fed.task, s.levels, draw)), ask)
        return s._replace(x=merged(s.x, parts, everyone=average == "active"))

    return Method("zerofl", init, round, lambda s: View(s.x), needs=NEEDS, whole_numbers=("zerofl/sparse-steps",))
