"""FedAvg with a robust mean of the local updates instead of the plain one: baselines against Byzantine clients.

    krum               the update nearest to most others (Blanchard et al. 2017)
    multi-krum         the mean of the updates with the best such scores
    coordinate-median  the median per coordinate (Yin et al. 2018)
    trimmed-mean       the mean per coordinate without the f smallest and largest
    geometric-median   the point of least distance to all, by smoothed Weiszfeld steps (RFA, Pillutla et al. 2022)

x⁺ = x + A({x_k − x}); with local_steps = 1 that is x − γ A({∇L_k(x)}), because each A commutes with scalings. The
assumed number of attackers f is a count or a share; with fewer replies than are needed to tolerate f, it is lowered to
what they tolerate. All rules presume that the honest majority agrees: they cannot tell strangers from attackers.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from coterie.errors import UsageError
from coterie.methods.base import Draw, Federation, Method, ModelState, Problem, View, validated
from coterie.methods.shared.works import LocalSteps, local_sgd
from coterie.numerics import robust
from coterie.problems.catalogue.byzantine import Attackers, head_count
from coterie.settings import BatchSize, Count, Positive

Aggregate = Callable[[Tensor, int], Tensor]
"""The robust mean of updates among which this many are an attacker's."""


class BreakdownPoint(NamedTuple):
    """How many attackers a rule tolerates: it needs `per` clients for each of them, and `more` besides."""

    attackers: int | float
    per: int
    more: int

    def among(self, n: int) -> int:
        """f among n replies, lowered to what they tolerate."""
        return max(0, min(head_count(self.attackers, n), (n - self.more) // self.per))

    def check(self, name: str, n: int) -> None:
        """Refuse too few clients to tolerate f attackers."""
        f = head_count(self.attackers, n)
        least, most = self.per * f + self.more, (n - self.more) // self.per
        if least > n:
            remedy = f"lower method.attackers to at most {most}" if most > 0 else "use another method"
            raise UsageError(
                f"{name} tolerates {f} attackers (method.attackers = {self.attackers:g}) only among {least} "
                f"clients or more, and there are {n}; {remedy}."
            )


ANY = BreakdownPoint(0, 1, 0)  # for rules that assume no number of attackers


def aggregated(name: str, aggregate: Aggregate, local: LocalSteps, bound: BreakdownPoint = ANY) -> Method:
    """The method of an aggregate, checked against the number of clients before the first round."""

    def init(problem: Problem, n: int) -> ModelState:
        bound.check(name, n)
        return ModelState(problem.start)

    def round(fed: Federation, s: ModelState, draw: Draw) -> ModelState:
        X, _ = fed.gather(local_sgd, s.x, draw=draw.phase("walk"), **local._asdict())
        return ModelState(s.x + aggregate(X - s.x, bound.among(len(X))))

    return Method(name, init, round, lambda s: View(s.x))


@validated
def krum(*, step: Positive = 0.1, local_steps: Count = 5, batch: BatchSize = 20, attackers: Attackers = 0.2) -> Method:
    """Take the one update that is nearest to most others; tolerates f attackers among 2f + 3 clients.

    Symbols: γ = step, f = attackers.

    Cost: 1 round per call of round.

    Args:
        attackers: f, how many attackers to tolerate: a number of clients, or a share of them

    Example:
        >>> from coterie.methods import krum
        >>> krum(attackers=2).settings["attackers"]
        2
    """
    local, bound = LocalSteps(step, local_steps, batch), BreakdownPoint(attackers, 2, 3)
    return aggregated("krum", lambda X, f: robust.multi_krum(X, f, 1), local, bound)


@validated
def multi_krum(
    *,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch: BatchSize = 20,
    attackers: Attackers = 0.2,
    keep: Count | None = None,
) -> Method:
    """Average the updates with the best Krum scores; tolerates f attackers among 2f + 3 clients.

    Symbols: γ = step, f = attackers.

    Cost: 1 round per call of round.

    Args:
        attackers: f, how many attackers to tolerate: a number of clients, or a share of them
        keep: how many updates are averaged; n − f if not set

    Example:
        >>> from coterie.methods import multi_krum
        >>> multi_krum().name
        'multi-krum'
    """
    local, bound = LocalSteps(step, local_steps, batch), BreakdownPoint(attackers, 2, 3)
    return aggregated("multi-krum", lambda X, f: robust.multi_krum(X, f, keep or len(X) - f), local, bound)


@validated
def coordinate_median(*, step: Positive = 0.1, local_steps: Count = 5, batch: BatchSize = 20) -> Method:
    """Take the median of the updates in every coordinate.

    Symbols: γ = step.

    Cost: 1 round per call of round.

    Example:
        >>> from coterie.methods import coordinate_median
        >>> coordinate_median().name
        'coordinate-median'
    """
    local = LocalSteps(step, local_steps, batch)
    return aggregated("coordinate-median", lambda X, f: robust.coordinate_median(X), local)


@validated
def trimmed_mean(
    *, step: Positive = 0.1, local_steps: Count = 5, batch: BatchSize = 20, attackers: Attackers = 0.2
) -> Method:
    """Average every coordinate without its f smallest and f largest values; tolerates f attackers among 2f + 1.

    Symbols: γ = step, f = attackers.

    Cost: 1 round per call of round.

    Args:
        attackers: f, how many attackers to tolerate: a number of clients, or a share of them

    Example:
        >>> from coterie.methods import trimmed_mean
        >>> trimmed_mean().name
        'trimmed-mean'
    """
    local, bound = LocalSteps(step, local_steps, batch), BreakdownPoint(attackers, 2, 1)
    return aggregated("trimmed-mean", robust.trimmed_mean, local, bound)


@validated
def geometric_median(*, step: Positive = 0.1, local_steps: Count = 5, batch: BatchSize = 20) -> Method:
    """Take the point of least total distance to all updates, by smoothed Weiszfeld steps.

    Symbols: γ = step.

    Cost: 1 round per call of round.

    Example:
        >>> from coterie.methods import geometric_median
        >>> geometric_median().name
        'geometric-median'
    """
    local = LocalSteps(step, local_steps, batch)
    return aggregated("geometric-median", lambda X, f: robust.geometric_median(X), local)
