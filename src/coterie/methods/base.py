"""A method: two pure functions over one frozen state, and a view of that state for records."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from types import MappingProxyType
from typing import Any

from coterie.federation import Federation
from coterie.numerics import Draw
from coterie.problems.base import View
from coterie.schedules import Schedule
from coterie.settings import checked, documented, scheduled


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
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    """The settings that change from round to round."""

    def fits(self, offers: frozenset[str]) -> bool:
        """Whether a problem with these offers can be solved."""
        return any(needs <= offers for needs in (self.needs, *self.alternatives))


def validated(make: Callable[..., Method]) -> Callable[..., Method]:
    """A factory whose settings are checked against its signature: unknown names, types and bounds are explained.

    Steps may be schedules (`coterie.schedules`): then each round is the one of the method with that round's steps.
    """

    @wraps(documented(make))
    def checked_make(**settings: Any) -> Method:
        complete = checked(make, make.__name__, settings)
        planned = scheduled(make, make.__name__, settings)
        if not planned:
            return replace(make(**complete), settings=MappingProxyType(complete))

        def at(t: int) -> Method:
            return make(**{**complete, **{name: plan.at(t) for name, plan in planned.items()}})

        def round(fed: Federation, state: Any, draw: Draw) -> Any:
            return at(fed.round - 1).round(fed, state, draw)

        return replace(at(0), round=round, settings=MappingProxyType(complete), schedules=MappingProxyType(planned))

    return checked_make
