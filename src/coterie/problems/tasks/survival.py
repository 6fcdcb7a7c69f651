"""Times to an event, some of them censored: proportional hazards with a loss that is a sum over rows.

Cox's partial likelihood compares every row with all that are at risk, so its terms belong to no single row: folds,
blocks, padding and partners would each have risk sets of their own. The same estimates come from a Poisson likelihood
(Holford 1976; Laird and Olivier 1981): with Λ(t) for the cumulative baseline hazard, a row with time t, event δ and
output η has the loss  Λ(t) exp(η) − δ η.  Where Λ is Breslow's estimate its gradient is that of the partial likelihood
with Breslow's ties. Here Λ is estimated once, from the target's rows, as constant within intervals between quantiles of
its event times. The model's offset corrects its level.

A label is one number: Λ(t) where the event happened, −Λ(t) where the row was censored. Λ grows strictly, so that labels
order rows as times do.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

INTERVALS = 16  # of the baseline hazard at most
EACH = 4  # events of an interval at least
SHORTEST = 1e-6  # of Λ: an event at time 0 has to be told from a censored row
STEEPEST = 5.0  # outputs above this raise the loss in a straight line, so that one bad step does not overflow


class Baseline(NamedTuple):
    """A hazard that is constant between edges: rates[j] from edges[j] to edges[j + 1], the last without end."""

    edges: tuple[float, ...]
    rates: tuple[float, ...]

    @staticmethod
    def of(times: np.ndarray, events: np.ndarray) -> "Baseline":
        """Events by time at risk in each interval; intervals end at quantiles of the event times.

        Args:
            times: from 0, [n].
            events: whether the event happened then, [n]; at least once.

        Example:
            >>> import numpy as np
            >>> Baseline.of(np.array([1.0, 3.0]), np.array([True, True]))
            Baseline(edges=(0.0,), rates=(0.5,))
        """
        happened = np.sort(times[events])
        count = int(np.clip(len(happened) // EACH, 1, INTERVALS))
        inner = happened[[len(happened) * j // count - 1 for j in range(1, count)]]
        edges = np.unique(np.concatenate([[0.0], inner]))
        ends = np.append(edges[1:], np.inf)
        at_risk = np.clip(np.minimum(times[:, None], ends) - edges, 0.0, None).sum(0)
        within = ((happened[:, None] > edges) | (happened[:, None] == edges) & (edges == 0.0)) & (
            happened[:, None] <= ends
        )
        rates = np.maximum(within.sum(0), 0.5) / np.maximum(at_risk, np.finfo(float).tiny)
        return Baseline(tuple(edges.tolist()), tuple(rates.tolist()))

    def cumulative(self, times: np.ndarray) -> np.ndarray:
        """Λ(t), [n].

        Example:
            >>> import numpy as np
            >>> Baseline((0.0, 2.0), (1.0, 0.5)).cumulative(np.array([1.0, 4.0])).tolist()
            [1.0, 3.0]
        """
        edges, ends = np.array(self.edges), np.array([*self.edges[1:], np.inf])
        return np.clip(np.minimum(times[:, None], ends) - edges, 0.0, None) @ np.array(self.rates)

    def labels(self, signed: np.ndarray) -> np.ndarray:
        """Labels of times that have a minus where the row was censored (−0.0 too), float32 [n]."""
        exposure = np.maximum(self.cumulative(np.abs(signed)), SHORTEST)
        return np.copysign(exposure, signed).astype(np.float32)


def hazard(outputs: Tensor, labels: Tensor) -> Tensor:
    """By row: Λ exp(η) − δ η, minus the least that it can be, which makes it half the deviance and never negative.

    Args:
        outputs: η, the logarithm of the relative hazard, [n, 1].
        labels: Λ where the event happened, −Λ where the row was censored, [n].
    """
    eta, exposure = outputs.reshape(len(outputs)), labels.abs().to(outputs.dtype)
    event = (labels > 0).to(outputs.dtype)
    below = eta.clamp(max=STEEPEST)
    growth = below.exp() * (1.0 + eta - below)
    return exposure * growth - event * (eta + 1.0 + exposure.log())


def surprise(labels: Tensor) -> Tensor:
    """δ − Λ, the martingale residual of a row before any input is looked at: the earlier the event, the higher."""
    return (labels > 0).to(labels.dtype) - labels.abs()


__all__ = ["Baseline", "hazard", "surprise"]
