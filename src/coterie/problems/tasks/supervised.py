"""Supervised learning of a flat model: the oracles of a weighting problem.

A loss is given by row, so that padding rows count for nothing and means over unequal shards are exact.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Batch, Rows
from coterie.federation.mapped import MappedColumn
from coterie.numerics.compiled import Fused, Workshop
from coterie.numerics.control import differentiated, transformed
from coterie.numerics.derivatives import gradient, hessian_vector, native_hessian_vector, value_and_gradient
from coterie.numerics.proximal import Pull
from coterie.problems.base import Task
from coterie.problems.models import FlatModel
from coterie.problems.models.chain import Chain
from coterie.problems.models.flat import Inputs
from coterie.problems.models.perceptron import Perceptron
from coterie.problems.models.tiled import Tiled
from coterie.problems.tasks.entropy import (
    RowLoss,
    cross_entropy,
    cross_entropy_column_slopes,
    cross_entropy_columns,
    cross_entropy_slopes,
    slope_of,
)
from coterie.problems.tasks.softmax import softmax_gradient, softmax_product
from coterie.problems.tasks.survival import hazard
from coterie.settings import chosen


def squared(outputs: Tensor, labels: Tensor) -> Tensor:
    """½ (output − label)², summed over outputs, by row."""
    labels = labels.reshape(outputs.shape).to(outputs.dtype)
    return 0.5 * (outputs - labels).square().reshape(len(outputs), -1).sum(1)


LOSSES: dict[str, RowLoss] = {"cross_entropy": cross_entropy, "squared": squared, "hazard": hazard}
QUICK_BYTES = 48 << 20


class FusedOracles(NamedTuple):
    """∇L(θ) and ∇²L(θ) v as compiled functions of θ, v and a batch's tensors."""

    gradient: Fused
    product: Fused


def _operands(batch: Batch) -> tuple[Tensor, ...]:
    """A batch as tensors: inputs and labels, and the weights if it has any."""
    return (batch.inputs, batch.labels) if batch.weight is None else (batch.inputs, batch.labels, batch.weight)


def _batch(operands: tuple[Tensor, ...]) -> Batch:
    """What `_operands` took apart."""
    return Batch(operands[:2], operands[2] if len(operands) > 2 else None)


def _plain(network: Perceptron | Chain | Tiled, batch: Batch, *others: Tensor) -> bool:
    """Whether a batch is rows and labels alone, and nothing around the call differentiates what is computed."""
    alone = len(batch.columns) == 2 and network.takes(batch.inputs)
    return alone and not differentiated(*others, *batch.columns, batch.weight)


@dataclass(frozen=True)
class Supervised(Task):
    """Model and loss, with the derivatives that methods ask for. θ is flat."""

    model: FlatModel
    loss_by_row: RowLoss
    l2: float = 0.0
    classes: int | None = None
    block: int = 4096
    fused: FusedOracles | None = None

    @staticmethod
    def of(model: FlatModel, loss: str | RowLoss, *, l2: float = 0.0, classes: int | None = None) -> "Supervised":
        """A task by the loss's name, or with a loss of one's own (outputs, labels) → one number per row."""
        by_row = chosen("loss", loss, LOSSES) if isinstance(loss, str) else loss
        return Supervised(model, by_row, l2, classes)

    @property
    def softmax_regression(self) -> bool:
        """Whether the derivatives are known by hand: a linear model with cross-entropy."""
        return self.model.linear and self.loss_by_row is cross_entropy

    @property
    def concurrent(self) -> bool:
        """Whether threads may compute several clients at a time; the compiler has one at a time."""
        return self.fused is None

    @property
    def quadratic(self) -> bool:
        """Whether this is least squares on a linear model."""
        return self.model.affine and self.loss_by_row is squared

    def _ridged(self, derivative: Tensor, along: Tensor) -> Tensor:
        return derivative + self.l2 * along if self.l2 else derivative

    def inputs(self, batch: Batch) -> Inputs:
        """What the model is given: all columns but the labels."""
        return batch.columns[:-1] if len(batch.columns) > 2 else batch.inputs

    def outputs(self, theta: Tensor, batch: Batch) -> Tensor:
        """The model's outputs; dropout is on where the batch has keys."""
        return self.model(theta, self.inputs(batch), batch.keys)

    def loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """The mean loss of a batch, plus ½ l2 ‖θ‖²."""
        return self._of_outputs(theta, self.outputs(theta, batch), batch)

    def _of_outputs(self, theta: Tensor, outputs: Tensor, batch: Batch) -> Tensor:
        losses = self.loss_by_row(outputs, batch.labels)
        mean = losses.mean() if batch.weight is None else (losses * batch.weight).sum() / batch.weight.sum()
        return mean + 0.5 * self.l2 * theta.square().sum() if self.l2 else mean

    def _slope(self, batch: Batch) -> Callable[[Tensor], Tensor] | None:
        """The derivative of a batch's loss by the outputs, where it is known by hand."""
        known = slope_of(self.loss_by_row)
        return None if known is None else lambda outputs: known(outputs, batch.labels, batch.weight)

    def gradient(self, theta: Tensor, batch: Batch) -> Tensor:
        """∇L(θ) on a batch."""
        if self.fused is not None:
            return self.fused.gradient(theta, *_operands(batch))
        if self.softmax_regression:
            return self._ridged(softmax_gradient(theta, batch), theta)
        tiled = self.model.tiled
        if tiled is not None and self.loss_by_row is cross_entropy and _plain(tiled, batch, theta):
            found = tiled.gradient(theta, batch.inputs, batch.labels, batch.weight, cross_entropy_columns)
            return self._ridged(found, theta)
        network, slope = self.model.perceptron or self.model.chain, self._slope(batch)
        if network is not None and slope is not None and _plain(network, batch, theta):
            return self._ridged(network.gradient(theta, batch.inputs, slope), theta)
        return gradient(lambda t: self.loss(t, batch), theta)

    def proximal_point(self, center: Tensor, batch: Batch, pull: Pull) -> Tensor:
        """As every task's; a network of patches takes all steps of all clients at once."""
        tiled = None if self.fused is not None or self.l2 else self.model.tiled
        if tiled is not None and self.loss_by_row is cross_entropy and _plain(tiled, batch, center):
            return tiled.proximal_point(center, batch.inputs, batch.labels, batch.weight, cross_entropy_columns, pull)
        return super().proximal_point(center, batch, pull)

    def loss_and_gradient(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """L(θ) and ∇L(θ) on a batch: of a network by one pass forward."""
        if self.fused is not None or self.softmax_regression:
            return self.loss(theta, batch), self.gradient(theta, batch)
        chain, slope = self.model.chain, self._slope(batch)
        if chain is not None and slope is not None and _plain(chain, batch, theta):
            outputs, found = chain.outputs_and_gradient(theta, batch.inputs, slope)
            return self._of_outputs(theta, outputs, batch), self._ridged(found, theta)
        return value_and_gradient(lambda t: self.loss(t, batch), theta)

    def full_loss_and_gradient(self, theta: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """L(θ) and ∇L(θ) over all rows, which are passed over once."""

        def both(batch: Batch) -> Tensor:
            loss, slope = self.loss_and_gradient(theta, batch)
            return torch.cat([loss[None], slope])

        found = self.full(both, rows)
        return found[0], found[1:]

    def hvp(self, theta: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """∇²L(θ) v on a batch."""
        if self.fused is not None:
            return self.fused.product(theta, v, *_operands(batch))
        if self.softmax_regression:
            return self._ridged(softmax_product(theta, v, batch), v)
        chain = None if self.mixes_rows else self.model.chain
        if chain is not None and self.loss_by_row is cross_entropy and _plain(chain, batch, theta, v):
            slopes = partial(cross_entropy_slopes, labels=batch.labels, weight=batch.weight)
            return self._ridged(chain.product(theta, v, batch.inputs, slopes), v)
        tiled = self.model.tiled
        if tiled is not None and self.loss_by_row is cross_entropy and _plain(tiled, batch, theta, v):
            found = tiled.product(theta, v, batch.inputs, batch.labels, batch.weight, cross_entropy_column_slopes)
            return self._ridged(found, v)
        plainly = not (transformed() or theta.requires_grad or v.requires_grad)
        return (native_hessian_vector if plainly else hessian_vector)(lambda t: self.loss(t, batch), theta, v)

    def fuse(self, name: Hashable, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function around derivatives, as one program where derivatives are compiled; else as it is."""
        return function if self.fused is None else self.fused.gradient.workshop.fused(name, function)

    def compiled(self, workshop: Workshop) -> "Supervised":
        """The same task with derivatives that the workshop compiles; for models with one input and without dropout."""
        plain = replace(self, fused=None)

        def gradient(theta: Tensor, *operands: Tensor) -> Tensor:
            return plain.gradient(theta, _batch(operands))

        def product(theta: Tensor, v: Tensor, *operands: Tensor) -> Tensor:
            return plain.hvp(theta, v, _batch(operands))

        return replace(self, fused=FusedOracles(Fused(gradient, workshop), Fused(product, workshop)))

    def full(self, oracle: Callable[[Batch], Any], rows: Rows) -> Any:
        """The mean of a batch oracle over all of a client's rows, a block at a time so that memory is bounded.

        Where rows mix (batch norm) the whole shard is one batch: a mean over blocks would be another function.
        """
        if self.mixes_rows or rows.capacity <= self.block:
            return oracle(rows.all())
        total: Any = 0.0
        for batch in rows.blocks(self.block):
            if batch.weight is None:
                total = total + oracle(batch) * batch.inputs.shape[0]
                continue
            # the mean over a block of padding alone would be 0/0: ask it with weight 1 and count it 0 times
            kept = batch.weight.sum()
            total = total + oracle(batch._replace(weight=torch.where(kept > 0, batch.weight, 1.0))) * kept
        return total / rows.count

    def footprint(self, rows: Rows, capacity: int) -> int:
        """Bytes that one client's gradient may need: its rows with all activations, and a few vectors of size d.

        Activations are counted on two rows by hooks; the factor stands for what autograd keeps beside them.
        """
        sample = rows.at(torch.zeros(2, dtype=torch.int64, device=rows.offset.device))
        activations = self.model.activation_numbers(self.inputs(sample)) // 2
        per_row = sum(c[:1].numel() * c.element_size() for c in rows.columns)
        width = self.model.start.element_size()
        at_once = capacity if self.mixes_rows else min(capacity, self.block)
        return at_once * (2 * per_row + 4 * activations * width) + 8 * self.model.size * width

    def judge(self, theta: Tensor, rows: Rows) -> Tensor:
        """Mean loss and share of right answers (1 where there are no classes) over all rows, [2]; under vmap too."""

        def of(batch: Batch) -> Tensor:
            outputs = self.outputs(theta, batch)
            losses = self.loss_by_row(outputs, batch.labels)
            right = torch.ones_like(losses) if self.classes is None else (outputs.argmax(1) == batch.labels).to(losses)
            both = torch.stack([losses, right])
            return both.mean(1) if batch.weight is None else both @ batch.weight / batch.weight.sum()

        return self.full(of, rows)

    def _quick_block(self, rows: Rows) -> int:
        """Rows whose layers' outputs are small enough to be kept by the allocator: larger ones go back to the system
        after every layer, which takes nearly as long as the arithmetic.
        """
        numbers = self.model.activation_numbers(self.inputs(rows.at(rows.offset.new_zeros(1))))
        return max(64, min(self.block, QUICK_BYTES // max(1, numbers * self.model.start.element_size())))

    def outputs_and_labels(self, theta: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """The model's outputs for all rows, and their labels; without gradients."""
        with torch.no_grad():
            blocks: Iterable[Batch] = [rows.all()] if self.mixes_rows else rows.blocks(self._quick_block(rows))
            pairs = [(self.outputs(theta, batch), batch.labels) for batch in blocks]
            outputs, labels = (torch.cat(column) for column in zip(*pairs, strict=True))
            return outputs, labels

    def measure(self, theta: Tensor, rows: Rows, prefix: str) -> dict[str, float]:
        """Loss and, for classes, accuracy over all rows, named `prefix_loss` and `prefix_accuracy`."""
        with torch.no_grad():
            outputs, labels = self.outputs_and_labels(theta, rows)
            measures = {f"{prefix}_loss": float(self.loss_by_row(outputs, labels).mean())}
            if self.classes is not None:
                measures[f"{prefix}_accuracy"] = float((outputs.argmax(1) == labels).cpu().double().mean())
            return measures


def check_labels(task: Supervised, labels: Tensor | MappedColumn, who: str) -> None:
    """Class labels must be integers within range; a wrong one would fail deep inside a kernel."""
    if task.classes is None:
        return
    if isinstance(labels, MappedColumn):
        for columns in labels.table.scan():
            check_labels(task, columns[labels.number], who)
        return
    if labels.is_floating_point():
        raise UsageError(f"the labels of {who} are {labels.dtype}; cross-entropy needs integer class numbers.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= task.classes:
        raise UsageError(
            f"{who} has labels from {low} to {high}, but the model has {task.classes} outputs; "
            f"number the classes 0 … {task.classes - 1} or give the model more outputs."
        )


__all__ = ["LOSSES", "RowLoss", "Supervised", "check_labels", "cross_entropy", "squared"]
