"""coterie's methods on Flower: the two apps of a project, and learned weights for a project that has its own.

The client's side imports neither torch nor the rest of coterie: Flower starts a process for every message, and that
one only hands it to the worker that stays.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.experiment.own import ClientData
    from coterie.flower.relay import client_app
    from coterie.flower.server import server_app
    from coterie.flower.strategy import LearnedWeights

__all__ = ["ClientData", "LearnedWeights", "client_app", "server_app"]

_HOME = {
    "ClientData": "coterie.experiment.own",
    "LearnedWeights": "coterie.flower.strategy",
    "client_app": "coterie.flower.relay",
    "server_app": "coterie.flower.server",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'coterie.flower' has no attribute {name!r}")
