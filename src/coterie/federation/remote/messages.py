"""What goes over the wire: orders to a node and its replies. `codec` encodes them; a node holds one client or several.

Rows that belong to clients (of `Each` values, of memory, of results) are stacked in the order of `Order.clients`.
Whoever receives a message checks the exact type of every field with its `*_fault` function before using any.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.federation.remote.codec import DTYPES
from coterie.federation.secure.primitives import BOX, KEYS
from coterie.federation.tree import Tree

PROTOCOL = 4
REASON = 300  # characters of a reason that are reported
MOST_POINTS = 2**53  # rows that one reply may claim
REFUSED, FORGOTTEN, CLIENT_ERROR = "refused", "forgotten", "client error"
COMPRESSORS = ("top-k", "random-k", "sketch")
TROUBLES = (REFUSED, FORGOTTEN, CLIENT_ERROR)  # all that a node may report


class MemoryVersions(NamedTuple):
    """Client memory of a step: its version by client before and after; the rows to start from where before is 0."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    start: Tree


class Step(NamedTuple):
    """One work, by name. `draw` is the key of its randomness, to which the node adds the client's id."""

    work: str
    static: dict[str, Any]
    draw: int
    shared: Tree
    memory: MemoryVersions | None
    at_target: bool


SECURE = ("secure-keys", "secure-shares", "secure-masked", "secure-reveal")
"""The kinds of orders of a secure sum (`federation/secure`), in their order."""


class SecureOrder(NamedTuple):
    """One question of a secure sum. Rows of `boxes` are stacked in the order of `Order.clients`.

    Args:
        phase: the number of the sum.
        everyone: all clients that were asked to take part.
        scales: their coefficients, float64 [n]; with "secure-masked".
        range: the largest magnitude of a number.
        needed: how many must stay to the end; with "secure-shares".
        others: who has sent keys ("secure-shares"), shares ("secure-masked") or numbers ("secure-reveal").
        keys: public keys of `others`, uint8 [n, 64]; with "secure-shares".
        boxes: the boxes of `others` for each client, uint8 [a, n, b], zeros from itself; with "secure-masked".
    """

    phase: int
    everyone: tuple[int, ...]
    scales: Tensor | None
    range: float
    needed: int
    others: tuple[int, ...] = ()
    keys: Tensor | None = None
    boxes: Tensor | None = None


class NoiseOrder(NamedTuple):
    """How a node hides updates: the largest length C, and the noise multiplier z."""

    clip: float
    multiplier: float


class CompressOrder(NamedTuple):
    """How a node compresses its reply (`stages/compression.py`).

    Args:
        name: the compressor.
        ratio: the share of the bytes that is sent.
        feedback: whether clients add what was lost to their next update.
        errors: the versions of what was lost, before and after; version 0 is nothing, so there is no start.
    """

    name: str
    ratio: float
    feedback: bool
    errors: MemoryVersions | None


class Order(NamedTuple):
    """What a node shall do: "whoami", "run" the step, "recall" the memory of versions (in `alive`), or a question of a
    secure sum.

    A node may forget all versions of a run that are not in `alive`, by client. `method` and `round` are what the server
    declares; a node's policy may limit them.
    """

    protocol: int
    number: int
    kind: str
    run: str
    clients: tuple[int, ...]
    step: Step | None
    alive: tuple[tuple[int, ...], ...]
    secure: SecureOrder | None = None
    noise: NoiseOrder | None = None
    compress: CompressOrder | None = None
    method: str = ""
    round: int = 0


class Done(NamedTuple):
    """The result of a step: values, for which clients the new memory is finite and was kept, and how many rows the work
    touched."""

    values: Tree
    kept: tuple[bool, ...]
    points: int = 0


class Trouble(NamedTuple):
    """Why there is no result. Of kind "forgotten": clients whose memory of the version asked for is not there."""

    kind: str
    reason: str
    clients: tuple[int, ...] = ()


class Declaration(NamedTuple):
    """A node's own declaration: its clients, their rows of training data, the columns of a row as (dtype, shape)."""

    clients: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[tuple[str, tuple[int, ...]], ...]
    has_target: bool
    shares_memory: bool


class Reply(NamedTuple):
    """The reply to the order of that number: a Done, a Declaration, memory rows, or a Trouble."""

    number: int
    content: Any


def order_fault(order: Any) -> str | None:
    """What is wrong with the fields of an order, or None."""
    if type(order) is not Order or type(order.protocol) is not int:
        return "this is no order"
    if order.protocol != PROTOCOL:
        return (
            f"the server uses protocol {order.protocol} and this node protocol {PROTOCOL}; "
            "install the same version of coterie on both sides"
        )
    if type(order.number) is not int or type(order.kind) is not str or type(order.run) is not str:
        return "a field of the order has a wrong type"
    if not _all_are(order.clients, int) or not _all_are(order.alive, tuple):
        return "a field of the order has a wrong type"
    if not all(_all_are(versions, int) for versions in order.alive):
        return "a field of the order has a wrong type"
    if len(set(order.clients)) != len(order.clients):
        return "a client is named twice"
    if not order.run.isalnum() or not order.run.isascii() or len(order.run) > 64:
        return "a run is named by at most 64 letters and digits"
    if type(order.method) is not str or type(order.round) is not int or order.round < 0:
        return "a field of the order has a wrong type"
    if (fault := _compress_fault(order.compress, len(order.clients))) is not None:
        return fault
    noise = order.noise
    if noise is not None and (type(noise) is not NoiseOrder or not all(map(_is_magnitude, noise)) or not noise.clip):
        return "the clip and the noise of an order are finite numbers, and the clip is positive"
    if order.kind in SECURE and order.compress is not None:
        return "a secure sum is not compressed"
    if order.kind in SECURE and (fault := _secure_fault(order.kind, order.secure, len(order.clients))) is not None:
        return fault
    return _step_fault(order.step, len(order.clients)) if order.kind in ("run", "secure-masked") else None


def _secure_fault(kind: str, secure: Any, clients: int) -> str | None:
    """What is wrong with the fields of a question of a secure sum, or None."""
    wrong = "a field of the order's secure sum has a wrong type or shape"
    if type(secure) is not SecureOrder or type(secure.phase) is not int or type(secure.needed) is not int:
        return wrong
    if not _all_are(secure.everyone, int) or not _all_are(secure.others, int):
        return wrong
    if len(set(secure.everyone)) < len(secure.everyone) or not set(secure.others) <= set(secure.everyone):
        return "the clients of a secure sum are named twice, or are none of those asked"
    if len(set(secure.others)) < len(secure.others):
        return "the clients of a secure sum are named twice, or are none of those asked"
    if type(secure.range) is not float or not 0.0 < secure.range < 2.0**62:
        return wrong
    count = len(secure.others)
    if kind == "secure-shares" and not _is_tensor(secure.keys, torch.uint8, (count, KEYS)):
        return wrong
    if kind == "secure-masked" and not _is_tensor(secure.boxes, torch.uint8, (clients, count, BOX)):
        return wrong
    if kind == "secure-masked" and not _is_tensor(secure.scales, torch.float64, (len(secure.everyone),)):
        return wrong
    return None


def _compress_fault(compress: Any, clients: int) -> str | None:
    """What is wrong with how a reply shall be compressed, or None."""
    if compress is None:
        return None
    if type(compress) is not CompressOrder or compress.name not in COMPRESSORS or type(compress.feedback) is not bool:
        return f"a reply is compressed by one of {', '.join(COMPRESSORS)}, with feedback or without"
    if type(compress.ratio) is not float or not 0.0 < compress.ratio <= 1.0:
        return "the ratio of a compressed reply is a number above 0, and at most 1"
    if (compress.errors is None) == compress.feedback:
        return "versions of errors are named where there is feedback, and only there"
    return None if compress.errors is None else _memory_fault(compress.errors, clients)


def _memory_fault(past: Any, clients: int) -> str | None:
    """What is wrong with versions of memory, or None."""
    if type(past) is not MemoryVersions or not _all_are(past.before, int) or not _all_are(past.after, int):
        return "versions of memory are whole numbers"
    if not len(past.before) == len(past.after) == clients:
        return "versions of memory must be named for every client"
    return None


def _is_magnitude(value: Any) -> bool:
    return type(value) is float and 0.0 <= value < float("inf")


def _is_tensor(value: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    finite = isinstance(value, Tensor) and value.dtype == dtype and tuple(value.shape) == shape
    return finite and (not dtype.is_floating_point or bool(torch.isfinite(value).all()))


def _step_fault(step: Any, clients: int) -> str | None:
    if type(step) is not Step or type(step.work) is not str or type(step.draw) is not int:
        return "a field of the order's step has a wrong type"
    if type(step.static) is not dict or type(step.at_target) is not bool:
        return "a field of the order's step has a wrong type"
    return None if step.memory is None else _memory_fault(step.memory, clients)


def reply_fault(reply: Any) -> str | None:
    """What is wrong with the fields of a reply, whatever its content is, or None."""
    if type(reply) is not Reply or type(reply.number) is not int:
        return "its reply is something else"
    if type(reply.content) is Trouble:
        return trouble_fault(reply.content)
    return None


def trouble_fault(trouble: Any) -> str | None:
    """What is wrong with the fields of a trouble that a node reports, or None."""
    if type(trouble) is not Trouble:
        return "its reply is something else"
    if type(trouble.kind) is not str or type(trouble.reason) is not str or not _all_are(trouble.clients, int):
        return "its reply is a trouble with fields of a wrong type"
    if trouble.kind not in TROUBLES:
        return "its reply is a trouble of an unknown kind"
    return None


def declaration_fault(found: Any) -> str | None:
    """What is wrong with the fields of a declaration, or None."""
    if type(found) is not Declaration:
        return "it is no declaration"
    if not _all_are(found.clients, int) or not _all_are(found.rows, int):
        return "it declares clients or rows that are no whole numbers"
    if not found.clients or len(found.clients) != len(found.rows) or len(set(found.clients)) != len(found.clients):
        return "it does not declare one number of rows for each of its clients"
    if not _all_are((found.has_target, found.shares_memory), bool):
        return "it declares a flag that is no truth value"
    if type(found.columns) is not tuple or not all(_is_column(column) for column in found.columns):
        return "it declares columns that are no pairs of a dtype and a shape"
    return None


def done_fault(done: Any, kept: int) -> str | None:
    """What is wrong with the fields of a result, except its values; `kept` is the number of flags it must have."""
    if type(done) is not Done:
        return "its reply is something else"
    if not _all_are(done.kept, bool):
        return "its reply has flags of memory that are no truth values"
    if len(done.kept) != kept:
        return f"its reply has {len(done.kept)} flags of memory, not {kept}"
    if type(done.points) is not int or not 0 <= done.points <= MOST_POINTS:
        return "its reply has a number of touched rows that cannot be"
    return None


def cleaned(text: str) -> str:
    """A text of a client as it may be shown: one line, printable, of at most `REASON` characters."""
    return "".join(c if c.isprintable() else " " for c in text[: 4 * REASON])[:REASON]


def _all_are(values: Any, kind: type) -> bool:
    """Whether this is a tuple of exactly that type; a truth value is no whole number."""
    return type(values) is tuple and all(type(value) is kind for value in values)


def _is_column(column: Any) -> bool:
    return (
        type(column) is tuple
        and len(column) == 2
        and type(column[0]) is str
        and column[0] in DTYPES
        and _all_are(column[1], int)
    )
