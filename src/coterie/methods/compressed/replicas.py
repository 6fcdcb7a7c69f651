"""Clients that keep a copy of the model and receive only its changes.

The change from one version of the model to the next is a short message. Only clients with the previous version can use
it; if an active client missed that version, all active clients receive the whole model, and the ledger shows it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.federation import Memory, Tree, Work
from coterie.methods.base import Draw, Federation


class Replicas(NamedTuple):
    """The clients' memory (the copy first), the version of each client's copy [n], and the server's."""

    memory: Memory
    versions: Tensor
    latest: int

    @staticmethod
    def start(remembered: Tree, n: int) -> "Replicas":
        """All clients know the start, version −1; version 0 is the same."""
        return Replicas(Memory.start(remembered, n), torch.full((n,), -1), 0)

    def gather(
        self, fed: Federation, what: Work, change: Tree, whole: Tensor, draw: Draw, **settings: Any
    ) -> tuple[Tree, "Replicas"]:
        """The replies of a work that begins by updating the copies, and the replicas once the server has a new version.

        The active clients receive the last change if all of them can use it, else the whole model.
        """
        message = change if bool((self.versions[fed.ids] == self.latest - 1).all()) else whole
        (values, ids), memory = fed.gather(what, message, memory=self.memory, draw=draw, **settings)
        return values, Replicas(memory, self.versions.index_fill(0, ids, self.latest), self.latest + 1)
