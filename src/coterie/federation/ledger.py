"""What was moved and computed. Entries are derived from the values that the verbs send, never typed in."""

from collections.abc import Mapping
from operator import add
from typing import Any, NamedTuple

from coterie.federation.account import Account
from coterie.federation.tree import Size


class Entry(NamedTuple):
    """The traffic of one cause: upload barriers, numbers and bytes in both directions; and its points, the rows that
    works touched at all clients and at the target (see `coterie.federation.points`)."""

    rounds: int = 0
    floats_up: int = 0
    floats_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    points: int = 0

    def plus(self, other: "Entry") -> "Entry":
        """Field by field."""
        return Entry(*map(add, self, other))


class Wire(NamedTuple):
    """What a network really carried: exchanges, and bytes of messages in both directions."""

    exchanges: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class Ledger:
    """Traffic by cause. A cause is the name of the work that was asked for.

    `wire` is beside it: what a network engine carried for it, with all that is around the values. So is `seen`: who
    saw what of whom (`account.py`).
    """

    def __init__(
        self,
        entries: Mapping[str, Entry] | None = None,
        wire: Wire = Wire(),  # noqa: B008
        seen: Account | None = None,
    ) -> None:
        self._entries: dict[str, Entry] = dict(entries or {})
        self.wire = wire
        self.seen = Account() if seen is None else seen

    def carried(self, *, exchanges: int, up: int, down: int) -> None:
        """Add what a network carried."""
        self.wire = Wire(self.wire.exchanges + exchanges, self.wire.bytes_up + up, self.wire.bytes_down + down)

    def record(
        self,
        cause: str,
        *,
        rounds: int = 0,
        up: Size = Size(),  # noqa: B008
        down: Size = Size(),  # noqa: B008
        points: int = 0,
    ) -> None:
        """Add one exchange."""
        moved = Entry(rounds, up.floats, down.floats, up.bytes, down.bytes, points)
        self._entries[cause] = self._entries.get(cause, Entry()).plus(moved)

    def merge(self, other: "Ledger") -> None:
        """Add what another ledger holds."""
        for cause, entry in other._entries.items():
            self._entries[cause] = self._entries.get(cause, Entry()).plus(entry)
        self.seen.merge(other.seen)

    @property
    def by_cause(self) -> dict[str, Entry]:
        """A copy of all entries."""
        return dict(self._entries)

    @property
    def total(self) -> Entry:
        """All causes together."""
        total = Entry()
        for entry in self._entries.values():
            total = total.plus(entry)
        return total

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ledger.json and checkpoints."""
        wire = {"wire": self.wire._asdict()} if self.wire.exchanges else {}
        seen = self.seen.as_dict()
        return {
            "total": self.total._asdict(),
            "by_cause": {cause: entry._asdict() for cause, entry in sorted(self._entries.items())},
            **wire,
            **({"seen": seen} if seen else {}),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Ledger":
        """The inverse of as_dict."""
        entries = {cause: Entry(**entry) for cause, entry in data["by_cause"].items()}
        return Ledger(entries, Wire(**data.get("wire", {})), Account.from_dict(data.get("seen", {})))
