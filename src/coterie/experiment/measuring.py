"""What the record of a round holds: the problem's measures, statistics of the weights, and numbers that are finite."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coterie.experiment.config import RunTable
from coterie.federation.tree import Tree, tree_leaves
from coterie.federation.work import Handle, Memory
from coterie.numerics import Draw
from coterie.problems.base import Problem, View, measured

MOST = 10_000  # test rows of a record by default: as many as the usual test sets of images have


def sampled(problem: Problem, run: RunTable) -> Problem:
    """The problem that records of rounds before the last measure: with at most run.evaluate test rows, always the same.

    Only test rows are sampled. Validation rows judge rounds and the best model, selection rows choose among settings,
    so these are used in full. With run.stop any record may be the last, and the rule may look at test rows.

    Args:
        problem: what is minimised.
        run: the settings of the run.
    """
    if run.evaluate == "all" or run.stop is not None:
        return problem
    draw = Draw.of(run.seed, device=problem.start.device).phase("evaluate")
    return problem.with_test_rows(MOST if run.evaluate == "auto" else run.evaluate, draw)


def recorded(problem: Problem, view: View, measures: Mapping[str, float] | None = None) -> dict[str, Any]:
    """What a record holds of a view: the problem's measures, statistics of the weights, and the method's own numbers.

    Args:
        problem: what is minimised.
        view: what is seen of a state.
        measures: the problem's measures, where they are known already.
    """
    measures = measured(problem, view) if measures is None else measures
    return {**measures, **weight_statistics(view.weights, problem.friends), **view.more}


def recorded_names(problem: Problem, view: View) -> list[str]:
    """The names of the measures that a record will hold."""
    return [name for name, value in recorded(problem, view).items() if is_number(value)]


def weight_statistics(weights: Tensor | None, friends: int | None) -> dict[str, float]:
    """How weight is spread: the effective number of clients 1/Σw², the largest weight, and where friends are known, the
    share that they hold and how far one of them is from their mean, relative to it.

    Of a matrix, the mean effective number over its rows and the largest weight in all.
    """
    if weights is None:
        return {}
    w = weights.cpu().double()
    effective = 1.0 / w.square().sum(-1)
    statistics = {"effective_clients": float(effective.mean()), "largest_weight": float(w.max())}
    if friends is not None and w.dim() == 1:
        share = w[:friends]
        statistics["friends_weight"] = float(share.sum())
        if float(share.mean()) > 0.0:
            statistics["friends_spread"] = float((share - share.mean()).abs().max() / share.mean())
    return statistics


def all_finite(state: Tree) -> bool:
    """Whether all numbers of a state are finite; nodes do not keep memory that is not."""
    payloads = [leaf.payload if isinstance(leaf, Memory) else leaf for leaf in tree_leaves(state)]
    return all(map(is_finite, tree_leaves([payload for payload in payloads if not isinstance(payload, Handle)])))


def rounded(weights: list[Any]) -> list[Any]:
    """To the digits of weights.csv; of a matrix, row by row."""
    return [rounded(w) if isinstance(w, list) else float(f"{w:.9g}") for w in weights]


def is_number(value: Any) -> bool:
    """Whether a value of a record is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a tensor or a number is finite; everything else is."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    return not isinstance(value, float) or math.isfinite(value)


def finite_or_none(value: float | None) -> float | None:
    """A number, if there is one and it is finite."""
    return value if value is not None and math.isfinite(value) else None
