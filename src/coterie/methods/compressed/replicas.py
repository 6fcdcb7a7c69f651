"""Clients that keep a copy of the model and receive only its changes.

The change from one version of the model to the next is a short message. Only clients with the previous version can use
it; if an active client missed that version, all active clients receive the whole model, and the ledger shows it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.federation import Memory, Tree
from coterie.methods.base import Federation


class Replicas(NamedTuple):
    """The clients' memory (the copy first), the version of each client's copy [n], and the server's."""

    memory: Memory
    versions: Tensor
    latest: int

    @staticmethod
    def start(remembered: Tree, n: int) -> "Replicas":
        """All clients know the start, version −1; version 0 is the same."""
        return Replicas(Memory.start(remembered, n), torch.full((n,), -1), 0)

    def message(self, fed: Federation, change: Tree, whole: Tensor) -> Tree:
        """The payload that updates the active clients: the last change if all of them can use it, else the model."""
        return change if bool((self.versions[fed.ids] == self.latest - 1).all()) else whole

    def after(self, memory: Memory, ids: Tensor) -> "Replicas":
        """The replicas after these clients received the latest version, and the server made a new one."""
        return Replicas(memory, self.versions.index_fill(0, ids, self.latest), self.latest + 1)
