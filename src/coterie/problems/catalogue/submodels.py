"""`submodels`: clients that can afford a share of the model only (FedSep, sections 4.2 and 5.2).

Every client has `classes` classes, equally many rows of each, and a capacity: the share of the kernels of each layer
that it can train, drawn by the seed from `capacities`. The model is judged whole, on the published test part. Some
training rows are public: their inputs are known to everybody, their labels to nobody (for methods that distil).

Static batch norm: norms use the statistics of the batch at hand, in training and test alike. `scalers` are HeteroFL's:
in training, a layer with a share of its kernels puts out as much as if it had all. With `masked` the local loss leaves
out the classes that a client lacks, so that it does not unlearn them: the softmax runs over the classes of the batch at
hand ("batch", the default) or of the client ("client"); "zero" is the code of HeteroFL and FedRolex, which sets the
logits of the classes that the client lacks to 0. Their code also draws every client's capacity anew in each round
(`dynamic`) and rounds numbers of kernels up (`rounding`).

Digits are not in the paper: 400 rows are set apart for the test.
"""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Rows
from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.data.dealt import Split, source
from coterie.problems.data.partition import partition as deal_out
from coterie.problems.data.partition import set_apart
from coterie.problems.models import FlatModel, build
from coterie.problems.models.submodel import Anatomy, anatomy
from coterie.problems.tasks.entropy import MaskedEntropy, RowLoss, cross_entropy
from coterie.problems.tasks.supervised import Supervised
from coterie.problems.weighting import Weighting, weighting
from coterie.settings import Count, Name, Positive, Probability

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
Mask = Literal["batch", "client", "zero"]


@dataclass(frozen=True, kw_only=True)
class SubModelTask(Supervised):
    """The whole network, what can be cut from it, and the smaller ones: one per level, the largest share first.

    holds is which classes each client has, [clients, classes]: the server knows it, as in HeteroFL.
    """

    anatomy: Anatomy
    shares: tuple[float, ...]
    plain: tuple[Supervised, ...]
    scaled: tuple[Supervised, ...]
    public: Tensor
    holds: Tensor
    mask: Mask | None = "batch"
    dynamic: bool = False

    def at(self, level: int, *, scaled: bool = True) -> Supervised:
        """The oracles of the network that clients of this level train, with scalers if the problem has some."""
        return (self.scaled if scaled else self.plain)[level]

    def own(self, oracles: Supervised, rows: Rows) -> Supervised:
        """Oracles whose loss leaves out the classes that these rows lack, where the problem masks by client."""
        if self.mask not in ("client", "zero"):
            return oracles
        labels = rows.all().labels.long()
        present = torch.zeros(self.classes or 0, device=labels.device).scatter(0, labels, 1.0) > 0
        loss = MaskedEntropy(present) if self.mask == "client" else MaskedEntropy(present, instead=0.0)
        return replace(oracles, loss_by_row=loss, fused=None)


class Size(NamedTuple):
    """What clients of one capacity train: share of the kernels, parameters, FLOPs for one input; how many they are."""

    share: float
    parameters: int
    flops: int
    clients: int


@dataclass(frozen=True, kw_only=True)
class SubModels(Weighting):
    """A weighting problem without a target, whose clients have levels: numbers of shares, 0 for the largest."""

    task: SubModelTask
    levels: Tensor

    @property
    def offers(self) -> frozenset[str]:
        """What methods may rely on."""
        return super().offers | {"submodels"} | ({"public"} if len(self.task.public) else set())

    @property
    def sizes(self) -> list[Size]:
        """Every sub-model, the largest first."""
        cut = self.task.anatomy
        return [
            Size(share, cut.parameters(share), cut.flops(share), int((self.levels == level).sum()))
            for level, share in enumerate(self.task.shares)
        ]


class SubmodelsPlan(NamedTuple):
    """Sizes for a data set."""

    clients: int
    width: int
    public: int


def submodels(
    context: Context,
    *,
    data: Literal["digits", "mnist", "fashion-mnist", "cifar10"] = "digits",
    model: Name = "small-cnn-norm",
    width: Count | None = None,
    clients: Count | None = None,
    partition: Literal["classes", "ring", "dirichlet", "quantity"] = "classes",
    classes: Count = 2,
    alpha: Positive = 0.5,
    rows: Count | None = None,
    capacities: list[Probability] | None = None,
    dynamic: bool = False,
    rounding: Literal["down", "up"] = "down",
    public: Annotated[int, Field(ge=0)] | None = None,
    test: Count = 400,
    selection: Annotated[int, Field(ge=0)] = 0,
    scalers: bool = True,
    masked: bool | Mask = True,
) -> SubModels:
    """A network of which most clients can afford only a share, with few classes per client.

    Test rows are set aside where no test part is published; of a larger published part as many are used.

    Args:
        width: channels of the first layer; by data set if not set.
        classes: K, classes per client.
        partition: classes dealt at random, neighbours on a ring, or skewed.
        rows: most rows per client; no limit if not set.
        capacities: shares of the model that clients can afford; a client's share is drawn from them.
        dynamic: every client's share is drawn anew in each round (HeteroFL's code), not once.
        rounding: a share of a layer's kernels is rounded down, never above the capacity, or up (HeteroFL's code).
        public: unlabelled rows that everybody has; by data set if not set.
        scalers: a layer with a share of its kernels is scaled up in training (HeteroFL).
        masked: classes in the local loss: those of the batch (true or "batch"), those of the client ("client"), all
            with logits of 0 for those that the client lacks ("zero"), or simply all (false).

    Example:
        >>> from coterie.problems import Context
        >>> problem = submodels(Context(0), clients=4, capacities=[1.0, 0.5])
        >>> [size.share for size in problem.sizes]
        [1.0, 0.5]
    """
    plan = SubmodelsPlan(20, 16, 200) if data == "digits" else SubmodelsPlan(100, 32, 2000)
    clients = clients or plan.clients
    draw = Draw.of(context.seed).phase("submodels")
    (x, y), held_out = source(data, test, draw.phase("test part"))
    mean, deviation = (of(x, (0, 2, 3), keepdim=True) for of in (torch.mean, torch.std))
    x, x_test = (x - mean) / deviation, (held_out.x - mean) / deviation
    tested = draw.phase("test").subset(len(x_test), min(test, len(x_test)))
    chooses, judged = set_apart((x_test[tested], held_out.y[tested]), selection, draw.phase("selection"))
    order = draw.phase("public").permutation(len(y))
    wanted = plan.public if public is None else public
    if wanted >= len(y):
        raise UsageError(f"{data} has {len(y)} training rows; problem.public = {wanted} leaves none. Lower it.")
    open_rows, own = order[:wanted], order[wanted:]
    dealt = [
        own[mine] for mine in _dealt(y[own], clients, Split(partition, classes, alpha), rows, draw.phase("partition"))
    ]
    shares = _shares(capacities)
    wide = width or (plan.width if model.startswith("small-cnn") else None)
    net = build(model, tuple(x.shape[1:]), int(y.max()) + 1, context.seed, wide)
    cut = anatomy(net, tuple(x.shape[1:]), round_up=rounding == "up")
    problem = weighting(
        [(x[mine], y[mine]) for mine in dealt],
        None,
        FlatModel(net),
        "cross_entropy",
        test=judged,
        selection=chooses,
        **context.tensor_options,
    )
    mask: Mask | None = ("batch" if masked else None) if isinstance(masked, bool) else masked
    holds = torch.stack([torch.bincount(y[mine], minlength=int(y.max()) + 1) > 0 for mine in dealt])
    task = _task(problem.task, cut, shares, mask, scalers, x[open_rows], context.tensor_options)
    task = replace(task, holds=holds.to(context.device), dynamic=dynamic)
    levels = draw.phase("capacity").client(torch.arange(clients)).integers(len(shares)).to(context.device)
    known = {f.name: getattr(problem, f.name) for f in fields(Weighting)}
    return SubModels(**{**known, "task": task}, levels=levels)


def _task(
    whole: Any,
    cut: Anatomy,
    shares: tuple[float, ...],
    mask: Mask | None,
    scalers: bool,
    public: Tensor,
    options: dict[str, Any],
) -> SubModelTask:
    """The oracles of the whole network and of those cut out of it."""
    loss: RowLoss = MaskedEntropy() if mask == "batch" else cross_entropy

    def smaller(scaled: bool) -> tuple[Supervised, ...]:
        nets = (FlatModel(cut.carved(share, scaled=scaled)).to(**options) for share in shares)
        return tuple(Supervised(net, loss, classes=whole.classes) for net in nets)

    plain = smaller(False)
    known = {f.name: getattr(whole, f.name) for f in fields(Supervised)} | {"loss_by_row": loss}
    return SubModelTask(
        **known,
        anatomy=cut.to(options["device"]),
        shares=shares,
        plain=plain,
        scaled=smaller(True) if scalers else plain,
        public=whole.model.prepare(public.to(**options)),
        holds=torch.zeros(0, whole.classes or 0, dtype=torch.bool),
        mask=mask,
    )


def _shares(capacities: list[float] | None) -> tuple[float, ...]:
    """The shares, each once, the largest first."""
    if capacities is not None and not capacities:
        raise UsageError("problem.capacities is empty; name at least one share, for example [1.0, 0.5].")
    return SHARES if capacities is None else tuple(sorted(set(capacities), reverse=True))


def _dealt(labels: Tensor, clients: int, split_by: Split, rows: int | None, draw: Draw) -> list[Tensor]:
    """Row numbers by client; with a limit, equally many of each class within it (as they come, where skewed)."""
    classes = split_by.classes
    parts = deal_out(split_by.partition, labels, clients, classes, draw, split_by.alpha)
    if rows is None:
        return parts
    if split_by.partition not in ("classes", "ring"):
        return [mine[:rows] for mine in parts]
    if rows < classes:
        raise UsageError(
            f"problem.rows = {rows} is less than one row of each of problem.classes = {classes}; raise it."
        )
    return [mine.view(classes, -1)[:, : rows // classes].reshape(-1) for mine in parts]
