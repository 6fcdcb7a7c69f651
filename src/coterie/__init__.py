"""Federated learning that learns whom to learn from."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie import methods
    from coterie.consent import allow_code
    from coterie.errors import CoterieError, RunError, UsageError
    from coterie.facade import Federation, Fit, fit
    from coterie.problems.nested import Compositional, Minimax, Nested, SingleLevel

__version__ = "0.1.0"
__all__ = [
    "Compositional",
    "CoterieError",
    "Federation",
    "Fit",
    "Minimax",
    "Nested",
    "RunError",
    "SingleLevel",
    "UsageError",
    "allow_code",
    "fit",
    "methods",
]

_HOME = {
    "CoterieError": "coterie.errors",
    "RunError": "coterie.errors",
    "UsageError": "coterie.errors",
    "allow_code": "coterie.consent",
    "Federation": "coterie.facade",
    "Fit": "coterie.facade",
    "fit": "coterie.facade",
    "Compositional": "coterie.problems.nested",
    "Minimax": "coterie.problems.nested",
    "Nested": "coterie.problems.nested",
    "SingleLevel": "coterie.problems.nested",
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
