"""Bytes and back: exact for everything that is sent, and nothing but a CodecError for anything else."""

import json
import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.federation import Each
from coterie.federation.remote.codec import DTYPES, MAGIC, CodecError, Limits, Names, decode, digest, encode, message
from coterie.federation.remote.messages import PROTOCOL, MemoryVersions, Order, Reply, Step
from coterie.federation.tree import tree_flatten
from coterie.methods.baselines.local_svrg import Anchor, SVRGSteps
from coterie.numerics.sparse import Sparse

NAMES = Names()


class Mine(NamedTuple):
    """A named tuple of a module that nobody admitted."""

    a: int


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def assert_same(one: Any, two: Any) -> None:
    a, b = tree_flatten(one), tree_flatten(two)
    assert a[1] == b[1]
    for x, y in zip(a[0], b[0], strict=True):
        assert type(x) is type(y)
        if isinstance(x, Each):
            x, y = x.rows, y.rows
        if isinstance(x, torch.Tensor):
            assert bits(x) == bits(y)
        else:
            assert x == y or (math.isnan(x) and math.isnan(y))
            assert str(x) == str(y)  # −0.0 too


@st.composite
def any_tensor(draw: Any) -> torch.Tensor:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        raw = bytes(b % 2 for b in raw)
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).numpy()[:] = list(raw)
    return tensor


plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=20)
leaves = plain | any_tensor()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        | st.tuples(inner, inner).map(lambda pair: Sparse(*pair))
    ),
    max_leaves=12,
)


@settings(max_examples=120, deadline=None)
@given(trees)
def test_every_tree_comes_back_bit_by_bit(tree: Any) -> None:
    data = encode(tree)
    found = decode(data, NAMES)
    assert_same(found, tree)
    assert encode(found) == data
    assert digest(found) == digest(tree)


def test_messages_know_with_whom_they_share_tensors() -> None:
    model = torch.randn(2, 3)
    first, second = message(("a", model)), message((1, 2, model.detach()))
    assert first.location == second.location
    assert first.head != second.head
    assert len(first) == len(bytes(first)) == len(first.head) + 24
    assert first.location != message(model.clone()).location
    # what had to be copied is kept by its message, so that no other can come to stand at its place
    kept = [message((model + i).T) for i in range(20)]
    assert len({sent.location for sent in kept}) == 20


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_type_odd_numbers_and_layouts(name: str) -> None:
    dtype = DTYPES[name]
    values = [0, 1, 1, 0] if name == "bool" else [0.0, 1.0, 2.0, 3.0]
    t = torch.tensor(values, dtype=dtype).reshape(2, 2)
    for tensor in (t, t.T, t[:, 1], t[0, 0], t[:0], t[0].expand(3, 2)):
        assert bits(decode(encode(tensor), NAMES)) == bits(tensor)
    if dtype.is_floating_point:
        odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, torch.finfo(dtype).tiny], dtype=dtype)
        assert bits(decode(encode(odd), NAMES)) == bits(odd)


def test_zeros_travel_without_bytes_but_minus_zeros_are_none() -> None:
    assert len(encode(torch.zeros(10_000))) < 100
    assert len(encode(-torch.zeros(10_000))) > 40_000


def test_named_tuples_of_methods_keep_their_type() -> None:
    svrg = SVRGSteps(0.1, 2, 0.5, 10, 4)
    anchor = Anchor(torch.ones(2), torch.zeros(2), torch.ones(2), (torch.ones(1),))
    order = Order(
        PROTOCOL, 3, "run", "r", (1,), Step("m:f", {"svrg": svrg}, -5, Each(torch.ones(1, 2)), None, False), ((7,),)
    )
    past = MemoryVersions((0,), (9,), anchor)
    for value in (svrg, anchor, order, past):
        assert_same(decode(encode(value), NAMES), value)


@pytest.mark.parametrize(
    "value",
    [object(), {1: 2}, 2**63, torch.zeros(1, dtype=torch.complex64), {"a": {1, 2}}, b"bytes", "\ud800"],
    ids=["object", "key", "large", "complex", "set", "bytes", "surrogate"],
)
def test_what_cannot_be_sent_is_refused_by_the_sender(value: Any) -> None:
    with pytest.raises((CodecError, UnicodeEncodeError)):
        decode(encode(value), NAMES)


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "builtins:eval",
        "coterie.experiment.config:RunTable",  # a module that is not admitted
        "coterie.methods.shared.works:Tensor",  # something that an admitted module imported
        "shared/gradient",  # no named tuple
        "coterie.methods.baselines.local_svrg:Nobody",
        "coterie.methods.none:Nobody",
        "coterie.methods..x:y",
        "coterie.methods.baselines.local_svrg:SVRGSteps.share",
        f"{__name__}:Mine",
    ],
)
def test_only_named_tuples_of_admitted_modules_are_made(name: str) -> None:
    text = json.dumps({"tree": ["n", name, 1], "tensors": []}).encode()
    with pytest.raises(CodecError):
        decode(MAGIC + len(text).to_bytes(4, "little") + text, NAMES)


def test_a_module_that_is_not_admitted_is_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("coterie.federation.remote.codec.import_module", lambda name: asked.append(name))
    for name in ("antigravity:x", "coterie.methodsx:y", "measures/judged"):
        with pytest.raises(CodecError, match="not among"):
            NAMES.work(name)
    assert asked == []


def test_works_are_found_by_name_and_one_s_own_modules_can_be_added() -> None:
    from coterie.methods.shared.works import gradient

    assert NAMES.work("shared/gradient") is gradient
    with pytest.raises(CodecError, match="is no work"):
        NAMES.work("coterie.methods.shared.works:own_rows")
    with pytest.raises(CodecError, match="not among"):
        NAMES.record(f"{__name__}:Mine")
    assert NAMES.with_modules(__name__).record(f"{__name__}:Mine") is Mine


def written(structure: str, data: bytes = b"") -> bytes:
    return MAGIC + len(structure.encode()).to_bytes(4, "little") + structure.encode() + data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no message"),
        (b"PK\x03\x04" + bytes(40), "no message"),
        (MAGIC + b"\xff\xff\xff\xff", "longer than"),
        (written('{"tree":1}'), "nothing else"),
        (written('{"tree":1,"tensors":[],"more":1}'), "nothing else"),
        (written('{"tree":1,"tree":2,"tensors":[]}'), "twice"),
        (written('{"tree":NaN,"tensors":[]}'), "no JSON"),
        (written('{"tree":1e999,"tensors":[]}'), "too large"),
        (written('{"tree":9223372036854775808,"tensors":[]}'), "64 bits"),
        (written('{"tree":' + "9" * 5000 + ',"tensors":[]}'), "64 bits"),
        (written('{"tree":' + "[" * 90_000 + "]" * 90_000 + ',"tensors":[]}'), "nested|kind|JSON"),
        (written('{"tree":' + '["l",' * 30 + "1" + "]" * 30 + ',"tensors":[]}'), "nested"),
        (written('{"tree":"' + "x" * 5000 + '","tensors":[]}'), "characters"),
        (written('{"tree":"\\ud800","tensors":[]}'), "Unicode"),
        (written('{"tree":["x"],"tensors":[]}'), "kind"),
        (written('{"tree":["T"],"tensors":[]}'), "more tensors"),
        (written('{"tree":1,"tensors":[["float32",[1],0]]}'), "does not name"),
        (written('{"tree":["T"],"tensors":[["float32",[1]]]}'), "fill"),
        (written('{"tree":["T"],"tensors":[["float32",[1]]]}', bytes(8)), "fill"),
        (written('{"tree":["T"],"tensors":[["complex64",[1]]]}', bytes(8)), "no type"),
        (written('{"tree":["T"],"tensors":[["float32",[-1]]]}'), "bounds"),
        (written('{"tree":["T"],"tensors":[["float32",[true]]]}'), "bounds"),
        (written('{"tree":["T"],"tensors":[["float32",[1,1,1,1,1,1,1,1,1],0]]}'), "dimensions"),
        (written('{"tree":["T"],"tensors":[["float32",[100000,100000],0]]}'), "limit"),
        (written('{"tree":["T"],"tensors":[["float32",[200000000,200000000,0],0]]}'), "limit"),
        (written('{"tree":["l",["T"],["T"]],"tensors":[["int8",[200000000],0],["int8",[200000000],0]]}'), "limit"),
        (written('{"tree":["T"],"tensors":[["bool",[1]]]}', b"\x02"), "0 nor 1"),
        (written('{"tree":["E"],"tensors":[["bool",[]]]}', b"\x01"), "no rows"),
    ],
)
def test_a_crooked_message_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        decode(data, NAMES)


def test_limits_hold() -> None:
    data = encode([torch.ones(3, 3)] * 3)
    for limits in (Limits(bytes=100), Limits(tensors=2), Limits(dims=1), Limits(depth=0), Limits(structure=20)):
        with pytest.raises(CodecError):
            decode(data, NAMES, limits)
    decode(data, NAMES, Limits(bytes=len(data), tensors=3, dims=2, depth=1))


def corrupted(data: bytes, dice: random.Random) -> bytes:
    """Bytes flipped, cut out, doubled, or replaced by what means something."""
    raw = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(raw) + 1)
        kind = dice.randrange(5)
        if kind == 0 and raw:
            raw[at % len(raw)] = dice.randrange(256)
        elif kind == 1:
            del raw[at : at + dice.randint(1, 9)]
        elif kind == 2:
            raw[at:at] = raw[at : at + dice.randint(1, 20)]
        elif kind == 3:
            raw[at:at] = dice.choice([b"[", b"]", b'"', b"-1", b"1e9", b'"T"', b"null", b'["n"', b"99999999", b"true"])
        elif raw:
            del raw[at:]
    return bytes(raw)


def test_thousands_of_mutated_messages_never_raise_anything_else() -> None:
    dice = random.Random(0)
    svrg = SVRGSteps(0.1, 2, 0.5, 10, 4)
    step = Step(
        "shared/gradient",
        {"batch": 3, "w": svrg},
        7,
        (torch.ones(3), Each(torch.eye(2))),
        None,
        False,
    )
    originals = [
        encode(Order(PROTOCOL, 1, "run", "r", (0, 1), step, ((3,), ()))),
        encode(Reply(4, (torch.randn(2, 5), {"a": [torch.arange(3), None, math.inf]}))),
        encode(Sparse(torch.ones(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.int32))),
    ]
    good = 0
    for i in range(6000):
        try:
            decode(corrupted(originals[i % 3], dice), NAMES, Limits(bytes=1 << 16))
            good += 1
        except CodecError:
            continue
    assert good < 3000


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes(data: bytes, framed: bool) -> None:
    if framed:
        data = MAGIC + len(data).to_bytes(4, "little") + data
    with pytest.raises(CodecError):
        decode(data, NAMES)
