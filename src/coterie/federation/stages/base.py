"""Stages: what happens to replies between a client's work and the server.

Privacy, attacks, faults and compression are stages. A stage looks at the call before the work is run (`before`: who is
asked at all) and changes the replies afterwards (`apply`); what it has to remember is its state. `Staged` is an engine
whose replies pass through a list of stages, always in the order `ORDER`:

    privacy      the client clips its update and adds noise
    attack       an attacker sends something else instead
    faults       crashes, delays and damage
    compression  what is left is compressed, and the ledger bills that

`before` is asked in the opposite order: a client that crashes uploads nothing, so its privacy costs nothing.
The target's own replies pass through no stage. A stage needs nothing but the call, the replies and its own state, so
the same code runs for many simulated clients and for the clients of one node.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.federation.api import Call, Engine, Failure, Replies, together
from coterie.federation.tree import Tree
from coterie.federation.work import Memory

StageState = Any
"""What a stage remembers: a tree of tensors, `Memory` and plain data, or None. It becomes part of checkpoints."""

ORDER = ("privacy", "attack", "faults", "compression")
"""The keys of stages, from the client to the server."""


class Asked(NamedTuple):
    """Who is asked after a stage looked at a call: their ids, ascending, who is missing and why, the new state."""

    ids: Tensor
    missing: tuple[Failure, ...]
    state: StageState


class Stage:
    """One thing that happens to replies. Every method has a default that changes nothing.

    Attributes:
        key: which of `ORDER` it is; its state has this name in checkpoints.
    """

    key: ClassVar[str]

    def start(self, n: int, device: torch.device) -> StageState:
        """The state of n clients before the first call; None where the stage remembers nothing."""
        return None

    def declared(self, sizes: Tensor) -> Tensor:
        """The numbers of training rows that clients declare, [n], given the true ones."""
        return sizes

    def before(self, call: Call, ids: Tensor, state: StageState) -> Asked:
        """Whom of these clients the call reaches."""
        return Asked(ids, (), state)

    def prepared(self, call: Call, state: StageState) -> Call:
        """The call as the engine gets it."""
        return call

    def needs_all(self, call: Call) -> bool:
        """Whether `apply` needs all replies of a call at once; else they come in chunks."""
        return False

    def apply(self, call: Call, replies: Replies, state: StageState) -> tuple[Replies, StageState]:
        """The replies after this stage, and its new state; there is one reply at least."""
        return replies, state

    def finished(self, before: StageState, after: StageState) -> StageState:
        """The state at the end of a round, from the states at its beginning and after its last call."""
        return after

    def undone(self, before: StageState, after: StageState) -> StageState:
        """The state to continue from where a round is skipped or rejected."""
        return before

    def record(self, state: StageState) -> dict[str, Any]:
        """What the record of a round shows of the state."""
        return {}


@dataclass(frozen=True)
class Staged:
    """An engine whose replies pass through stages. `staged` makes one.

    Args:
        engine: where the clients are.
        stages: what their replies pass through, in this order.
        states: the state of each stage by key; it changes with every call.
    """

    engine: Engine
    stages: tuple[Stage, ...]
    states: dict[str, StageState]

    def start(self) -> dict[str, StageState]:
        """The states of all stages before the first call."""
        sizes = self.engine.sizes
        return {stage.key: stage.start(len(sizes), sizes.device) for stage in self.stages}

    def resumed(self, states: dict[str, StageState]) -> "Staged":
        """The same engine and stages with these states; stages that are not named begin anew."""
        return replace(self, states={**self.start(), **states})

    @property
    def task(self) -> Any:
        """The problem's oracles."""
        return self.engine.task

    @property
    def sizes(self) -> Tensor:
        """Rows of training data per client as they declare them, [n]."""
        sizes = self.engine.sizes
        for stage in self.stages:
            sizes = stage.declared(sizes)
        return sizes

    @property
    def recall(self) -> Any:
        """How an engine on a network asks nodes for client memory; None where rows are here."""
        return getattr(self.engine, "recall", None)

    @property
    def secure_sum(self) -> Any:
        """The secure sums of an engine on a network, which its stages only count; None where replies come by here."""
        inner = getattr(self.engine, "secure_sum", None)
        if inner is None:
            return None

        def summed(call: Call, ids: Tensor, scales: Tensor, secure: Any) -> Any:
            reached, missing = self._reached(call, ids)
            assert len(reached) == len(ids)
            assert not missing
            return inner(call, ids, scales, secure)

        return summed

    def _reached(self, call: Call, ids: Tensor) -> tuple[Tensor, tuple[Failure, ...]]:
        """Whom of these clients the call reaches, and who is missing."""
        missing: tuple[Failure, ...] = ()
        for stage in reversed(self.stages):
            if len(ids):
                ids, failures, self.states[stage.key] = stage.before(call, ids, self.states[stage.key])
                missing += failures
        return ids, missing

    def execute(self, call: Call, ids: Tensor) -> Iterator[Replies]:
        """Run a work at the clients that the call reaches; their replies pass through every stage."""
        ids, missing = self._reached(call, ids)
        if missing:
            yield Replies(ids[:0], None, None, missing)
        if not len(ids):
            return
        for stage in self.stages:
            call = stage.prepared(call, self.states[stage.key])
        replies = self.engine.execute(call, ids)
        for stage in self.stages:
            replies = self._through(stage, call, replies)
        yield from replies

    def _through(self, stage: Stage, call: Call, chunks: Iterable[Replies]) -> Iterator[Replies]:
        for replies in together(chunks) if stage.needs_all(call) else chunks:
            passed = replies
            if len(replies.ids):
                passed, self.states[stage.key] = stage.apply(call, replies, self.states[stage.key])
            yield passed

    def execute_at_target(self, call: Call) -> Tree:
        """Run a work on the target's shard; no stage applies there."""
        return self.engine.execute_at_target(call)

    def remember(self, memory: Memory, parts: list[tuple[Tensor, Tree]]) -> Memory:
        """The memory after some clients changed theirs; it stays with them, so no stage applies."""
        return self.engine.remember(memory, parts)


def staged(engine: Engine, *stages: Stage) -> Engine:
    """An engine whose replies pass through these stages, in the order `ORDER`; the engine itself without any.

    Args:
        engine: where the clients are. If it has stages already, these are added.
        stages: at most one of each key.

    Example:
        `staged(LocalEngine(task, train), Compression("top-k", 0.1), Attack("sign-flip", honest=8))` compresses what
        attackers send, too.
    """
    if isinstance(engine, Staged):
        stages, engine = (*engine.stages, *stages), engine.engine
    if not stages:
        return engine
    keys = [stage.key for stage in stages]
    if len(set(keys)) < len(keys):
        raise ValueError(f"two stages of one key: {', '.join(keys)}; give one of each")
    made = Staged(engine, tuple(sorted(stages, key=lambda stage: ORDER.index(stage.key))), {})
    return made.resumed({})
