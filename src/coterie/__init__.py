"""Federated learning that learns whom to learn from."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coterie import machine

if TYPE_CHECKING:
    from coterie import methods, schedules, stop
    from coterie.advise.answer import advise
    from coterie.consent import allow_code
    from coterie.errors import CoterieError, RunError, UsageError
    from coterie.facade import Stopped, fit, problem
    from coterie.fitted import Fit, Fits
    from coterie.measures import Measure
    from coterie.problems.nested import Compositional, Minimax, Nested, SingleLevel
    from coterie.problems.weighting import Weighting

machine.prepare()  # before torch is first used

__version__ = "0.2.0"
__all__ = [
    "Compositional",
    "CoterieError",
    "Fit",
    "Fits",
    "Measure",
    "Minimax",
    "Nested",
    "RunError",
    "SingleLevel",
    "Stopped",
    "UsageError",
    "Weighting",
    "advise",
    "allow_code",
    "fit",
    "machine",
    "methods",
    "problem",
    "schedules",
    "stop",
]

_HOME = {
    "CoterieError": "coterie.errors",
    "RunError": "coterie.errors",
    "UsageError": "coterie.errors",
    "allow_code": "coterie.consent",
    "Fit": "coterie.fitted",
    "Fits": "coterie.fitted",
    "Stopped": "coterie.facade",
    "fit": "coterie.facade",
    "problem": "coterie.facade",
    "Measure": "coterie.measures",
    "Compositional": "coterie.problems.nested",
    "Minimax": "coterie.problems.nested",
    "Nested": "coterie.problems.nested",
    "SingleLevel": "coterie.problems.nested",
    "Weighting": "coterie.problems.weighting",
}


_ROOMS = ("advise", "methods", "schedules", "stop")


def __getattr__(name: str) -> Any:
    """Names are loaded when first used, so that the command line's --help does not wait for torch."""
    if name in _ROOMS:
        return import_module(f"coterie.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'coterie' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
