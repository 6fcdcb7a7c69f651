"""Bytes in a Flower message. Imports nothing heavy: the relay uses it."""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

KIND = "coterie"
FORM = "bytes"
SMALL = 1 << 20  # bytes that travel in one piece: Flower makes one call per object, and an array is three of them


def sealed(data: bytes) -> ArrayRecord | ConfigRecord:
    """A record that holds these bytes; those of an array are sent in chunks."""
    if len(data) <= SMALL:
        return ConfigRecord({KIND: data})
    return ArrayRecord({KIND: Array(dtype="uint8", shape=(len(data),), stype=FORM, data=data)})


def opened(record: RecordDict) -> bytes:
    """The bytes of a record; none where it holds something else, which no codec takes for a message."""
    found = record.get(KIND)
    if isinstance(found, ConfigRecord):
        value = found.get(KIND)
        return value if isinstance(value, bytes) else b""
    return found[KIND].data if isinstance(found, ArrayRecord) and KIND in found else b""
