"""What was moved. Entries are derived from the values that the verbs send, never typed in."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from coterie.federation.tree import Size


class Entry(NamedTuple):
    """The traffic of one cause: upload barriers, numbers and bytes in both directions."""

    rounds: int = 0
    floats_up: int = 0
    floats_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def plus(self, other: "Entry") -> "Entry":
        """Field by field."""
        return Entry(*(a + b for a, b in zip(self, other, strict=True)))


class Ledger:
    """Traffic by cause. A cause is the name of the work that was asked for."""

    def __init__(self, entries: Mapping[str, Entry] | None = None) -> None:
        self._entries: dict[str, Entry] = dict(entries or {})

    def record(self, cause: str, *, rounds: int = 0, up: Size = Size(), down: Size = Size()) -> None:  # noqa: B008
        """Add one exchange."""
        moved = Entry(rounds, up.floats, down.floats, up.bytes, down.bytes)
        self._entries[cause] = self._entries.get(cause, Entry()).plus(moved)

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
        return {
            "total": self.total._asdict(),
            "by_cause": {cause: entry._asdict() for cause, entry in sorted(self._entries.items())},
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Ledger":
        """The inverse of as_dict."""
        return Ledger({cause: Entry(**entry) for cause, entry in data["by_cause"].items()})
