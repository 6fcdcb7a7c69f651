"""The verdict on each partner, and how sure it is.

helps        its labels carry something for the target's rows, and agree with them as a partner's of the same
             distribution would; training with it does not look worse than training alone.
may help     its labels carry something, but agree only in part, or training with it looks worse than alone.
no use       its labels carry nothing that could be seen, or it changes the error too little to matter.
harms        training with it is worse than training alone, or its labels say the opposite.
cannot tell  the rows are too few for any of these.

Probabilities are corrected for the number of partners by Benjamini and Hochberg's procedure.
"""

from math import exp, sqrt
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.stats import false_discovery_control, norm
from scipy.stats import t as student

from coterie.advise.agreement import LEVEL, MOSTLY, SAME, Agreement

Verdict = Literal["helps", "may help", "no use", "harms", "cannot tell"]
VERDICTS: tuple[Verdict, ...] = ("helps", "may help", "no use", "harms", "cannot tell")
NEGLIGIBLE = 0.01  # of the loss of training alone
TWO_SIDED = 1.96
SHARED = (
    2.0  # by which rows that folds share widen intervals; with it they cover what they promise (docs/measurements.md)
)
AGREEMENT, GAIN, OFFSET = 0.4, 0.9, -0.8  # how agreement and gain tell that a partner helps, from seven public tables
FAR = 4.0  # standard errors beyond which agreement tells no more


class Interval(NamedTuple):
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


class Paired(NamedTuple):
    """A mean difference with its interval, its standard error, t, and the probability that it is above 0."""

    interval: Interval
    error: float
    t: float
    probability: float


def improvement(fewer: float, more: float, folds: int) -> float:
    """How much a measure (lower is better) still falls when models see all rows instead of all folds but one.

    Learning curves fall as 1/n: seen without two folds and without one, they are extended to all rows.

    Args:
        fewer: the measure of models without two folds.
        more: of models without one fold.
        folds: how many folds there are.

    Example:
        >>> round(improvement(1 + 1 / 60, 1 + 1 / 80, 5), 6) == round(1 / 80 - 1 / 100, 6)
        True
    """
    two, one = folds / (folds - 2.0), folds / (folds - 1.0)
    return max(0.0, fewer - more) * (one - 1.0) / (two - one)


def paired(differences: np.ndarray, folds: int, less: float = 0.0) -> Paired:
    """The mean of differences [R, n] by order and row, with an interval for the gain of models trained on all rows.

    Rows vary, and so do the models that folds train: the variance over rows is inflated for shared training rows
    (Nadeau and Bengio 2003), and that between orders, which averaging over orders has lowered, is added. less is what
    training alone still gains from the rows of the fold that was left out, beyond what the other side gains.
    """
    by_row = differences.mean(0)
    n, mean = len(by_row), float(by_row.mean()) - less
    between = float(differences.mean(1).var(ddof=1)) if len(differences) > 1 else 0.0
    error = sqrt(float(by_row.var(ddof=1)) / n * (1.0 + SHARED / (folds - 1.0)) + between)
    if error <= SAME:
        return Paired(Interval(mean, mean, mean), 0.0, 0.0, 0.5)
    half = float(student.ppf(0.975, n - 1)) * error
    return Paired(
        Interval(mean, mean - half, mean + half), error, mean / error, float(student.cdf(mean / error, n - 1))
    )


class Partner(NamedTuple):
    """What was found out about one partner; gain is over training alone, in the chosen measure."""

    name: str
    rows: int
    verdict: Verdict
    reason: str
    probability: float
    gain: Interval
    agreement: Interval
    p_labels: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**self._asdict(), "gain": self.gain._asdict(), "agreement": self.agreement._asdict()}


def judged(
    names: list[tuple[str, int]], found: Agreement, losses: list[Paired], gains: list[Paired], alone: float
) -> tuple[Partner, ...]:
    """The verdict on each partner.

    Args:
        names: name and rows of each.
        found: agreement of each.
        losses: the gain of training with it over training alone, in the loss that is trained.
        gains: the same in the chosen measure.
        alone: the loss of training alone.
    """
    worse = false_discovery_control([one.probability if one.error else 1.0 for one in losses])
    opposite = false_discovery_control(norm.cdf(found.value / np.maximum(found.error, SAME)))
    q_labels = false_discovery_control(found.p)
    partners = []
    for k, (name, rows) in enumerate(names):
        agreement = Interval(*(float(found.value[k] + s * found.error[k]) for s in (0.0, -TWO_SIDED, TWO_SIDED)))
        verdict, reason = _verdict(
            agreement,
            losses[k],
            alone,
            carries=bool(found.carries[k]),
            agrees=bool(found.agrees[k]),
            one_class=bool(found.one_class[k]),
            worse=bool(worse[k] <= LEVEL),
            opposite=bool(opposite[k] <= LEVEL),
        )
        partners.append(
            Partner(
                name,
                rows,
                verdict,
                reason,
                probability(found.value[k], found.error[k], losses[k]),
                gains[k].interval,
                agreement,
                float(q_labels[k]),
            )
        )
    return tuple(partners)


def probability(agreement: float, error: float, loss: Paired) -> float:
    """That training with the partner is better than training alone, from its agreement and from the gain seen."""
    z = float(np.clip((agreement - 0.5) / max(error, SAME), -FAR, FAR))
    return 1.0 / (1.0 + exp(-(AGREEMENT * z + GAIN * float(np.clip(loss.t, -FAR, FAR)) + OFFSET)))


def _verdict(
    agreement: Interval,
    loss: Paired,
    alone: float,
    *,
    carries: bool,
    agrees: bool,
    one_class: bool,
    worse: bool,
    opposite: bool,
) -> tuple[Verdict, str]:
    small = max(abs(loss.interval.low), abs(loss.interval.high)) < NEGLIGIBLE * alone
    if opposite:
        return "harms", "its labels say the opposite of yours"
    if worse:
        return "harms", "training with it makes predictions of your rows worse"
    if one_class:
        return "cannot tell", "all its rows have one label, so that nothing can be learned from them about the others"
    if small:
        return "no use", f"it changes your error by less than {NEGLIGIBLE:.0%}: your own rows are enough"
    if not carries:
        if agreement.high >= MOSTLY:
            return (
                "cannot tell",
                "its labels may agree with yours or have nothing to do with them: too few rows to tell",
            )
        return "no use", "its labels fit your rows no better than the same labels shuffled"
    if not agrees:
        return "may help", "its labels agree with yours only in part"
    if loss.error and loss.probability <= LEVEL:
        return "may help", "its labels agree with yours, but training with it looks worse than training alone"
    shown = loss.probability >= 1.0 - LEVEL
    more = ", and with it you predict your rows better than alone" if shown else ""
    return "helps", f"its labels agree with yours{more}"
