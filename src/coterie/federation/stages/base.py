"""What engines share that stand between another engine and the server: attacks, faults, privacy, compression."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from coterie.federation.api import Call, Engine
from coterie.federation.tree import Tree
from coterie.federation.work import Memory


class Wrapped:
    """Another engine's clients. Everything is as there, but what a subclass does to replies in `execute`."""

    engine: Engine

    def at_round(self, round: int) -> "Wrapped":
        """The same where the round makes a difference to the engine within."""
        inside = getattr(self.engine, "at_round", None)
        return self if inside is None else replace(self, engine=inside(round))  # type: ignore[type-var]

    @property
    def task(self) -> Any:
        """The problem's oracles."""
        return self.engine.task

    @property
    def sizes(self) -> Tensor:
        """Rows of training data by client, [n]."""
        return self.engine.sizes

    def execute_at_target(self, call: Call) -> Tree:
        """Run a work on the target's shard; nothing stands between the target and the server."""
        return self.engine.execute_at_target(call)

    def remember(self, memory: Memory, parts: list[tuple[Tensor, Tree]]) -> Memory:
        """The memory after some clients changed theirs; it stays with them."""
        return self.engine.remember(memory, parts)
