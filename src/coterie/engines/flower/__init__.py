"""coterie's methods on Flower: the two apps of a project, and learned weights for a project that has its own.

The client's side imports neither torch nor the rest of coterie: Flower starts a process for every message, and that
one only hands it to the worker that stays.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.engines.flower.relay import client_app
    from coterie.engines.flower.server import server_app
    from coterie.engines.flower.strategy import LearnedWeights
    from coterie.engines.own import ClientData

__all__ = ["ClientData", "LearnedWeights", "client_app", "server_app"]

_HOME = {
    "ClientData": "coterie.engines.own",
    "LearnedWeights": "coterie.engines.flower.strategy",
    "client_app": "coterie.engines.flower.relay",
    "server_app": "coterie.engines.flower.server",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'coterie.flower' has no attribute {name!r}")
