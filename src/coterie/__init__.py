"""Federated learning that learns whom to learn from."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coterie import machine

if TYPE_CHECKING:
    from coterie import methods
    from coterie.consent import allow_code
    from coterie.errors import CoterieError, RunError, UsageError
    from coterie.facade import Federation as Federation  # deprecated, see there
    from coterie.facade import Fit, Stopped, fit
    from coterie.measures import Measure
    from coterie.problems.nested import Compositional, Minimax, Nested, SingleLevel
    from coterie.problems.weighting import Weighting

machine.prepare()  # before torch is first used

__version__ = "0.1.0"
__all__ = [
    "Compositional",
    "CoterieError",
    "Fit",
    "Measure",
    "Minimax",
    "Nested",
    "RunError",
    "SingleLevel",
    "Stopped",
    "UsageError",
    "Weighting",
    "allow_code",
    "fit",
    "machine",
    "methods",
]

_HOME = {
    "CoterieError": "coterie.errors",
    "RunError": "coterie.errors",
    "UsageError": "coterie.errors",
    "allow_code": "coterie.consent",
    "Federation": "coterie.facade",
    "Fit": "coterie.facade",
    "Stopped": "coterie.facade",
    "fit": "coterie.facade",
    "Measure": "coterie.measures",
    "Compositional": "coterie.problems.nested",
    "Minimax": "coterie.problems.nested",
    "Nested": "coterie.problems.nested",
    "SingleLevel": "coterie.problems.nested",
    "Weighting": "coterie.problems.weighting",
}


def __getattr__(name: str) -> Any:
    """Names are loaded when first used, so that the command line's --help does not wait for torch."""
    if name == "methods":
        return import_module("coterie.methods")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'coterie' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
