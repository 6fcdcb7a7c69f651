"""coterie on Flower: `server_app`, `client_app`, `LearnedWeights`, `ClientData`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.engines.flower import ClientData, LearnedWeights, client_app, server_app

__all__ = ["ClientData", "LearnedWeights", "client_app", "server_app"]


def __getattr__(name: str) -> Any:
    """Names are loaded when first used, so that Flower's short-lived client processes do not wait for torch."""
    if name in __all__:
        return getattr(import_module("coterie.engines.flower"), name)
    raise AttributeError(f"module 'coterie.flower' has no attribute {name!r}")
