"""Questions to nodes and what comes back, judged reply by reply against what was expected before it was asked for.

A reply is decoded within the limits of what its node owes, judged, and kept or dropped before the next one is decoded.
A reply that is late has the number of an earlier order, and is dropped.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple, Protocol

from coterie.federation.api import Book
from coterie.federation.remote.codec import CodecError, Limits, Message, Names, decode, message
from coterie.federation.remote.expectations import declaration_limits, larger
from coterie.federation.remote.messages import (
    PROTOCOL,
    CompressOrder,
    Declaration,
    NoiseOrder,
    Order,
    Reply,
    SecureOrder,
    Step,
    Trouble,
    cleaned,
    reply_fault,
)
from coterie.federation.remote.roster import Address, Roster


class Transport(Protocol):
    """Carries bytes to nodes and back.

    `exchange` sends all orders. It returns the replies when all nodes in `needed` have answered or failed, or after
    `timeout` seconds. A late reply may be among those of the next call; its number tells to which order it belongs. A
    node of `needed` without a reply is taken to be late. A transport that knows more returns a `Trouble`: "lost" (no
    node is there) or "client error" (the client's side cannot even reply).
    """

    def nodes(self) -> Mapping[Address, int | None]:
        """The connected nodes, each with its client where the transport knows it for certain (authentication)."""

    def exchange(
        self, orders: Mapping[Address, Message], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        """Send `bytes(order)` of each, wait, collect."""


class Policy(NamedTuple):
    """How the server waits.

    Args:
        timeout: seconds that a phase may take.
        retries: how often an order to a lost client is repeated.
        quorum: replies without which a phase does not count.
        patience: seconds to wait for clients at the start, and when all are gone.
    """

    timeout: float = 60.0
    retries: int = 1
    quorum: int = 1
    patience: float = 120.0


class Question(NamedTuple):
    """An order, what the reply to it may take, and what is wrong with the content of one (None for nothing)."""

    order: Order
    limits: Limits
    fault: Callable[[Any], str | None]


@dataclass
class Exchange:
    """Asks nodes; `roster` learns from their declarations which client is where, and which node fell silent."""

    transport: Transport
    run: str
    roster: Roster
    policy: Policy
    names: Names
    book: Book
    largest: int | None = None  # bytes that no reply may exceed, whatever is expected
    noise: NoiseOrder | None = None  # how nodes hide updates
    method: str = ""  # whose orders these are, for the policies of nodes
    _number: int = 0
    _owed: dict[Address, Limits] = field(default_factory=dict)  # the largest reply that a node has not given yet

    def order(
        self,
        kind: str,
        clients: tuple[int, ...] = (),
        step: Step | None = None,
        alive: tuple[tuple[int, ...], ...] | None = None,
        secure: SecureOrder | None = None,
        compress: CompressOrder | None = None,
        round: int = 0,
    ) -> Order:
        """A new order, numbered."""
        self._number += 1
        hides = step is not None and not step.at_target
        noise = self.noise if hides else None
        named = alive or ((),) * len(clients)
        asked = PROTOCOL, self._number, kind, self.run, clients, step, named
        return Order(*asked, secure, noise, compress, self.method, round)

    def ask(self, questions: Mapping[Address, Question]) -> dict[Address, Any]:
        """The sound content of each node's reply, or the trouble. Lost nodes are asked again while there is time."""
        contents: dict[Address, Any] = {}
        waiting, deadline = dict(questions), monotonic() + self.policy.timeout
        for _ in range(1 + self.policy.retries):
            if not waiting:
                break
            contents |= self.once(waiting, max(0.1, deadline - monotonic()))
            listed = self.transport.nodes()
            lost = [n for n in waiting if isinstance(contents[n], Trouble) and contents[n].kind == "lost"]
            waiting = {n: questions[n] for n in lost if n in listed} if monotonic() < deadline else {}
        for node, content in contents.items():
            if isinstance(content, Trouble) and content.kind in ("lost", "timeout"):
                self.roster.silent[node] = -math.inf
        return contents

    def once(self, questions: Mapping[Address, Question], timeout: float) -> dict[Address, Any]:
        """One exchange; on the side, whoever is new or was silent is asked who it is, without waiting for it."""
        sent = {node: message(question.order) for node, question in questions.items()}
        listed = self.transport.nodes()
        unknown = self.roster.unknown(listed, monotonic(), self.policy.timeout)
        asides = {node: message(self.order("whoami")) for node in unknown if node not in sent}
        for node, question in questions.items():
            self._owed[node] = larger(self._owed.get(node, self._of_declaration), question.limits)
        answers = self.transport.exchange(sent | asides, tuple(sent), timeout)
        down = sum(map(len, sent.values())) + sum(map(len, asides.values()))
        up = sum(len(data) for _, data in answers if isinstance(data, bytes))
        self.book.ledger.carried(exchanges=1 if sent else 0, up=up, down=down)
        contents: dict[Address, Any] = {}
        while answers:
            node, data = answers.pop(0)
            found = self._judged(node, data, questions.get(node))
            if found is not None and not (isinstance(found, Trouble) and node in contents):
                contents[node] = found
        late = Trouble("timeout", f"no reply within {self.policy.timeout:g} s")
        return {node: contents.get(node, late) for node in questions}

    @property
    def _of_declaration(self) -> Limits:
        return declaration_limits(self.roster.clients, len(self.roster.columns))

    def _judged(self, node: Address, data: bytes | Trouble, question: Question | None) -> Any:
        """What counts of an answer: sound content, trouble, or None where it is not about the question."""
        if isinstance(data, Trouble):
            return None if question is None else data
        reply = self._read(data, self._owed.get(node, self._of_declaration))
        if isinstance(reply, Trouble):
            if question is None:
                self._refuse(node, reply.reason)
                return None
            return reply
        content = reply.content
        if isinstance(content, Declaration):
            self.roster.declared(node, content, self.transport.nodes().get(node))
            return None
        unread = reply.number == 0 and isinstance(content, Trouble)  # it could not read the order
        if question is None:
            if isinstance(content, Trouble) and node in self.roster.silent:
                self._refuse(node, f"it says: {content.reason}")
            return None
        if reply.number != question.order.number and not unread:
            return None
        self._owed.pop(node, None)
        if isinstance(content, Trouble):
            return content._replace(reason=cleaned(content.reason))
        reason = question.fault(content)
        return content if reason is None else Trouble("rejected", cleaned(reason))

    def _refuse(self, node: Address, reason: str) -> None:
        self.roster.refuse(node, reason, self.transport.nodes().get(node))

    def _read(self, data: bytes, limits: Limits) -> Reply | Trouble:
        if self.largest is not None:
            limits = limits._replace(bytes=min(limits.bytes, self.largest))
        try:
            reply = decode(data, self.names, limits)
        except CodecError as error:
            return Trouble("rejected", cleaned(f"its reply is no message that is expected: {error}"))
        fault = reply_fault(reply)
        return reply if fault is None else Trouble("rejected", fault)
