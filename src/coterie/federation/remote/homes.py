"""Where clients live: which node is the home of which client, who fell silent, and why a node was not let in."""

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie.federation.api import Failure
from coterie.federation.remote.messages import Card, card_fault, cleaned

Address = Hashable
NOBODY = -1  # the client of a note about a node that has not declared one


@dataclass
class Home:
    """Where a client lives, and what its node declared."""

    node: Address
    card: Card


@dataclass
class Homes:
    """The homes of so many clients, whose rows must have these columns and, where they are known, these sizes.

    Args:
        columns: type and shape of a row by column, as the server's own problem has them
        known: rows of training data by client where the server knows them, [n]
        device: where `sizes` lie
    """

    clients: int
    columns: tuple[tuple[str, tuple[int, ...]], ...]
    known: list[int] | None = None
    device: torch.device | str = "cpu"
    sizes: Tensor = field(init=False)
    of: dict[int, Home] = field(default_factory=dict)
    silent: dict[Address, float] = field(default_factory=dict)  # must declare themselves before work; when asked
    notes: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = torch.zeros(self.clients, dtype=torch.int64, device=self.device)

    @property
    def present(self) -> list[int]:
        """The clients that can be asked now."""
        return sorted(k for k, home in self.of.items() if home.node not in self.silent)

    def by_node(self, clients: Collection[int]) -> dict[Address, tuple[int, ...]]:
        """The nodes of these clients, each with those that live there."""
        found: dict[Address, list[int]] = {}
        for k in clients:
            found.setdefault(self.of[k].node, []).append(k)
        return {node: tuple(ks) for node, ks in found.items()}

    def forget(self, listed: Mapping[Address, Any]) -> None:
        """Give up the homes at nodes that are listed no more."""
        for k, home in list(self.of.items()):
            if home.node not in listed:
                del self.of[k]
                self.silent.pop(home.node, None)

    def unknown(self, listed: Mapping[Address, Any], now: float, pause: float) -> list[Address]:
        """Nodes that have not declared themselves, or fell silent, and were not asked within the pause."""
        at_home = {home.node for home in self.of.values()}
        asking = [
            node
            for node in listed
            if (node not in at_home or node in self.silent) and now - self.silent.get(node, -math.inf) > pause
        ]
        self.silent |= dict.fromkeys(asking, now)
        return asking

    def declared(self, node: Address, card: Card, certain: int | None) -> None:
        """Let a node in as the home of its clients, or note why not.

        Args:
            certain: the client that the node is, where the transport knows it by a key
        """
        fault = card_fault(card)
        reason = fault or self._misfit(node, card, certain)
        if reason is not None:
            self.refuse(node, reason, certain if fault else card.clients[0])
            return
        for k, count in zip(card.clients, card.rows, strict=True):
            if int(self.sizes[k]) and (k not in self.of or node in self.silent):
                self.notes.append(Failure(k, "rejoined", "it is there again"))
            self.of[k] = Home(node, card)
            self.sizes[k] = count
        self.silent.pop(node, None)

    def refuse(self, node: Address, reason: str, claimed: int | None) -> None:
        """Note that a node was not let in, by the client that lives there or that it claims to be."""
        named = [k for k, home in self.of.items() if home.node == node]
        client = named[0] if named else NOBODY if claimed is None else claimed
        self.notes.append(Failure(client, "refused", cleaned(f"a node was not let in: {reason}")))

    def drained(self) -> list[Failure]:
        """The notes so far; afterwards there are none."""
        notes, self.notes = self.notes, []
        return notes

    def _misfit(self, node: Address, card: Card, certain: int | None) -> str | None:
        """Why a card of sound fields does not fit what the server knows, or None."""
        if not all(0 <= k < self.clients for k in card.clients):
            return f"it declares client {max(card.clients, key=abs)}, and there are 0 … {self.clients - 1}"
        if certain is not None and card.clients != (certain,):
            return f"its key belongs to client {certain}, and it declares {list(card.clients[:5])}"
        if card.columns != self.columns:
            return f"its rows have columns {_text(card.columns)}, those of the server's problem {_text(self.columns)}"
        for k, count in zip(card.clients, card.rows, strict=True):
            if not 0 < count < 2**40:
                return "it declares a number of rows that cannot be"
            if self.known is not None and count != self.known[k]:
                return f"it declares {count} rows of client {k}, and the server's problem has {self.known[k]}"
            home = self.of.get(k)
            if home is not None and home.node != node and home.node not in self.silent:
                return f"client {k} is there already"
        return None


def _text(columns: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    """Columns in few words, whatever a card declares."""
    shown = ", ".join(f"{name}{list(shape[:4])}" for name, shape in columns[:4])
    return f"{shown} …" if len(columns) > 4 else shown
