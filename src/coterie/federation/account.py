"""Who saw what: an account beside the ledger. Entries are derived from what the verbs return and send, like traffic.

Without secure sums the server holds every reply of every client, whatever it makes of it: a `mean` shows it as much as
a `gather`. With them (`federation.secure`) a `mean` shows the sum over the clients that replied, and nothing else.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from coterie.federation.tree import Tree, tensors

Viewer = Literal["server", "clients", "target"]
What = Literal[
    "whole updates", "sums", "single numbers", "losses", "statistics", "of the target", "broadcasts", "sizes"
]
STATISTICS = frozenset({"files", "file-checks", "private-files", "sites", "models"})
"""Families of works whose replies describe rows: moments, quantiles, words, class counts, hashes."""
SIZES = "declaration"
FEW = 4  # numbers of a report, such as the largest and the least curvature


class Seen(NamedTuple):
    """What somebody saw by one cause: the most numbers at a time, and of how few clients they were at least.

    Args:
        numbers: the most numbers about one client, or in one sum, in one reply.
        clients: the fewest clients that one value was of: 1 for a client's own, n for a sum of n.
    """

    numbers: int
    clients: int = 1

    def plus(self, other: "Seen") -> "Seen":
        """The worse of both."""
        return Seen(max(self.numbers, other.numbers), min(self.clients, other.clients))


class Row(NamedTuple):
    """One line of the account."""

    viewer: Viewer
    what: What
    cause: str
    seen: Seen

    @property
    def text(self) -> str:
        """In words, for people."""
        numbers = f"{self.seen.numbers} number{'s' if self.seen.numbers != 1 else ''}"
        if self.what == "sums":
            return f"sums over at least {self.seen.clients} clients, {numbers}"
        if self.what == "of the target":
            return f"the target's own reply, {numbers}"
        if self.what == "broadcasts":
            return f"what the server sends to all, {numbers}"
        if self.what == "sizes":
            return "the number of rows of each client"
        return f"{self.what} of each client, {numbers}"


class Account:
    """What was seen, by viewer, kind and cause.

    Example:
        >>> account = Account()
        >>> account.add("server", "shared/gradient", 650)
        >>> [row.text for row in account.rows()]
        ['the number of rows of each client', 'whole updates of each client, 650 numbers']
    """

    def __init__(self, entries: Mapping[tuple[Viewer, What, str], Seen] | None = None) -> None:
        self._entries = dict(entries or {})

    def add(self, viewer: Viewer, cause: str, numbers: int, *, what: What = "whole updates", clients: int = 1) -> None:
        """Note that somebody saw something.

        Args:
            viewer: who.
            cause: the name of the work that it is the result of.
            numbers: how many numbers about one client, or in one sum.
            what: what it is.
            clients: how many clients one value is of.
        """
        if numbers:
            key = viewer, what, cause
            seen = Seen(numbers, clients)
            self._entries[key] = seen.plus(self._entries.get(key, seen))

    def copy(self) -> "Account":
        """The same entries, which change no more with this one."""
        return Account(self._entries)

    def merge(self, other: "Account") -> None:
        """Add what another account holds."""
        for key, seen in other._entries.items():
            known = self._entries.get(key)
            if known != seen:
                self._entries[key] = seen if known is None else seen.plus(known)

    def rows(self, viewer: Viewer | None = None) -> Iterator[Row]:
        """All lines, those of the server first; that it knows the sizes of clients is always among them."""
        entries = {("server", "sizes", SIZES): Seen(1), **self._entries}
        order = ("server", "target", "clients")
        for (who, what, cause), seen in sorted(entries.items(), key=lambda item: (order.index(item[0][0]), item[0])):
            if viewer in (None, who):
                yield Row(who, what, cause, seen)

    def as_dict(self) -> dict[str, list[dict[str, Any]]]:
        """Plain data for ledger.json and checkpoints: by viewer, one entry per kind and cause."""
        found: dict[str, list[dict[str, Any]]] = {}
        for (viewer, what, cause), seen in sorted(self._entries.items()):
            found.setdefault(viewer, []).append({"what": what, "cause": cause, **seen._asdict()})
        return found

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Account":
        """The inverse of as_dict."""
        account = Account()
        for viewer, entries in data.items():
            for entry in entries:
                seen = {"what": entry["what"], "clients": entry["clients"]}
                account.add(viewer, entry["cause"], entry["numbers"], **seen)  # type: ignore[arg-type]
        return account


def kind(cause: str, replies: Tree, *, report: bool = False) -> What:
    """What the replies of single clients are, by the name of their work and by whether they hold vectors.

    Args:
        cause: the name of the work.
        replies: the replies, stacked.
        report: whether the work declares that its result is no update; a few numbers of it are single ones.
    """
    if cause.partition("/")[0] in STATISTICS:
        return "statistics"
    few = report and sum(t[0].numel() for t in tensors(replies)) <= FEW
    if any(t.dim() > 1 for t in tensors(replies)) and not few:
        return "whole updates"
    return "losses" if "loss" in cause.partition("/")[2] else "single numbers"
