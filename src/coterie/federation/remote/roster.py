"""Which node hosts which client, which nodes fell silent, and why a node was not admitted."""

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie.federation.api import Failure
from coterie.federation.remote.messages import Declaration, cleaned, declaration_fault

Address = Hashable
NOBODY = -1  # the client of a note about a node that has not declared one


@dataclass
class Host:
    """The node of a client, and what it declared."""

    node: Address
    declaration: Declaration


@dataclass
class Roster:
    """Which node hosts which client; rows must have these columns and, where they are known, these sizes.

    Args:
        clients: how many clients the problem has
        columns: type and shape of a row by column, as the server's own problem has them
        known: rows of training data by client where the server knows them, [n]
        device: where `sizes` lie
    """

    clients: int
    columns: tuple[tuple[str, tuple[int, ...]], ...]
    known: list[int] | None = None
    device: torch.device | str = "cpu"
    sizes: Tensor = field(init=False)
    of: dict[int, Host] = field(default_factory=dict)
    # nodes that must declare themselves before they get work, and when they were asked
    silent: dict[Address, float] = field(default_factory=dict)
    notes: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = torch.zeros(self.clients, dtype=torch.int64, device=self.device)

    @property
    def present(self) -> list[int]:
        """The clients that can be asked now."""
        return sorted(k for k, host in self.of.items() if host.node not in self.silent)

    def by_node(self, clients: Collection[int]) -> dict[Address, tuple[int, ...]]:
        """The nodes of these clients, each with those that it hosts."""
        found: dict[Address, list[int]] = {}
        for k in clients:
            found.setdefault(self.of[k].node, []).append(k)
        return {node: tuple(ks) for node, ks in found.items()}

    def forget(self, listed: Mapping[Address, Any]) -> None:
        """Drop the clients at nodes that are listed no more."""
        for k, host in list(self.of.items()):
            if host.node not in listed:
                del self.of[k]
                self.silent.pop(host.node, None)

    def unknown(self, listed: Mapping[Address, Any], now: float, pause: float) -> list[Address]:
        """Nodes that have not declared themselves, or fell silent, and were not asked within the pause."""
        hosts = {host.node for host in self.of.values()}
        asking = [
            node
            for node in listed
            if (node not in hosts or node in self.silent) and now - self.silent.get(node, -math.inf) > pause
        ]
        self.silent |= dict.fromkeys(asking, now)
        return asking

    def declared(self, node: Address, declaration: Declaration, certain: int | None) -> None:
        """Admit a node as the host of its clients, or note why not.

        Args:
            certain: the client that the node is, where the transport knows it by a key
        """
        fault = declaration_fault(declaration)
        reason = fault or self._misfit(node, declaration, certain)
        if reason is not None:
            claimed = certain if fault or certain is not None else declaration.clients[0]  # a key cannot be claimed
            self.refuse(node, reason, claimed)
            return
        for k, count in zip(declaration.clients, declaration.rows, strict=True):
            if int(self.sizes[k]) and (k not in self.of or node in self.silent):
                self.notes.append(Failure(k, "rejoined", "it is there again"))
            self.of[k] = Host(node, declaration)
            self.sizes[k] = count
        self.silent.pop(node, None)

    def refuse(self, node: Address, reason: str, claimed: int | None) -> None:
        """Note that a node was not admitted, by the client that it hosts or claims to be."""
        named = [k for k, host in self.of.items() if host.node == node]
        client = named[0] if named else NOBODY if claimed is None else claimed
        self.notes.append(Failure(client, "refused", cleaned(f"a node was not let in: {reason}")))

    def drained(self) -> list[Failure]:
        """The notes so far; afterwards there are none."""
        notes, self.notes = self.notes, []
        return notes

    def _misfit(self, node: Address, declaration: Declaration, certain: int | None) -> str | None:
        """Why a declaration of sound fields does not fit what the server knows, or None."""
        if not all(0 <= k < self.clients for k in declaration.clients):
            return f"it declares client {max(declaration.clients, key=abs)}, and there are 0 … {self.clients - 1}"
        if certain is not None and declaration.clients != (certain,):
            return f"its key belongs to client {certain}, and it declares {list(declaration.clients[:5])}"
        if declaration.columns != self.columns:
            columns = _text(declaration.columns)
            return f"its rows have columns {columns}, those of the server's problem {_text(self.columns)}"
        for k, count in zip(declaration.clients, declaration.rows, strict=True):
            if not 0 < count < 2**40:
                return "it declares a number of rows that cannot be"
            if self.known is not None and count != self.known[k]:
                return f"it declares {count} rows of client {k}, and the server's problem has {self.known[k]}"
            host = self.of.get(k)
            if host is not None and host.node != node and host.node not in self.silent:
                return f"client {k} is there already"
        return None


def _text(columns: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    """Columns in a few characters, whatever a node declares."""
    shown = ", ".join(f"{name}{list(shape[:4])}" for name, shape in columns[:4])
    return f"{shown} …" if len(columns) > 4 else shown
