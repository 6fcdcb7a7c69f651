"""A method: two pure functions over one frozen state, and a view of that state for records.

The types that these functions take and return can be imported from here too; works need those of `coterie.federation`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import signature
from types import MappingProxyType
from typing import Any, NamedTuple, overload

from torch import Tensor

from coterie.errors import UsageError
from coterie.federation import Federation
from coterie.numerics import Draw
from coterie.problems.base import Problem, View, known, personal_models
from coterie.schedules import Schedule
from coterie.settings import checked, documented, scheduled

__all__ = ["Draw", "Federation", "Problem", "View", "known", "personal_models"]  # from the rooms below
__all__ += ["CURVATURE_AND_TARGET", "GRADIENTS_AND_TARGET", "Method", "ModelState", "start_model", "validated"]


@dataclass(frozen=True)
class Method:
    """A published algorithm.

    `needs`, any collection of names, or one of its `alternatives`, must be among the problem's offers; checked before
    the first round.
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
    learns_weights: bool = False
    """Whether it learns client weights, where the registry does not say so; `validated` fills it in."""
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    """The settings that change from round to round."""

    def __post_init__(self) -> None:
        """Lists and tuples of needs become sets."""
        object.__setattr__(self, "needs", _names(self.name, "needs", self.needs))
        ways = tuple(_names(self.name, "each of alternatives", names) for names in self.alternatives)
        object.__setattr__(self, "alternatives", ways)

    def fits(self, offers: frozenset[str]) -> bool:
        """Whether a problem with these offers can be solved."""
        return any(needs <= offers for needs in (self.needs, *self.alternatives))


def _names(method: str, field: str, names: Any) -> frozenset[str]:
    """Names as a set; one name alone, whose letters would be taken for names, is refused."""
    listed = None if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    if listed is None or not all(isinstance(name, str) for name in listed):
        raise UsageError(f'{method}: {field} is {names!r}; give a collection of names, such as {{"gradient"}}.')
    return frozenset(listed)


GRADIENTS_AND_TARGET = frozenset({"gradient", "target"})
CURVATURE_AND_TARGET = frozenset({"gradient", "hvp", "target"})
"""What many methods need of a problem."""


class ModelState(NamedTuple):
    """The state of a method that remembers nothing but the model x."""

    x: Tensor


def start_model(problem: Problem, n: int) -> ModelState:
    """`Method.init` of such a method: the problem's start."""
    return ModelState(problem.start)


class About(NamedTuple):
    """What a factory outside of coterie says of its method; `validated` takes these by name.

    Args:
        paper: where it was published.
        learns_weights: whether it learns client weights; then baselines, guard and screening of copies are on.
        grid: the paper's grid, for `coterie tune`: values by dotted setting.
    """

    paper: str = ""
    learns_weights: bool = False
    grid: Mapping[str, tuple[Any, ...]] = MappingProxyType({})


@overload
def validated(make: Callable[..., Method], /) -> Callable[..., Method]: ...
@overload
def validated(**about: Any) -> Callable[[Callable[..., Method]], Callable[..., Method]]: ...
def validated(make: Callable[..., Method] | None = None, /, **about: Any) -> Any:
    """A factory whose settings are checked against its signature: unknown names, types and bounds are explained.

    Args:
        make: a function of keyword-only settings with types, which returns a `Method`.
        about: `paper`, `learns_weights` and `grid`, see `About`; coterie's own methods have them in the registry.

    Steps may be schedules (`coterie.schedules`): then each round is the one of the method with that round's steps.

    Example:
        >>> @validated(paper="Dagréou et al. 2022")  # doctest: +SKIP
        ... def soba(*, step: Positive = 0.1) -> Method: ...
    """
    if make is None:
        return lambda factory: _validated(factory, About(**about))
    return _validated(make, About())


def _validated(make: Callable[..., Method], about: About) -> Callable[..., Method]:
    by_position = [p.name for p in signature(make).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    if by_position:
        raise UsageError(
            f"{make.__name__} takes {', '.join(by_position)} by position; settings are keyword-only: write "
            f"def {make.__name__}(*, {by_position[0]}: …)."
        )

    @wraps(documented(make))
    def checked_make(**settings: Any) -> Method:
        complete = checked(make, make.__name__, settings)
        planned = scheduled(make, make.__name__, settings)

        def at(t: int) -> Method:
            return _made(make, {**complete, **{name: plan.at(t) for name, plan in planned.items()}})

        def round(fed: Federation, state: Any, draw: Draw) -> Any:
            return at(fed.round - 1).round(fed, state, draw)

        made = at(0)
        return replace(
            made,
            round=round if planned else made.round,
            settings=MappingProxyType(complete),
            schedules=MappingProxyType(planned),
            learns_weights=made.learns_weights or about.learns_weights,
        )

    checked_make.about = about  # type: ignore[attr-defined]
    return checked_make


def _made(make: Callable[..., Method], settings: Mapping[str, Any]) -> Method:
    """What a factory returns, which must be a method."""
    made = make(**settings)
    if not isinstance(made, Method):
        raise UsageError(
            f"{make.__name__} returned a {type(made).__name__}, no Method; end it with: "
            "return Method(name, init, round, view)."
        )
    return made
