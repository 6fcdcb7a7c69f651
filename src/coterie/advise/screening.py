"""Which partners are of use to the target? One held-out comparison per partner, with placebos.

For partner k, models are trained on the target's rows and the partner's together, (1 − λ)L_0 + λL_k with
λ = min(½, n_k/(n_0 + n_k)), for each of F folds of the target's rows, and judged on the fold that was left out by the
squared error of their predictions (Brier's score for classes). Three questions:

1. Do the partner's labels carry anything for the target? The same is done M times with the partner's labels shuffled
   at the partner. Were they worthless, the true ones would be exchangeable with the shuffled ones, whatever the model,
   the folds and the rows: a randomisation test, its tail by Student's t with M − 1 degrees of freedom.
2. Is the model worse than the one trained on the target's rows alone? A paired t-test over the target's rows. Folds
   share training rows, so the variance is inflated by 1 + F/(F − 1) (Nadeau and Bengio 2003).
3. Is the change against training alone too small to matter?

Probabilities of 1 and 2 are corrected for the number of partners by Holm's procedure. All arms are trained at once by
the federation's verbs: one exchange per step for all partners, and the ledger says what it moved.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor
from torch.func import vmap

from coterie.federation import RESULT, Batch, Each, Federation, Ledger, LocalEngine, Rows, Shard, Static, work
from coterie.federation.tree import Tree
from coterie.methods.shared.optimisers import UpdateRule
from coterie.numerics import Draw
from coterie.numerics.paired import holm
from coterie.problems.files import PreparedFiles
from coterie.problems.tasks.supervised import Supervised
from coterie.problems.weighting import Weighting

Verdict = Literal["helps", "neutral", "harms"]
LEVEL = 0.05
LEANING = 0.1  # a partner whose mixture is worse than alone at this level is not reported to help,
PARTLY = 0.25  # nor one that loses against alone more than this share of what its shuffled labels lose
NEGLIGIBLE = 0.01  # of the error of training alone
SAME = 1e-9  # errors that differ by less than this are equal up to rounding
PARTNER_ROWS = 512
TARGET_ROWS = 2000
NUMBERS = 1 << 25  # that the arms of the clients of one chunk may put out together


class ScreeningPlan(NamedTuple):
    """Folds of the target's rows, shuffled copies per partner, steps of training and their size."""

    folds: int = 5
    placebos: int = 20
    steps: int = 60
    step: float = 0.05


class Interval(NamedTuple):
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


class Partner(NamedTuple):
    """What was found out about one partner. gain is against training alone, positive where the partner lowers the
    error; p_labels and p_harm are corrected for the number of partners."""

    name: str
    rows: int
    verdict: Verdict
    reason: str
    gain: Interval
    p_labels: float
    p_harm: float
    p_gain: float
    placebo: float


class Screened(NamedTuple):
    """All partners, the error of training alone, and what finding out has moved."""

    partners: tuple[Partner, ...]
    alone: float
    rows: int
    ledger: Ledger


@work("advise/arm-gradients", update=RESULT)
def arm_gradients(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇L_k at each of a partner's arms [F, 1 + M, d]; arm 0 sees its labels, the others see them shuffled."""
    rows, arms = shard.train, shared
    assert rows is not None
    index, weight = pool(rows, static.rows, draw)
    some = rows.take(index)
    kept = weight.sum().to(torch.int64)
    steps = torch.arange(arms.shape[1] - 1, device=index.device)
    orders = vmap(lambda m: draw.phase("shuffle").step(m).permutation(static.rows, kept))(steps)
    same = torch.arange(static.rows, device=index.device)[None]
    labels = some.labels[torch.cat([same, orders])]

    def one(theta: Tensor, y: Tensor) -> Tensor:
        return shard.task.gradient(theta, Batch((some.inputs, y), weight))

    return vmap(vmap(one), in_dims=(0, None))(arms, labels)


def pool(rows: Rows, most: int, draw: Draw) -> tuple[Tensor, Tensor]:
    """The rows that take part, and 1 for those that are there: all of a small shard, a fixed sample of a large one."""
    index = torch.arange(most, device=rows.offset.device)
    kind = next(c.dtype for c in rows.columns if c.is_floating_point())
    if rows.capacity <= most:
        return torch.minimum(index, rows.count - 1), (index < rows.count).to(kind)
    return draw.phase("pool").integers(rows.count, most), torch.ones(most, dtype=kind, device=index.device)


@work("advise/fold-gradients", update=RESULT)
def fold_gradients(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """∇L_0 at arms [B, F, d], that of fold f on the target's rows outside of it."""
    assert shard.valid is not None
    batch = shard.valid.all()
    left_out = _folds(len(batch.labels), static.folds)
    weight = (left_out[None] != torch.arange(static.folds)[:, None]).to(batch.inputs.dtype)

    def one(theta: Tensor, w: Tensor) -> Tensor:
        return shard.task.gradient(theta, Batch(batch.columns, w))

    return vmap(vmap(one), in_dims=(0, None), chunk_size=static.chunk)(shared, weight)


@work("advise/held-out-errors", update=None)
def held_out_errors(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tensor:
    """The squared error on each of the target's rows, [B, n], by the models [B, F, d] that have not seen it."""
    assert shard.valid is not None
    batch = shard.valid.all()
    left_out = _folds(len(batch.labels), static.folds)
    errors = vmap(vmap(lambda theta: squared_errors(shard.task, theta, batch)), chunk_size=static.chunk)
    by_model = errors(shared)
    return by_model.gather(1, left_out.expand(len(shared), 1, -1))[:, 0]


def _folds(n: int, folds: int) -> Tensor:
    """Which fold each of n rows is in; folds are stretches, the rows lie in random order."""
    return torch.arange(n) * folds // n


def squared_errors(task: Supervised, theta: Tensor, batch: Batch) -> Tensor:
    """By row: half the squared distance of the probabilities to the class (Brier), or the squared error of a number."""
    outputs = task.model(theta, batch.inputs)
    if task.classes is None:
        return (outputs - batch.labels.reshape(outputs.shape)).square().flatten(1).sum(1)
    share = torch.softmax(outputs, 1)
    right = torch.nn.functional.one_hot(batch.labels.long(), task.classes).to(share)
    return 0.5 * (share - right).square().sum(1)


def screen(data: PreparedFiles, plan: ScreeningPlan, draw: Draw) -> Screened:
    """Train all arms, compare, decide."""
    n = min(data.target_rows, TARGET_ROWS)
    span = data.span(0, 0, n)
    problem = data.problem(span._replace(length=0), span, None)
    assert problem.target is not None
    assert isinstance(problem.task, Supervised)
    most = min(PARTNER_ROWS, problem.train.capacity)
    arms = plan.folds * (1 + plan.placebos)
    wide = activations(problem)
    engine = LocalEngine(problem.task, problem.train, None, problem.target, chunk=at_once(arms * most * wide))
    fed = Federation.on(engine)
    used = problem.train.counts.clamp(max=most).to(problem.start)
    share = (used / (used + n * (1.0 - 1.0 / plan.folds))).clamp(max=0.5)
    errors = _trained(fed, problem.start, share, most, plan, at_once(plan.folds * n * wide), draw)
    names = [(name, int(count)) for name, count in zip(problem.names, problem.train.counts, strict=True)]
    return Screened(judged(names, errors, plan), float(errors[0].mean()), n, fed.ledger)


def activations(problem: Weighting) -> int:
    """How many numbers the model puts out for a row, layer by layer."""
    assert isinstance(problem.task, Supervised)
    return problem.task.model.activation_numbers(problem.train.client(0).all().inputs[:1]) + 1


def at_once(numbers: int) -> int:
    """How many things that put out so many numbers each may be computed together."""
    return max(1, NUMBERS // numbers)


def _trained(
    fed: Federation, start: Tensor, share: Tensor, most: int, plan: ScreeningPlan, chunk: int, draw: Draw
) -> Tensor:
    """Held-out errors [1 + K(1 + M), n]: of training alone, then a partner after the other, its true arm first."""
    K, arms = fed.n, 1 + plan.placebos
    mix = torch.cat([share.new_zeros(1), share.repeat_interleave(arms)])[:, None, None]

    def mixed(x: Tensor, own: Tensor) -> Tensor:
        theirs = x[1:].view(K, arms, plan.folds, -1).transpose(1, 2).contiguous()  # [K, F, 1 + M, d]
        given, ids = fed.gather(arm_gradients, Each(theirs), draw=draw, rows=most)
        full = torch.zeros_like(theirs).index_copy(0, ids, given).transpose(1, 2).flatten(0, 1)
        return (1.0 - mix) * own + mix * torch.cat([torch.zeros_like(own[:1]), full])

    return errors_after(mixed, fed, start, 1 + K * arms, plan, chunk, draw)


def errors_after(
    mixed: Callable[[Tensor, Tensor], Tensor],
    fed: Federation,
    start: Tensor,
    models: int,
    plan: ScreeningPlan,
    chunk: int,
    draw: Draw,
) -> Tensor:
    """Errors [models, rows] on the target's held-out rows after Adam along mixed(x, gradients of its own rows)."""
    rule = UpdateRule("adam", plan.step)
    x = start.expand(models, plan.folds, -1).contiguous()
    moments = rule.start(x)
    for t in range(plan.steps):
        own = fed.ask_target(fold_gradients, x, draw=draw, folds=plan.folds, chunk=chunk)
        x, moments = rule.move(x, mixed(x, own), moments, t + 1)
    return fed.ask_target(held_out_errors, x, draw=draw, folds=plan.folds, chunk=chunk)


def judged(names: list[tuple[str, int]], errors: Tensor, plan: ScreeningPlan) -> tuple[Partner, ...]:
    """The verdict on each partner, from held-out errors as `_trained` gives them."""
    table = errors.double().numpy()
    alone, arms = table[0], table[1:].reshape(len(names), 1 + plan.placebos, -1)
    means = arms.mean(2)
    gains = [paired(alone - arms[k, 0], plan.folds) for k in range(len(names))]
    p_labels = holm([placebo_test(-row[0], -row[1:]) for row in means])
    p_harm = holm([one.p_lower for one in gains])
    found = []
    for k, (name, rows) in enumerate(names):
        one = gains[k]
        useful, worse = p_labels[k] <= LEVEL, p_harm[k] <= LEVEL
        small = max(abs(one.interval.low), abs(one.interval.high)) < NEGLIGIBLE * alone.mean()
        verdict: Verdict = "neutral"
        if worse:
            verdict, reason = "harms", "mixed in plainly, it makes predictions of your rows worse"
        elif means[k, 1:].std() <= SAME:
            reason = "all its rows have one class, so that shuffling its labels changes nothing: it cannot be judged"
        elif not useful:
            reason = "its labels tell no more about your rows than the same labels shuffled"
        elif small:
            reason = f"it fits, but changes your error by less than {NEGLIGIBLE:.0%}"
        elif one.p_lower <= LEANING or -one.interval.value > PARTLY * (means[k, 1:].mean() - alone.mean()) > 0.0:
            reason = "its labels fit yours in part, but training with it looks worse than training alone"
        else:
            shown = one.p_upper <= LEVEL
            verdict = "helps"
            reason = "its labels tell about your rows" + (
                ", and with it you predict them better than alone"
                if shown
                else "; by itself it shows no significant gain over training alone"
            )
        found.append(
            Partner(name, rows, verdict, reason, one.interval, p_labels[k], p_harm[k], one.p_upper, means[k, 1:].mean())
        )
    return tuple(found)


class Paired(NamedTuple):
    """A mean difference with its interval, t, the tails' probabilities and the effect size (mean over deviation)."""

    interval: Interval
    t: float
    p_upper: float
    p_lower: float
    effect: float


def paired(differences: np.ndarray, folds: int) -> Paired:
    """Student's t over rows whose models share training rows."""
    n, mean, spread = len(differences), float(differences.mean()), float(differences.std(ddof=1))
    error = spread * sqrt((1.0 + folds / (folds - 1.0)) / n)
    if error <= SAME:
        return Paired(Interval(mean, mean, mean), 0.0, 1.0, 1.0, 0.0)
    t, half = mean / error, float(student.ppf(0.975, n - 1)) * error
    upper, lower = float(student.sf(t, n - 1)), float(student.cdf(t, n - 1))
    return Paired(Interval(mean, mean - half, mean + half), t, upper, lower, mean / spread)


def placebo_test(value: float, placebos: np.ndarray) -> float:
    """How often a placebo would do as well: the tail of Student's t for one more draw from their distribution."""
    m, spread = len(placebos), float(placebos.std(ddof=1))
    if spread <= SAME:
        return 1.0  # shuffling changes nothing: all labels are the same
    z = (value - float(placebos.mean())) / (spread * sqrt(1.0 + 1.0 / m))
    return float(student.sf(z, m - 1))


def as_dict(partner: Partner) -> dict[str, Any]:
    """Plain data."""
    return {**partner._asdict(), "gain": partner.gain._asdict(), "placebo": float(partner.placebo)}
