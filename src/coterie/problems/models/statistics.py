"""Batch norm after training: running statistics that stand for the rows it was trained on.

In training, batch norm uses the batch at hand. A single row is no batch, so after training every layer is given the
mean and variance of its inputs over the clients' training rows, at the trained θ: those that one batch of all these
rows would give it, so that single rows are predicted as that batch would be. Inputs of a layer depend on the layers
before it, so there is one pass per layer, in the order in which they run; each is one round, in which clients send two
numbers per channel and a count. Clients are weighed by their learned weights, or without any by their rows; where every
client has a model of its own, its statistics are those of its own rows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie.federation import Each, Federation, Shard, Static, work
from coterie.federation.tree import Tree
from coterie.numerics import Draw
from coterie.problems.models.flat import NO_BUFFERS, Buffers, FlatModel, Inputs

PHASE = "batch norm"


class _Reached(Exception):
    """Carries the input of the layer that is looked at."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


@work("models/batch-norm-moments", update=None, whole_pass=True, mode="sequential")
def moments(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """Mean and mean square, by channel, of what comes into a layer over a client's training rows, and how many values
    that are; layers before it use the statistics that are known already."""
    theta, known = shared
    task, rows = shard.task, shard.train
    assert rows is not None
    module = task.model.frozen_at(known)
    into = _input_of(task.model, module, static.layer)
    first: Any = 0.0
    second: Any = 0.0
    count = 0
    for batch in rows.blocks(task.block):
        value = into(theta, task.inputs(batch)).double().transpose(0, 1).flatten(1)
        first, second, count = first + value.sum(1), second + value.square().sum(1), count + value.shape[1]
    return first / count, second / count, torch.tensor(float(count), dtype=torch.float64, device=theta.device)


def _input_of(model: FlatModel, module: Any, layer: str) -> Callable[[Tensor, Inputs], Tensor]:
    """The input of a layer, as a function of θ and the model's inputs; nothing behind it is computed."""

    def stop(part: Any, args: tuple[Any, ...]) -> None:
        raise _Reached(args[0])

    module.get_submodule(layer).register_forward_pre_hook(stop)

    def into(theta: Tensor, inputs: Inputs) -> Tensor:
        try:
            with torch.no_grad():
                model.run(module, theta, inputs)
        except _Reached as reached:
            return reached.value
        raise RuntimeError(f"forward does not use {layer}")

    return into


def in_order(model: FlatModel, inputs: Inputs) -> list[str]:
    """The layers of batch norm with running statistics, in the order in which forward uses them; those only."""
    order: list[str] = []
    module = model.frozen_at(NO_BUFFERS)
    for name in model.normalised:
        module.get_submodule(name).register_forward_pre_hook(lambda part, args, name=name: order.append(name))
    with torch.no_grad():
        model.run(module, model.start, inputs)
    return list(dict.fromkeys(order))


def running_statistics(fed: Federation, model: FlatModel, inputs: Inputs, theta: Tensor, w: Tensor | None) -> Buffers:
    """Running statistics of every layer of batch norm, by their names in the module's state.

    Args:
        fed: all clients.
        model: the model.
        inputs: a few rows, which tell the order of the layers.
        theta: the trained parameters, [d], or one row per client.
        w: learned client weights, [K], where there are some.
    """
    personal = theta.dim() == 2
    known: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    for layer in in_order(model, inputs):
        (mean, square, count), ids = fed.gather(
            moments, (Each(theta) if personal else theta, sent), draw=Draw.of(0).phase(PHASE), layer=layer
        )
        if not personal:
            share = count if w is None or w.dim() == 2 else w[ids].to(count)
            mean, square = (share @ value / share.sum() for value in (mean, square))
        elif len(ids) < len(theta):
            return NO_BUFFERS
        variance = (square - mean.square()).clamp(min=0.0)
        seen = torch.ones(len(mean) if personal else (), dtype=torch.int64, device=theta.device)
        found = {"running_mean": mean.to(theta), "running_var": variance.to(theta), "num_batches_tracked": seen}
        known |= {f"{layer}.{key}": value for key, value in found.items()}
        sent = {key: Each(value) if personal else value for key, value in known.items()}
    return known
