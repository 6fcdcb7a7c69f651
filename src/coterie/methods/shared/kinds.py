"""One name for two forms of a method: one for weighting problems, one for nested problems, chosen by the problem."""

from dataclasses import replace
from typing import Any

from coterie.errors import UsageError
from coterie.methods.base import Draw, Federation, Method, View


def either(weights: Method, nested: Method, state: type) -> Method:
    """The form that fits the problem; its state says which one it is.

    Args:
        weights: the form for weighting problems, whose name and needs are those of the method.
        nested: the form for nested problems.
        state: the type of the nested form's states.
    """

    def init(problem: Any, n: int) -> Any:
        return (nested if nested.fits(problem.offers) else weights).init(problem, n)

    def of(s: Any) -> Method:
        return nested if isinstance(s, state) else weights

    def round(fed: Federation, s: Any, draw: Draw) -> Any:
        return of(s).round(fed, s, draw)

    def view(s: Any) -> View:
        return of(s).view(s)

    return replace(weights, init=init, round=round, view=view, alternatives=(*weights.alternatives, nested.needs))


def refuse_weights_only(name: str, **settings: tuple[Any, Any]) -> None:
    """Refuse settings of a nested form that mean something for client weights only.

    Args:
        name: the method.
        settings: by name, the value and the one that leaves them off.
    """
    for setting, (value, off) in settings.items():
        if value != off:
            raise UsageError(
                f"method.{setting} = {value} is about client weights, and this nested problem has none; leave it at "
                f"{off} for {name} here."
            )
