"""Orders as Flower messages, with a grid that answers as it is told."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra coterie[flower] is not installed")

from flwr.app import RecordDict

from coterie.engines.flower import transport
from coterie.engines.flower.envelope import KIND, opened, sealed
from coterie.engines.flower.transport import FlowerTransport
from coterie.errors import RunError
from coterie.federation.remote import Trouble


class Grid:
    """Nodes 1 … 3. `delay` says after how many looks a node answers; `errors` with which error."""

    def __init__(self) -> None:
        self.here, self.delay, self.errors = [1, 2, 3], {}, {}
        self.looks: dict[str, int] = {}
        self.sent: dict[str, Any] = {}

    def get_node_ids(self) -> list[int]:
        return self.here

    def push_messages(self, messages: list[Any]) -> list[str]:
        known = [m for m in messages if m.node in self.here]
        for m in known:
            self.sent[m.metadata.message_id] = m
        return [m.metadata.message_id for m in known]  # shorter than what was given, as Flower's may be

    def pull_messages(self, ids: list[str]) -> list[Any]:
        replies = []
        for id_ in ids:
            node = self.sent[id_].node
            self.looks[id_] = self.looks.get(id_, 0) + 1
            if self.looks[id_] > self.delay.get(node, 0):
                replies.append(self.reply(id_, node))
        return replies[::-1]  # in no particular order

    def reply(self, id_: str, node: int) -> Any:
        error = self.errors.get(node)
        content = RecordDict({KIND: sealed(b"from %d: " % node + opened(self.sent[id_].content))})
        return SimpleNamespace(
            metadata=SimpleNamespace(reply_to_message_id=id_),
            has_error=lambda: error is not None,
            error=error,
            content=content,
        )


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Grid:
    def message(content: RecordDict, *, dst_node_id: int, message_type: str) -> Any:
        """Flower builds messages within a run only."""
        assert message_type == "query.coterie"
        metadata = SimpleNamespace(message_id=f"{dst_node_id}-{id(content)}")
        return SimpleNamespace(content=content, node=dst_node_id, metadata=metadata)

    monkeypatch.setattr(transport, "Message", message)
    monkeypatch.setattr(transport, "EVERY", 0.001)
    monkeypatch.setattr(transport, "FRESH", 0.0)
    return Grid()


def test_replies_are_matched_by_message_whatever_their_order(grid: Grid) -> None:
    line = FlowerTransport(grid)
    assert line.nodes() == {1: None, 2: None, 3: None}
    got = dict(line.exchange({1: b"a", 3: b"c"}, (1, 3), 1.0))
    assert got == {1: b"from 1: a", 3: b"from 3: c"}


def test_the_late_are_not_waited_for_beyond_the_timeout_and_come_with_the_next(grid: Grid) -> None:
    grid.delay = {2: 10**9}
    line = FlowerTransport(grid)
    assert dict(line.exchange({1: b"a", 2: b"b"}, (1, 2), 0.02)) == {1: b"from 1: a"}
    grid.delay = {}
    assert sorted(line.exchange({1: b"x"}, (1,), 1.0)) == [(1, b"from 1: x"), (2, b"from 2: b")]


def test_nodes_that_are_not_needed_are_not_waited_for(grid: Grid) -> None:
    grid.delay = {2: 10**9}
    assert dict(FlowerTransport(grid).exchange({1: b"a", 2: b"b"}, (1,), 3600.0)) == {1: b"from 1: a"}
    assert FlowerTransport(grid).exchange({}, (), 3600.0) == []


@pytest.mark.parametrize(
    ("code", "kind"), [(5, "lost"), (8, "lost"), (3, "lost"), (2, "client error"), (1, "client error")]
)
def test_flower_s_errors_in_our_words(grid: Grid, code: int, kind: str) -> None:
    grid.errors = {1: SimpleNamespace(code=code, reason="because")}
    ((node, trouble),) = FlowerTransport(grid).exchange({1: b"a"}, (1,), 1.0)
    assert node == 1
    assert isinstance(trouble, Trouble)
    assert trouble.kind == kind
    assert f"code {code}" in trouble.reason


def test_a_node_that_flower_does_not_know_is_lost_at_once(grid: Grid) -> None:
    grid.here = [1]
    got = dict(FlowerTransport(grid).exchange({1: b"a", 2: b"b"}, (1, 2), 3600.0))
    assert got[1] == b"from 1: a"
    assert got[2].kind == "lost"


def test_with_keys_only_registered_nodes_are_listed_and_their_client_is_certain(grid: Grid) -> None:
    assert FlowerTransport(grid, {1: 0, 3: 1}).nodes() == {1: 0, 3: 1}


def test_a_superlink_that_is_gone_ends_the_run(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(grid, "pull_messages", broken)
    with pytest.raises(RunError, match="SuperLink does not answer"):
        FlowerTransport(grid).exchange({1: b"a"}, (1,), 1.0)


def test_a_record_without_bytes_is_no_message() -> None:
    assert opened(RecordDict({})) == b""
