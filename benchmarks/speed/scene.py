"""What all workloads share: random data, the run of ours, and the same network made of torch's own layers."""

from collections.abc import Callable
from copy import deepcopy
from math import inf
from time import sleep
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed.measure import Side
from coterie.experiment.build import federate, using_threads
from coterie.experiment.compiling import Compiling
from coterie.experiment.config import FederationTable
from coterie.methods import Method
from coterie.numerics import Draw
from coterie.problems import Weighting, weighting
from coterie.problems.models import FlatModel, build
from coterie.problems.models.layers import BatchStatisticsNorm2d, PatchConv2d
from coterie.problems.tasks.variables import Flat

Shards = list[tuple[Tensor, Tensor]]
SEED = Draw.of(0)
ROUND = SEED.round(0)  # of which all sides take their batches


def images(clients: int, rows: int, shape: tuple[int, ...], seed: int = 0) -> Shards:
    """Noise with labels from 10 classes; the time of a step does not depend on what is learned."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(clients, rows, *shape, generator=generator)
    y = torch.randint(0, 10, (clients, rows), generator=generator)
    return list(zip(x, y, strict=True))


def problem_of(model: str, shards: Shards, width: int | None = None) -> tuple[Weighting, nn.Module]:
    """The problem as users make it, and its network made of torch's own layers."""
    net = build(model, tuple(shards[0][0].shape[1:]), 10, seed=0, width=width)
    return weighting(shards, shards[0], FlatModel(net), "cross_entropy"), ordinary(net)


def ours(
    problem: Any,
    method: Method,
    *,
    what: Callable[[Any], Tensor] | None = None,
    rounds: int = 1,
    compiled: bool = False,
    **table: Any,
) -> Side:
    """Rounds from the start, as a run makes them: mode and chunk are chosen by the same measurement.

    With `compiled` they are rounds of a long run with run.compile = auto, after that has chosen. What a problem keeps
    of fixed modules' values is forgotten before: in a run no round is made twice.
    """
    fed, _ = federate(problem, FederationTable(**table))
    start = method.init(problem, fed.n)
    read = what or (lambda s: method.view(s).model)
    variable = getattr(problem.task, "x", None)
    compiling = Compiling(method, "auto" if compiled else False, torch.get_num_threads())

    def run(count: int = rounds) -> Tensor:
        if isinstance(variable, Flat):
            variable.clear()
        state = start
        for t in range(count):
            draw = SEED.round(t)
            state = compiling.round(fed.begin(t + 1, draw), state, draw, lambda: inf)
        return read(state)

    while compiling.undecided:
        run(1)
        sleep(0.05)  # the compiler is at work
    return run


def active(problem: Any, t: int = 0, **table: Any) -> list[int]:
    """The participants of round t."""
    with using_threads(1):
        fed, _ = federate(problem, FederationTable(mode="vmap", **table))
    return fed.begin(t + 1, SEED.round(t)).ids.tolist()


def ordinary(net: nn.Module) -> nn.Module:
    """A copy of a network with torch's own convolutions and batch norms, whose statistics are those of the batch."""
    net = deepcopy(net)
    for name, part in net.named_children():
        setattr(net, name, _torchs_own(part))
    return net


def _torchs_own(part: nn.Module) -> nn.Module:
    if isinstance(part, PatchConv2d):
        other: nn.Module = nn.Conv2d(
            part.in_channels, part.out_channels, part.kernel_size, stride=part.stride, padding=part.padding
        )
    elif isinstance(part, BatchStatisticsNorm2d):
        other = nn.BatchNorm2d(part.num_features, track_running_stats=False)
    else:
        return ordinary(part)
    other.load_state_dict(part.state_dict())
    return other
