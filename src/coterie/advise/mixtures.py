"""Many models at once, each trained to the end on a mixture of the target's rows and the partners' rows.

Model b minimises  w_b0 L_0(θ; rows of mask b) + Σ_k w_bk L_k(θ) + ½ l2_b ‖θ‖²  (offsets are not penalised), where L_0
and L_k are mean losses. All models of a call are trained together by L-BFGS: one exchange with the partners per step.
The target is whoever asks; its own rows are used on the spot.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from coterie.federation import RESULT, Batch, Each, Federation, LocalEngine, Rows, Shard, Static, Work, work
from coterie.federation.tree import Tree
from coterie.numerics import Draw
from coterie.numerics.derivatives import value_and_grad
from coterie.numerics.lbfgs import minimise
from coterie.problems.files import PreparedFiles
from coterie.problems.tasks.softmax import softmax_value_and_gradient
from coterie.problems.tasks.supervised import Supervised
from coterie.problems.weighting import Weighting

PARTNER_ROWS = 2048  # of a partner, in comparisons: a fixed sample of a larger one
TARGET_ROWS = 8192
NUMBERS = 1 << 25  # that the models of one block may put out together
STEPS, TOLERANCE, PROGRESS = 120, 1e-4, 3e-5
DEEP_STEPS = 60  # of a model that is not linear: it is not trained to the end


@dataclass(frozen=True)
class Arms:
    """What models are trained on: weights [B, K + 1] (the target's own last), a mask's number [B], and l2 [B]."""

    weights: Tensor
    mask: Tensor
    l2: Tensor

    def __len__(self) -> int:
        return len(self.l2)

    def at(self, index: slice | Tensor) -> "Arms":
        """Some of them."""
        return Arms(self.weights[index], self.mask[index], self.l2[index])


@work("mixtures/losses-and-gradients", update=RESULT)
def losses_and_gradients(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """L_k and ∇L_k at each of the models [B, d], as [B, 1 + d]."""
    assert shard.train is not None
    task = replace(shard.task, l2=0.0)  # penalties are the models' own
    return values_and_gradients(task, shared, sampled(shard.train, static.rows, draw))


def sampled(rows: Rows, most: int, draw: Draw) -> Batch:
    """All rows of a small shard, a fixed sample of a large one; weights are 1 for rows that are there."""
    if rows.capacity <= most:
        taken = rows.all()
        return taken if taken.weight is not None else taken._replace(weight=_ones(rows, rows.capacity))
    taken = rows.take(draw.phase("pool").integers(rows.count, most))
    return taken._replace(weight=_ones(rows, most))


def _ones(rows: Rows, count: int) -> Tensor:
    kind = next(c.dtype for c in rows.columns if c.is_floating_point())
    return torch.ones(count, dtype=kind, device=rows.offset.device)


def values_and_gradients(task: Supervised, thetas: Tensor, batch: Batch, weight: Tensor | None = None) -> Tensor:
    """Mean loss and gradient at each θ, [B, 1 + d]; weight [B, n] gives every model rows of its own."""

    def at(theta: Tensor, w: Tensor | None) -> Tensor:
        rows = batch._replace(weight=w)
        if task.softmax_regression:
            return softmax_value_and_gradient(theta, rows)
        value, gradient = value_and_grad(lambda t: task.loss(t, rows))(theta)
        return torch.cat([value[None], gradient])

    if weight is None:
        return over_models(lambda theta: at(theta, batch.weight), task, thetas)
    return over_models(at, task, thetas, weight)


def over_models(f: Callable[..., Tensor], task: Supervised, *tensors: Tensor) -> Tensor:
    """f of each model, at once where the model can be vectorised."""
    if task.vmaps:
        return vmap(f)(*tensors)
    return torch.stack([f(*row) for row in zip(*tensors, strict=True)])


class PartnersLeft(Exception):  # no error: the others go on
    """Partners that did not answer, by number: models of mixtures with them would be models of other mixtures."""

    def __init__(self, partners: list[int]) -> None:
        super().__init__(f"partners {partners} left")
        self.partners = partners


Connect = Callable[[Weighting, str], Federation]
"""The federation of a problem whose partners are elsewhere, by the name of what it is for."""


class Mixtures:
    """Trains models on any mixtures, on any of the masks of the target's rows.

    Args:
        data: the target's rows, and the partners' or their number.
        masks: which of the target's rows models see, [masks, n].
        draw: which rows of a large partner are used.
        rows: at most so many rows of a partner are used.
        connect: reaches partners that are elsewhere; by default they are in this process.
    """

    def __init__(
        self,
        data: PreparedFiles,
        masks: Tensor,
        draw: Draw,
        rows: int = PARTNER_ROWS,
        connect: Connect | None = None,
    ) -> None:
        n = masks.shape[1]
        span = data.span(0, 0, n)
        problem = data.problem(span._replace(length=0), span, None)
        assert isinstance(problem.task, Supervised)
        self.task = replace(problem.task, l2=0.0)
        self.draw, self.masks = draw, masks
        self.start = problem.start
        assert problem.target is not None
        assert problem.target.valid is not None
        self.own = problem.target.valid.all()
        self.most = min(rows, problem.train.capacity)
        self.wide = self.task.model.activation_numbers(self.own.inputs[:1]) + 1
        self.partners = len(data.partners)
        self.sizes = problem.train.counts.to(self.start)
        engine = LocalEngine(self.task, problem.train, None, problem.target, "sequential")
        self.fed = Federation.on(engine) if connect is None else connect(problem, "mixtures")
        self.penalised = self.task.model.penalised()
        self.steps = STEPS if self.task.model.linear else DEEP_STEPS

    @property
    def block(self) -> int:
        """How many models may be trained at once."""
        return max(1, NUMBERS // (max(self.most, self.masks.shape[1]) * self.wide))

    def train(self, arms: Arms, start: Tensor | None = None, *, exactly: bool = False) -> Tensor:
        """The models [B, d] of these arms; every partner that has any weight is asked about all models of a block.

        exactly is for the model that is used in the end: comparisons stop where further steps would hardly change it.
        """
        parts = []
        for first in range(0, len(arms), self.block):
            part = arms.at(slice(first, first + self.block))
            begin = self.start.expand(len(part), -1) if start is None else start[first : first + self.block]
            parts.append(self._block(part, begin, self._from_all(part), exactly))
        return torch.cat(parts)

    def train_pairs(self, arms: Arms) -> Tensor:
        """The models of arms [K · B] of which the k-th B are mixtures of the target and partner k alone."""
        B = len(arms) // self.partners
        size = max(1, self.block // self.partners)
        parts = []
        by_partner = torch.arange(len(arms)).view(self.partners, B)
        for first in range(0, B, size):
            index = by_partner[:, first : first + size].reshape(-1)
            part = arms.at(index)
            found = self._block(part, self.start.expand(len(part), -1), self._from_each(part))
            parts.append(found.view(self.partners, -1, found.shape[1]))
        return torch.cat(parts, 1).flatten(0, 1)

    def outputs(self, thetas: Tensor) -> Tensor:
        """What models put out for the target's rows, [B, n, outputs]."""
        size = max(1, NUMBERS // (self.masks.shape[1] * self.wide))

        def of(theta: Tensor) -> Tensor:
            return self.task.outputs(theta, self.own)

        with torch.no_grad():
            return torch.cat([over_models(of, self.task, part) for part in torch.split(thetas, size)])

    def predictions(self, thetas: Tensor) -> Tensor:
        """Probabilities of classes, or the numbers, for the target's rows, [B, n, outputs]."""
        outputs = self.outputs(thetas)
        return outputs.flatten(2) if self.task.classes is None else torch.softmax(outputs, -1)

    def row_errors(self, thetas: Tensor) -> Tensor:
        """By which models are compared, for each of the target's rows, [B, n].

        The Brier score of classes, which no single row can dominate as it can the log loss; the loss of a number.
        """
        labels = self.own.labels
        if self.task.classes is None:
            return torch.stack([self.task.loss_by_row(outputs, labels) for outputs in self.outputs(thetas)])
        wanted = torch.nn.functional.one_hot(labels.long(), self.task.classes).to(thetas)
        return 0.5 * (self.predictions(thetas) - wanted).square().sum(2)

    def _block(
        self, arms: Arms, start: Tensor, theirs: Callable[[Tensor, Tensor], Tensor], exactly: bool = False
    ) -> Tensor:
        own_weight, keep = arms.weights[:, -1], self.masks[arms.mask]

        def evaluate(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
            mine = values_and_gradients(self.task, x, self.own, keep[which])
            total = own_weight[which, None] * mine + theirs(x, which)
            penalty = arms.l2[which, None] * self.penalised * x
            return total[:, 0] + 0.5 * (penalty * x).sum(1), total[:, 1:] + penalty

        progress, steps = (0.0, 2 * self.steps) if exactly else (PROGRESS, self.steps)
        return minimise(evaluate, start, evaluations=steps, tolerance=TOLERANCE, progress=progress).x

    def _from_all(self, arms: Arms) -> Callable[[Tensor, Tensor], Tensor]:
        """Σ_k w_k (L_k, ∇L_k): partners without weight are not asked."""

        def theirs(x: Tensor, which: Tensor) -> Tensor:
            W = arms.weights[which, :-1]
            asked = W.any(0).nonzero()[:, 0]
            if not len(asked):
                return torch.zeros((), dtype=x.dtype)
            some = (W[:, asked] != 0).any(1).nonzero()[:, 0]
            given, ids = self.ask(self._subset(asked), losses_and_gradients, x[some])
            total = x.new_zeros(len(x), 1 + x.shape[1])
            return total.index_copy(0, some, torch.einsum("bk,kbd->bd", W[some][:, ids], given))

        return theirs

    def _from_each(self, arms: Arms) -> Callable[[Tensor, Tensor], Tensor]:
        """w_k (L_k, ∇L_k) of the one partner of each model."""
        K, B = self.partners, len(arms) // self.partners

        def theirs(x: Tensor, which: Tensor) -> Tensor:
            every = self.start.expand(K * B, -1).clone()
            every[which] = x
            given, ids = self.ask(self.fed, losses_and_gradients, Each(every.view(K, B, -1)))
            full = x.new_zeros(K, B, 1 + x.shape[1]).index_copy(0, ids, given).flatten(0, 1)[which]
            shares = arms.weights[which, which // B]
            return shares[:, None] * full

        return theirs

    def ask(self, fed: Federation, work: Work, shared: Tree, draw: Draw | None = None, **static: Any) -> Any:
        """What all partners of a federation answer; if some do not, who they are."""
        given, ids = fed.gather(work, shared, draw=draw or self.draw, rows=self.most, **static)
        if len(ids) < len(fed.ids):
            raise PartnersLeft(sorted(set(fed.ids.tolist()) - set(ids.tolist())))
        return given, ids

    def _subset(self, asked: Tensor) -> Federation:
        return next(fed for _, fed in self.fed.parts({0: asked}))
