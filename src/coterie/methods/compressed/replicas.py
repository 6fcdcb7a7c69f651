"""Clients that keep a copy of the model and are sent only how it changed.

The change from one version of the model to the next is a short message. It is of use to those who have the version
before; where some active client missed that, all active ones are sent the model whole, and the ledger shows it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.federation import Federation, Memory
from coterie.federation.tree import Tree


class Replicas(NamedTuple):
    """What the clients remember (the copy first), the version of each client's copy [n], and the server's."""

    memory: Memory
    versions: Tensor
    latest: int

    @staticmethod
    def start(remembered: Tree, n: int) -> "Replicas":
        """Everybody knows the start, version −1; version 0 is the same."""
        return Replicas(Memory.start(remembered, n), torch.full((n,), -1), 0)

    def message(self, fed: Federation, change: Tree, whole: Tensor) -> Tree:
        """What brings the active clients up to date: the last change if all of them can use it, else the model."""
        return change if bool((self.versions[fed.ids] == self.latest - 1).all()) else whole

    def after(self, memory: Memory, ids: Tensor) -> "Replicas":
        """These clients have the latest version, and there is a new one."""
        return Replicas(memory, self.versions.index_fill(0, ids, self.latest), self.latest + 1)
