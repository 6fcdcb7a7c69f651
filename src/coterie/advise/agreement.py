"""Do a partner's labels agree with what the target's rows teach?

Models that were trained on the target's rows alone predict the partner's labels. Regressing its labels on these
predictions gives a slope; so does regressing the target's own labels on the predictions of models that have not seen
them. Agreement is the partner's slope divided by the target's: 1 for a partner that draws from the same distribution,
1 − 2q if a share q of two-class labels is wrong, 0 for labels that have nothing to do with the inputs, −1 for flipped
ones. Of a number, noisier labels leave the slope as it is; there the ratio of the residual deviations counts too.

The partner's rows judge here, so partners with many rows are judged sharply however few rows the target has. Whether
labels carry anything at all is a randomisation test at the partner: the same sum with its labels shuffled.
"""

from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import false_discovery_control, norm
from scipy.stats import t as student
from torch import Tensor

from coterie.advise.mixtures import Mixtures, over_models, sampled
from coterie.federation import RESULT, Batch, Shard, Static, work
from coterie.federation.tree import Tree
from coterie.numerics import Draw
from coterie.problems.tasks.supervised import Supervised
from coterie.problems.tasks.survival import hazard, surprise

SAME = 1e-9  # slopes and spreads below this are rounding
LEVEL = 0.05
MOSTLY = 0.6  # agreement below which a partner is no friend, whatever the error
SHORT = 2.0  # standard errors by which the agreement of a friend may fall short of 1
COMPATIBLE = 2.0  # standard errors within which a partner's slope may be the target's


class Slope(NamedTuple):
    """A slope with its standard error, and the residual deviation, as arrays of one shape."""

    value: np.ndarray
    error: np.ndarray
    residual: np.ndarray


class Agreement(NamedTuple):
    """By partner, [K]: agreement with its standard error, and the probability of labels as good by shuffling."""

    value: np.ndarray
    error: np.ndarray
    p: np.ndarray
    one_class: np.ndarray

    @property
    def carries(self) -> np.ndarray:
        """Whose labels carry something, with false discoveries controlled over the partners."""
        return np.asarray(false_discovery_control(self.p) <= LEVEL)

    @property
    def agrees(self) -> np.ndarray:
        """Who agrees as well as a partner of the same distribution would."""
        return np.asarray(self.carries & (self.value >= MOSTLY) & (self.value + SHORT * self.error >= 1.0))


@work("agreement/label-slopes", update=RESULT)
def label_slopes(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """Five sums for each group of models [G, B, d], and below them what shuffled labels give.

    Σ p'y, Σ p'p, Σ y'y, Σ (p'(y − κp))² of centred predictions and labels, and the number of rows; then the first sum
    of the first group for each of M shuffles, padded with zeros, [G + M, 5].
    """
    assert shard.train is not None
    batch = sampled(shard.train, static.rows, draw)
    assert batch.weight is not None
    y = centred(targets(shard.task, batch), batch.weight)
    by_group = [centred(predicted(shard.task, models, batch), batch.weight) for models in shared]
    rows = [sums(p, y, batch.weight) for p in by_group]
    kept, mean = batch.weight.sum().to(torch.int64), by_group[0].mean(0)
    for m in range(static.placebos):
        order = draw.phase("shuffle").step(m).permutation(len(y), kept)
        product = (mean * y[order]).sum()
        rows.append(torch.cat([product[None], product.new_zeros(4)]))
    return torch.stack(rows)


def targets(task: Supervised, batch: Batch) -> Tensor:
    """The labels as the predictions should be: probabilities of classes, or the numbers, [n, outputs].

    Of times with events, how much earlier than expected the event happened.
    """
    if task.loss_by_row is hazard:
        return surprise(batch.labels)[:, None].to(batch.inputs.dtype)
    if task.classes is None:
        return batch.labels.reshape(len(batch.labels), -1).to(batch.inputs.dtype)
    return torch.nn.functional.one_hot(batch.labels.long(), task.classes).to(batch.inputs.dtype)


def predictions(task: Supervised, outputs: Tensor) -> Tensor:
    """Probabilities of classes, or the numbers."""
    return outputs.reshape(*outputs.shape[:2], -1) if task.classes is None else torch.softmax(outputs, -1)


def predicted(task: Supervised, models: Tensor, batch: Batch) -> Tensor:
    """The predictions of models [B, d] for each row, [B, n, outputs]."""
    return predictions(task, over_models(lambda theta: task.outputs(theta, batch), task, models))


def centred(values: Tensor, weight: Tensor) -> Tensor:
    """Values [..., n, outputs] minus their weighted mean over rows; rows without weight are 0."""
    mean = (values * weight[:, None]).sum(-2, keepdim=True) / weight.sum()
    return (values - mean) * weight[:, None]


def sums(p: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """What a slope, its error and its residuals are made of: means over models of predictions [B, n, outputs]."""
    product, square = (p * y).sum((1, 2)).mean(), p.square().sum((1, 2)).mean()
    slope = product / square.clamp(min=SAME)
    spread = (p * (y - slope * p)).sum(2).mean(0).square().sum()
    return torch.stack([product, square, y.square().sum(), spread, weight.sum()])


def slopes(totals: np.ndarray) -> Slope:
    """Slopes from sums [..., 5]."""
    product, square, labels, spread, rows = np.moveaxis(totals, -1, 0)
    square = np.maximum(square, SAME)
    value = product / square
    residual = np.sqrt(np.maximum(labels - value * product, 0.0) / np.maximum(rows - 2.0, 1.0))
    return Slope(value, np.sqrt(spread) / square, residual)


def ask(mixtures: Mixtures, groups: list[Tensor], placebos: int, draw: Draw) -> np.ndarray:
    """The sums of all partners for G groups of models [B, d] and shuffled labels, [K, G + M, 5]. One exchange."""
    given, ids = mixtures.ask(mixtures.fed, label_slopes, groups, draw, placebos=placebos)
    every = torch.zeros(mixtures.partners, *given.shape[1:], dtype=given.dtype).index_copy(0, ids, given)
    return every.double().numpy()


def compared(own: Slope, theirs: Slope, shuffled: np.ndarray | None, *, number: bool) -> Agreement:
    """Agreement of each partner with the target.

    Partners whose slopes are compatible with the target's sharpen the estimate of its slope, weighted by precision.

    Args:
        own: the target's slope, one number.
        theirs: the partners' slopes, [K].
        shuffled: products for true labels and for shuffled ones, [K, 1 + M]; None if nobody asks for p.
        number: whether the label is a number, so that residuals count.
    """
    gap = np.abs(theirs.value - own.value) / np.maximum(np.hypot(theirs.error, own.error), SAME)
    fits = (gap <= COMPATIBLE) & (theirs.error > SAME)
    precision = np.concatenate([[1.0 / max(float(own.error), SAME) ** 2], 1.0 / theirs.error[fits] ** 2])
    common = float((precision * np.concatenate([[own.value], theirs.value[fits]])).sum() / precision.sum())
    common_error = float(1.0 / np.sqrt(precision.sum()))
    if common <= SAME:
        common, common_error = SAME, max(common_error, 1.0)
    value = theirs.value / common
    error = np.sqrt(theirs.error**2 + value**2 * common_error**2) / common
    if number:
        noise = np.minimum(1.0, float(own.residual) / np.maximum(theirs.residual, SAME))
        value, error = value * noise, error * noise
    one_class = theirs.error <= SAME
    if shuffled is None:
        p = norm.sf(theirs.value / np.maximum(theirs.error, SAME))
    else:
        p = np.array([placebo_test(row[0], row[1:]) for row in shuffled])
    return Agreement(value, error, np.where(one_class, 1.0, p), one_class)


def placebo_test(value: float, placebos: np.ndarray) -> float:
    """How often a placebo would do as well: the tail of Student's t for one more draw from their distribution."""
    m, spread = len(placebos), float(placebos.std(ddof=1))
    if spread <= SAME:
        return 1.0  # shuffling changes nothing: all labels are the same
    z = (value - float(placebos.mean())) / (spread * np.sqrt(1.0 + 1.0 / m))
    return float(student.sf(z, m - 1))
