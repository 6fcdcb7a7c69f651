"""What a method is: two pure functions over one frozen state, and a view of that state for records."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coterie.federation import Federation
from coterie.numerics import Draw
from coterie.problems.view import View


@dataclass(frozen=True)
class Method:
    """A published algorithm.

    `needs`, or one of its `alternatives`, must be among what the problem offers; checked before the first round.
    """

    name: str
    init: Callable[[Any, int], Any]
    round: Callable[[Federation, Any, Draw], Any]
    view: Callable[[Any], View]
    needs: frozenset[str] = frozenset({"gradient"})
    alternatives: tuple[frozenset[str], ...] = ()

    def fits(self, offers: frozenset[str]) -> bool:
        """Whether a problem that offers this can be solved."""
        return any(needs <= offers for needs in (self.needs, *self.alternatives))
