"""Methods: one published idea per file, in families.

The public factories, such as `coterie.methods.meritfed`, follow from the registry. A module is imported when its
factory is first used. Each docstring states the cost of one call of `Method.round` in communication rounds. An
exchange with the target costs no round if the server holds the target's rows, and one round if a client does.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from coterie.methods.base import Method
from coterie.methods.registry import METHODS
from coterie.problems.base import View

_HOME = {entry.identifier: entry.home for entry in METHODS}
_HOME |= {"two_layer": "compressed.two_layer", "by_objective": "compressed.two_layer"}  # for own decoders and encoders

__all__ = ["Method", "View", *sorted(_HOME)]


def __getattr__(name: str) -> Callable[..., Any]:
    """A factory by its name."""
    if name not in _HOME:
        raise AttributeError(f"module 'coterie.methods' has no attribute {name!r}")
    factory: Callable[..., Any] = getattr(import_module(f"coterie.methods.{_HOME[name]}"), name)
    return factory


def __dir__() -> list[str]:
    return list(__all__)
