"""Orders as Flower messages: push, then pull ten times a second until all needed replies are there."""

from collections.abc import Collection, Iterable, Mapping
from time import monotonic, sleep
from typing import Any, cast

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from coterie.engines.flower.envelope import KIND, opened, sealed
from coterie.errors import RunError
from coterie.federation.remote import Address, Trouble
from coterie.federation.remote import Message as Order

QUERY = f"query.{KIND}"
EVERY = 0.1  # seconds between two pulls; Flower's own send_and_receive waits 3
FRESH = 1.0  # seconds for which the list of nodes is taken to be true
LOST = {3: "its message ran out of time", 4: "its reply is gone", 5: "its node is gone", 8: "its process was killed"}
FORGET = 600.0  # seconds after which a message that nobody answered is given up


class FlowerTransport:
    """The nodes of a Flower federation.

    Args:
        grid: Flower's connection to the SuperLink.
        clients: the client of each registered node, where nodes are authenticated; others are then not listed.
    """

    def __init__(self, grid: Grid, clients: Mapping[int, int] | None = None) -> None:
        self.grid, self.clients = grid, clients
        self._pending: dict[str, tuple[int, float]] = {}
        self._listed: tuple[float, dict[Address, int | None]] = (-FRESH, {})

    def nodes(self) -> Mapping[Address, int | None]:
        """The connected nodes; with keys, the registered ones alone."""
        at, listed = self._listed
        if monotonic() - at >= FRESH:
            found = _ask_superlink(lambda: list(self.grid.get_node_ids()))
            if self.clients is None:
                listed = dict.fromkeys(found)
            else:
                listed = {node: self.clients[node] for node in found if node in self.clients}
            self._listed = monotonic(), listed
        return listed

    def exchange(
        self, orders: Mapping[Address, Order], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        """Send, then collect replies to these orders and to earlier ones."""
        deadline = monotonic() + timeout
        answers: list[tuple[Address, bytes | Trouble]] = []
        waiting = self._push(orders, answers)
        waiting = {id_ for id_ in waiting if self._pending[id_][0] in needed}
        while self._pending:
            waiting -= self._pull(answers)
            if not waiting or monotonic() >= deadline:
                break
            sleep(EVERY)
        return answers

    def _push(self, orders: Mapping[Address, Order], answers: list[tuple[Address, bytes | Trouble]]) -> set[str]:
        """Send the orders; a node that Flower does not know any more is lost at once."""
        now = monotonic()
        messages = {
            node: Message(RecordDict({KIND: sealed(bytes(order))}), dst_node_id=cast(int, node), message_type=QUERY)
            for node, order in orders.items()
        }
        if not messages:
            return set()
        taken = set(_ask_superlink(lambda: list(self.grid.push_messages(list(messages.values())))))
        sent = set()
        for node, message in messages.items():
            if message.metadata.message_id in taken:
                sent.add(message.metadata.message_id)
                self._pending[message.metadata.message_id] = cast(int, node), now
            else:
                answers.append((node, Trouble("lost", "Flower does not know its node any more")))
        return sent

    def _pull(self, answers: list[tuple[Address, bytes | Trouble]]) -> set[str]:
        """Collect the replies that are there; the messages to which they belong."""
        done = set()
        replies: Iterable[Message] = _ask_superlink(lambda: list(self.grid.pull_messages(list(self._pending))))
        for reply in replies:
            id_ = reply.metadata.reply_to_message_id
            if id_ in self._pending:
                done.add(id_)
                answers.append((self._pending.pop(id_)[0], _content(reply)))
        old = monotonic() - FORGET
        self._pending = {id_: sent for id_, sent in self._pending.items() if sent[1] > old}
        return done


def _content(reply: Message) -> bytes | Trouble:
    if reply.has_error():
        code, reason = reply.error.code, reply.error.reason or ""
        if code in LOST:
            return Trouble("lost", f"{LOST[code]} (Flower's code {code})")
        return Trouble("client error", f"{reason[:200]} (Flower's code {code})")
    return opened(reply.content)


def _ask_superlink(question: Any) -> Any:
    """The reply of the SuperLink; without one the run ends, and can be resumed."""
    try:
        return question()
    except Exception as error:  # whatever the connection to the SuperLink raises, the run cannot continue
        raise RunError(f"Flower's SuperLink does not answer ({type(error).__name__}: {str(error)[:120]}).") from error
