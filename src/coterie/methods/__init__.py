"""One published idea a file."""

from coterie.methods.base import Method
from coterie.methods.fedavg import fedavg
from coterie.methods.local_train import local_train
from coterie.methods.meritfed import meritfed
from coterie.problems.view import View

__all__ = ["Method", "View", "fedavg", "local_train", "meritfed"]
