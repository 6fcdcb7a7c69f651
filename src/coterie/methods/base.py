"""What a method is: two pure functions over one frozen state, and a view of that state for records."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from coterie.federation import Federation
from coterie.numerics import Draw
from coterie.problems.view import View


@dataclass(frozen=True)
class Method:
    """A published algorithm. `needs` is checked against what the problem offers before the first round."""

    name: str
    init: Callable[[Any, int], Any]
    round: Callable[[Federation, Any, Draw], Any]
    view: Callable[[Any], View]
    needs: frozenset[str] = frozenset({"gradient"})
    settings: dict[str, Any] = field(default_factory=dict)
