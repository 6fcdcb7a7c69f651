"""Bytes in a Flower message: one array of them. Imports nothing heavy: the relay uses it."""

from flwr.app import Array, ArrayRecord, RecordDict

KIND = "coterie"
FORM = "bytes"


def sealed(data: bytes) -> ArrayRecord:
    """A record that holds these bytes."""
    return ArrayRecord({KIND: Array(dtype="uint8", shape=(len(data),), stype=FORM, data=data)})


def opened(record: RecordDict) -> bytes:
    """The bytes of a record; none where it holds something else, which no codec takes for a message."""
    try:
        return record.array_records[KIND][KIND].data
    except KeyError:
        return b""
