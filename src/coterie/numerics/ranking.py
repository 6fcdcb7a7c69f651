"""Methods ranked over several problems: average ranks, Friedman's test, Nemenyi's critical difference (Demšar 2006)."""

from collections.abc import Mapping, Sequence
from math import inf, sqrt

from coterie.numerics.paired import ranks

LEVEL = 0.05


def average_ranks(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean rank of every method, the best first; 1 is best, more is better, equal values share their ranks.

    Args:
        values: by method, one value per problem.

    Example:
        >>> average_ranks({"a": [0.7, 0.9], "b": [0.8, 0.8], "c": [0.7, 0.5]})
        {'b': 1.5, 'a': 1.75, 'c': 2.75}
    """
    by_problem = [ranks(column, higher_is_better=True) for column in zip(*values.values(), strict=True)]
    means = {name: sum(row[i] for row in by_problem) / len(by_problem) for i, name in enumerate(values)}
    return dict(sorted(means.items(), key=lambda item: item[1]))


def friedman_p(values: Mapping[str, Sequence[float]]) -> float | None:
    """The p-value of Friedman's test that all methods are alike; None for fewer than three methods or two problems."""
    from scipy.stats import friedmanchisquare

    if len(values) < 3 or len(next(iter(values.values()))) < 2:
        return None
    return float(friedmanchisquare(*values.values()).pvalue)


def critical_difference(methods: int, problems: int, level: float = LEVEL) -> float:
    """By how much two average ranks must differ to differ significantly (Nemenyi's test): q_α √(k(k+1)/6N).

    Args:
        methods: k.
        problems: N.
        level: α.

    Example:
        >>> round(critical_difference(5, 30), 3)  # 2.728 √(30/180)
        1.114
    """
    from scipy.stats import studentized_range

    q = float(studentized_range.ppf(1.0 - level, methods, inf)) / sqrt(2.0)
    return q * sqrt(methods * (methods + 1) / (6.0 * problems))


def alike(ranked: Mapping[str, float], difference: float) -> list[tuple[str, ...]]:
    """The largest sets of at least two methods whose average ranks differ by less than the critical difference.

    Args:
        ranked: average ranks, the best first.
        difference: the critical difference.

    Example:
        >>> alike({"a": 1.0, "b": 1.5, "c": 2.4, "d": 4.0}, 1.0)
        [('a', 'b'), ('b', 'c')]
    """
    names = list(ranked)
    found: list[tuple[str, ...]] = []
    for i, first in enumerate(names):
        group = tuple(name for name in names[i:] if ranked[name] - ranked[first] < difference)
        if len(group) > 1 and not (found and set(group) <= set(found[-1])):
            found.append(group)
    return found
