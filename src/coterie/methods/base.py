"""A method: two pure functions over one frozen state, and a view of that state for records.

The types that these functions take and return can be imported from here too; works need those of `coterie.federation`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from coterie.federation import Federation
from coterie.numerics import Draw
from coterie.problems.base import Problem, View, expect, known, personal_models
from coterie.settings import checked, documented

__all__ = ["Draw", "Federation", "Problem", "View", "expect", "known", "personal_models"]  # from the rooms below
__all__ += ["CURVATURE_AND_TARGET", "GRADIENTS_AND_TARGET", "Method", "ModelState", "validated"]


@dataclass(frozen=True)
class Method:
    """A published algorithm.

    `needs`, or one of its `alternatives`, must be among the problem's offers; checked before the first round.
    """

    name: str
    init: Callable[[Any, int], Any]
    round: Callable[[Federation, Any, Draw], Any]
    view: Callable[[Any], View]
    needs: frozenset[str] = frozenset({"gradient"})
    alternatives: tuple[frozenset[str], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    rejected: Callable[[Any, Any], Any] = lambda before, after: before
    """The state to continue with if a round is rejected, from the states before and after it."""
    whole_numbers: tuple[str, ...] = ()
    """The names of its works that send whole numbers, such as indices; noise cannot hide them."""

    def fits(self, offers: frozenset[str]) -> bool:
        """Whether a problem with these offers can be solved."""
        return any(needs <= offers for needs in (self.needs, *self.alternatives))


GRADIENTS_AND_TARGET = frozenset({"gradient", "target"})
CURVATURE_AND_TARGET = frozenset({"gradient", "hvp", "target"})
"""What most methods that learn weights need of a problem."""


class ModelState(NamedTuple):
    """The state of a method that remembers nothing but the model x."""

    x: Tensor


def validated(make: Callable[..., Method]) -> Callable[..., Method]:
    """A factory whose settings are checked against its signature: unknown names, types and bounds are explained."""

    @wraps(documented(make))
    def checked_make(**settings: Any) -> Method:
        complete = checked(make, make.__name__, settings)
        return replace(make(**complete), settings=MappingProxyType(complete))

    return checked_make
