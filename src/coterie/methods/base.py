"""What a method is: two pure functions over one frozen state, and a view of that state for records."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from coterie.federation import Federation
from coterie.numerics import Draw


class View(NamedTuple):
    """What records and users see of a state: the model [d], and the weights [K] of a method that has some."""

    model: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True)
class Method:
    """A published algorithm. `needs` is checked against what the problem offers before the first round."""

    name: str
    init: Callable[[Any, int], Any]
    round: Callable[[Federation, Any, Draw], Any]
    view: Callable[[Any], View]
    needs: frozenset[str] = frozenset({"gradient"})
    settings: dict[str, Any] = field(default_factory=dict)
