"""Events: a closed set of kinds, and text of clients that is fit for terminals and files."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.errors import clean, cleaned
from coterie.federation import Federation
from coterie.federation.api import Failure, Replies
from coterie.federation.events import KINDS
from coterie.federation.work import work
from coterie.numerics import Draw

ESCAPE = "\x1b[2J\x1b]0;owned\x07\r\u202eevil\u2028\x9b31m\x00"


@work
def nothing(shard: Any, shared: Any, private: Any, static: Any, draw: Any) -> torch.Tensor:
    """Never called."""
    return torch.zeros(1)


class Hostile:
    """An engine whose second client fails in its own words."""

    task = None
    sizes = torch.ones(2, dtype=torch.int64)

    def __init__(self, kind: str, reason: str) -> None:
        self.failure = Failure(1, kind, reason)

    def execute(self, call: Any, ids: torch.Tensor) -> Iterator[Replies]:
        yield Replies(ids[:1], torch.ones(1, 1), None, (self.failure,))


@pytest.mark.parametrize("kind", [ESCAPE, "finished", "a" * 1_200_000, "[link=file:///etc/passwd]lost[/link]"])
def test_what_a_client_says_is_clean_short_and_of_a_known_kind(kind: str) -> None:
    fed = Federation.on(Hostile(kind, ESCAPE + "x" * 1_200_000))
    fed.gather(nothing, draw=Draw.of(0))
    (event,) = fed.book.drain()
    assert event["event"] == "client error"
    assert event["reason"].startswith(" [2J ]0;owned")
    assert len(event["reason"]) <= 300
    assert len(json.dumps(event)) < 1000
    assert event["reason"].isprintable()


def test_honest_kinds_and_reasons_stay_as_they_are() -> None:
    fed = Federation.on(Hostile("timeout", "no reply within 60 s; there are 0 … 2"))
    fed.gather(nothing, draw=Draw.of(0))
    (event,) = fed.book.drain()
    assert (event["event"], event["reason"]) == ("timeout", "no reply within 60 s; there are 0 … 2")


def test_clean_text() -> None:
    assert clean("naïve 漢字 ε = 1") == "naïve 漢字 ε = 1"
    assert clean("a" * 300) == "a" * 300
    assert clean("a" * 301) == "a" * 299 + "…"
    assert clean("a\nb", None, keep="\n") == "a\nb"
    assert clean(ESCAPE).isprintable()
    assert cleaned({"\x1b": ["\x07", 1, None, {"a\n": "b\n"}]}) == {" ": [" ", 1, None, {"a ": "b\n"}]}


def literals(tree: ast.AST) -> Iterator[str]:
    """Kinds that the source itself writes: of failures, troubles and events."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Failure", "Trouble", "Refused"):
            at = 1 if getattr(node.func, "id", "") == "Failure" else 0
            if len(node.args) > at and isinstance(node.args[at], ast.Constant):
                yield str(node.args[at].value)
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from (
                str(value.value)
                for key, value in pairs
                if isinstance(key, ast.Constant) and key.value == "event" and isinstance(value, ast.Constant)
            )


def test_every_kind_that_the_source_writes_is_in_the_set() -> None:
    files = sorted(Path(coterie.__file__).parent.rglob("*.py"))
    found = {kind for path in files for kind in literals(ast.parse(path.read_text()))}
    assert {"lost", "rejected", "skipped", "resumed", "lied", "client error"} <= found
    assert found <= KINDS
