"""Values as bytes and back: a fixed schema, no pickle, every bit kept, and nothing is allocated before it was checked.

    message    "cot1", the length of the structure (4 bytes, little endian), the structure, the tensors' bytes
    structure  strict JSON: {"tree": …, "tensors": [[dtype, shape], …]}; a tensor of zeros is [dtype, shape, 0] and has
               no bytes

In a tree, None, truth values, whole and finite numbers and words stand for themselves. Everything else is a list that
begins with its kind: ["t", …] a tuple, ["l", …] a list, ["d", {…}] a dict, ["n", "module:Class", …] a named tuple,
["f", "nan"] a number that JSON has no word for, ["T"] the next tensor of the table, ["E"] the next tensor as `Each`.
"""

import json
import math
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.federation.naming import DOTTED, UnknownWork, admits, find
from coterie.federation.tree import Tree
from coterie.federation.work import Each, Work

MAGIC = b"cot1"
DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
WORDS = {dtype: name for name, dtype in DTYPES.items()}
ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class CodecError(ValueError):
    """Bytes that are no message, or a value that cannot be one, and why."""


class Limits(NamedTuple):
    """How large a message may be: bytes in all (as sent, and of its tensors), tensors, dimensions of one, nesting,
    characters of a word, bytes of the structure."""

    bytes: int = 1 << 28
    tensors: int = 1 << 14
    dims: int = 8
    depth: int = 24
    text: int = 1 << 12
    structure: int = 1 << 22


@dataclass(frozen=True)
class Names:
    """What may be named in a message: works and named tuples of listed modules. No other module is ever imported.

    A name that ends in ".*" stands for all modules below a package. Works are found by `naming.find`, also those that
    the settings of another work name.
    """

    works: frozenset[str] = frozenset(
        {
            "coterie.methods.*",
            "coterie.problems.models.statistics",
            "coterie.ensemble.message",
        }
    )
    records: frozenset[str] = field(
        default=frozenset({"coterie.methods.*", "coterie.numerics.*", "coterie.federation.remote.messages"})
    )

    def with_modules(self, *modules: str) -> "Names":
        """The same, and the works and named tuples of your own modules."""
        return Names(self.works.union(modules), self.records.union(modules))

    def work(self, name: str) -> Work:
        """The work of that name."""
        try:
            found: Work = find(name, self.works)
        except UnknownWork as error:
            raise CodecError(str(error)) from None
        return found

    def record(self, name: str) -> type[Any]:
        """The class of named tuples of that name."""
        module, sign, attribute = name.partition(":")
        if not sign or not DOTTED.fullmatch(module) or not DOTTED.fullmatch(attribute):
            raise CodecError(f"{name[:80]!r} is not of the form module:name")
        if not admits(self.records, module):
            raise CodecError(f"{module} is not among the modules that are admitted here")
        try:
            found = vars(import_module(module))[attribute]
        except (ImportError, KeyError):
            raise CodecError(f"there is no {name} here; is the same version of coterie installed?") from None
        if getattr(found, "__module__", None) != module:  # something that the module itself imported
            raise CodecError(f"{attribute} is not defined in {module}")
        if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
            raise CodecError(f"{name} is no named tuple")
        return found


@dataclass(frozen=True, slots=True)
class Message:
    """A message before it is one run of bytes, which `bytes(message)` makes of it: structure and tensors apart."""

    head: bytes
    tensors: tuple[NDArray[np.uint8], ...]

    def __len__(self) -> int:
        return len(self.head) + sum(t.nbytes for t in self.tensors)

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)

    @property
    def parts(self) -> list[Any]:
        """Its bytes in order, where they are."""
        return [self.head, *(t.data for t in self.tensors)]

    @property
    def location(self) -> tuple[tuple[int, int], ...]:
        """Where its tensors are in memory; messages that agree in this, while all of them are there, share them."""
        return tuple((t.__array_interface__["data"][0], t.nbytes) for t in self.tensors)


def message(tree: Tree) -> Message:
    """A tree of tensors and plain data as a message. The tensors are not copied; they must not change meanwhile."""
    table: list[list[Any]] = []
    tensors: list[NDArray[np.uint8]] = []
    plain = _plain(tree, table, tensors)
    text = json.dumps({"tree": plain, "tensors": table}, separators=(",", ":"), allow_nan=False).encode()
    return Message(MAGIC + len(text).to_bytes(4, "little") + text, tuple(tensors))


def encode(tree: Tree) -> bytes:
    """A tree of tensors and plain data as the bytes of a message."""
    return bytes(message(tree))


def digest(tree: Tree) -> int:
    """A positive number of 63 bits that depends on every bit of a tree."""
    state = blake2b(digest_size=8)
    for part in message(tree).parts:
        state.update(part)
    return (int.from_bytes(state.digest(), "little") >> 1) or 1


def decode(data: bytes, names: Names, limits: Limits = Limits()) -> Tree:  # noqa: B008
    """The tree of a message; anything that is no message of this form, or too large, is a CodecError."""
    return _Reader(data, names, limits).tree()


def _plain(value: Any, table: list[list[Any]], tensors: list[NDArray[np.uint8]]) -> Any:
    """The structure of a value; its tensors go to the table and the list, in order."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise CodecError(f"{value} has more than 64 bits")
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else ["f", str(number)]
    if isinstance(value, Tensor | Each):
        _add(value if isinstance(value, Tensor) else value.rows, table, tensors)
        return ["T" if isinstance(value, Tensor) else "E"]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        kind = type(value)
        return ["n", f"{kind.__module__}:{kind.__qualname__}", *(_plain(v, table, tensors) for v in value)]
    if isinstance(value, tuple | list):
        return ["t" if isinstance(value, tuple) else "l", *(_plain(v, table, tensors) for v in value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["d", {key: _plain(v, table, tensors) for key, v in value.items()}]
    raise CodecError(f"a {type(value).__name__} cannot be sent: only tensors, plain data, tuples, lists, dicts by word")


def _add(tensor: Tensor, table: list[list[Any]], tensors: list[NDArray[np.uint8]]) -> None:
    if tensor.dtype not in WORDS:
        raise CodecError(f"a tensor of {tensor.dtype} cannot be sent; known are {', '.join(DTYPES)}")
    entry: list[Any] = [WORDS[tensor.dtype], list(tensor.shape)]
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if data.any():
        tensors.append(data)
    else:
        entry.append(0)
    table.append(entry)


class _Reader:
    """Reads one message. What the structure claims is compared with the limits and with the bytes before it is used."""

    def __init__(self, data: bytes, names: Names, limits: Limits) -> None:
        self.names, self.limits = names, limits
        if len(data) > limits.bytes:
            raise CodecError(f"{len(data)} bytes exceed the limit of {limits.bytes}")
        if len(data) < 8 or data[:4] != MAGIC:
            raise CodecError("this is no message of coterie")
        self.end = 8 + int.from_bytes(data[4:8], "little")
        if self.end > len(data) or self.end - 8 > limits.structure:
            raise CodecError("the structure is longer than the message or than its limit")
        try:
            text = data[8 : self.end].decode()
            strict: dict[str, Any] = {"parse_constant": _refused, "parse_int": _whole, "parse_float": _finite}
            found = json.loads(text, object_pairs_hook=_once, **strict)
        except RecursionError:
            raise CodecError("the structure is nested too deeply") from None
        except ValueError as error:
            raise CodecError(f"the structure is no strict JSON: {str(error)[:80]}") from None
        if not isinstance(found, dict) or found.keys() != {"tree", "tensors"}:
            raise CodecError("the structure must have a tree and its tensors, and nothing else")
        self.structure = found["tree"]
        self.waiting = iter(self._tensors(data, found["tensors"]))

    def tree(self) -> Tree:
        value = self._value(self.structure, 0)
        if next(self.waiting, None) is not None:
            raise CodecError("there are tensors that the tree does not name")
        return value

    def _tensors(self, data: bytes, table: Any) -> list[Tensor]:
        if not isinstance(table, list) or len(table) > self.limits.tensors:
            raise CodecError(f"the table of tensors is none, or has more than {self.limits.tensors}")
        known = [self._form(entry) for entry in table]
        if sum(size for *_, size, _ in known) > self.limits.bytes:
            raise CodecError(f"the tensors exceed the limit of {self.limits.bytes} bytes")
        if self.end + sum(size for *_, size, sent in known if sent) != len(data):
            raise CodecError("the tensors do not fill the message exactly")
        tensors, at = [], self.end
        for dtype, shape, size, sent in known:
            if not sent:
                tensors.append(torch.zeros(shape, dtype=dtype))
                continue
            raw = np.frombuffer(data, dtype=np.uint8, count=size, offset=at)
            if dtype is torch.bool and raw.max(initial=0) > 1:
                raise CodecError("a truth value is neither 0 nor 1")
            tensor = torch.empty(shape, dtype=dtype)
            tensor.view(-1).view(torch.uint8).numpy()[:] = raw
            tensors.append(tensor)
            at += size
        return tensors

    def _form(self, entry: Any) -> tuple[torch.dtype, list[int], int, bool]:
        """Type, shape and bytes of a tensor, and whether they were sent."""
        if not isinstance(entry, list) or len(entry) not in (2, 3) or (len(entry) == 3 and entry[2] != 0):
            raise CodecError("a tensor must be [dtype, shape] or [dtype, shape, 0]")
        name, shape = entry[:2]
        if not isinstance(name, str) or name not in DTYPES:
            raise CodecError(f"{str(name)[:40]!r} is no type of tensor that may be sent")
        if not isinstance(shape, list) or len(shape) > self.limits.dims:
            raise CodecError(f"a tensor has more than {self.limits.dims} dimensions, or no shape")
        if not all(type(n) is int and 0 <= n <= self.limits.bytes for n in shape):
            raise CodecError("a tensor's shape is out of bounds")
        width = DTYPES[name].itemsize
        if math.prod(max(1, n) for n in shape) * width > self.limits.bytes:
            raise CodecError(f"a tensor of shape {shape} exceeds the limit of {self.limits.bytes} bytes")
        return DTYPES[name], shape, math.prod(shape) * width, len(entry) == 2

    def _value(self, plain: Any, depth: int) -> Any:
        if depth > self.limits.depth:
            raise CodecError(f"the tree is nested more than {self.limits.depth} deep")
        if isinstance(plain, str):
            return self._text(plain)
        if plain is None or isinstance(plain, bool | int | float):
            return plain
        if not isinstance(plain, list) or not plain or not isinstance(plain[0], str):
            raise CodecError("a part of the tree is neither plain nor of a known kind")
        kind, *rest = plain
        if kind in ("T", "E", "f", "d") and len(rest) != (0 if kind in "TE" else 1):
            raise CodecError(f"a part of kind {kind} has {len(rest)} values")
        if kind in ("T", "E"):
            tensor = next(self.waiting, None)
            if tensor is None:
                raise CodecError("the tree names more tensors than there are")
            if kind == "E" and not tensor.dim():
                raise CodecError("a single number has no rows for clients")
            return tensor if kind == "T" else Each(tensor)
        if kind == "f":
            if not isinstance(rest[0], str) or rest[0] not in ODD:
                raise CodecError("a number is unknown")
            return ODD[rest[0]]
        if kind == "d":
            if not isinstance(rest[0], dict):
                raise CodecError("a dict is none")
            return {self._text(key): self._value(v, depth + 1) for key, v in rest[0].items()}
        if kind == "n":
            return self._record(rest, depth)
        if kind not in ("t", "l"):
            raise CodecError(f"{kind[:20]!r} is no kind of part")
        values = [self._value(v, depth + 1) for v in rest]
        return tuple(values) if kind == "t" else values

    def _record(self, rest: list[Any], depth: int) -> Any:
        if not rest or not isinstance(rest[0], str):
            raise CodecError("a named tuple has no name")
        kind = self.names.record(self._text(rest[0]))
        if len(rest) - 1 != len(kind._fields):
            raise CodecError(f"{rest[0]} has {len(kind._fields)} fields, not {len(rest) - 1}")
        return kind._make(self._value(v, depth + 1) for v in rest[1:])

    def _text(self, text: str) -> str:
        if len(text) > self.limits.text:
            raise CodecError(f"a word of {len(text)} characters exceeds the limit of {self.limits.text}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise CodecError("a word is no Unicode text") from None
        return text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _whole(digits: str) -> int:
    number = int(digits) if len(digits) <= 20 else 2**63
    if not -(2**63) <= number < 2**63:
        raise ValueError("a whole number has more than 64 bits")
    return number


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number
