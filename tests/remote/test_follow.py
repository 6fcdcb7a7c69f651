"""A run in another process writes its summary, or its error, into a file; the process that started it follows."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_own import net, rows

from coterie.engines import follow as following
from coterie.engines.follow import SILENT, STATUS_EVERY, follow, print_new_rounds, read_result, write_result
from coterie.engines.load import load_node
from coterie.engines.own import ClientData
from coterie.errors import RunError, UsageError


def failing(error: BaseException) -> Any:
    def run() -> dict[str, Any]:
        raise error

    return run


def test_the_summary_arrives(tmp_path: Path) -> None:
    write_result(tmp_path / "answer.json", lambda: {"outcome": "finished"})
    assert read_result(tmp_path / "answer.json") == {"outcome": "finished"}


@pytest.mark.parametrize("kind", [UsageError, RunError])
def test_an_expected_error_arrives_as_what_it_was(kind: type[Exception], tmp_path: Path) -> None:
    write_result(tmp_path / "answer.json", failing(kind("no such thing")))
    with pytest.raises(kind, match="no such thing"):
        read_result(tmp_path / "answer.json")


@pytest.mark.parametrize(("error", "words"), [(ValueError("odd"), "ValueError: odd"), (SystemExit(3), "was stopped")])
def test_whatever_ends_it_is_told_and_not_swallowed(error: BaseException, words: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        write_result(tmp_path / "answer.json", failing(error))
    with pytest.raises(RunError, match=words):
        read_result(tmp_path / "answer.json")


@pytest.mark.parametrize("path", ["", "absent/answer.json"])
def test_nothing_is_left_where_nobody_waits(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_result(Path(path), dict)
    assert list(tmp_path.iterdir()) == []


def test_only_whole_new_lines_are_told(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", []
    assert print_new_rounds(path, 0, said.append) == 0
    lines = [json.dumps({"round": t, "test_loss": 0.5, "seconds": 2.0}) for t in range(3)]
    path.write_text(lines[0] + "\n" + lines[1] + "\n" + lines[2][:9])
    assert print_new_rounds(path, 1, said.append) == 2
    assert said == ["round 1: test_loss 0.5 (2 s)"]


class Clock:
    """A clock that only sleeping moves; what shall happen at each sleep is given."""

    def __init__(self, *happenings: Any) -> None:
        self.now, self.happenings = 0.0, list(happenings)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += STATUS_EVERY + 1.0
        if self.happenings:
            self.happenings.pop(0)()


def unchanged() -> None:
    """Nothing happens."""


def test_a_run_is_followed_until_its_result_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, lines = tmp_path / "answer.json", []
    metrics = tmp_path / "metrics.jsonl"
    record = json.dumps({"round": 1, "test_loss": 0.5, "seconds": 2.0}) + "\n"
    clock = Clock(unchanged, lambda: metrics.write_text(record), lambda: result.write_text("{}"))
    monkeypatch.setattr(following, "time", clock)
    assert follow(tmp_path, result, lines.append, lambda: "running") is None
    assert lines == ["round 1: test_loss 0.5 (2 s)"]


@pytest.mark.parametrize("status", ["finished:failed", "FINISHED:EXECUTION_EXCEPTION", "ABORTED"])
def test_a_run_that_ends_without_a_result_is_noticed(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "time", Clock())
    states = iter(["running", status])
    assert follow(tmp_path, tmp_path / "answer.json", print, lambda: next(states)) == status


def test_a_result_that_comes_with_the_end_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "answer.json"
    monkeypatch.setattr(following, "time", Clock())

    def status() -> str:
        result.write_text("{}")
        return "finished:completed"

    assert follow(tmp_path, result, print, status) is None


def test_an_engine_may_be_silent_for_a_while_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str | None] = [None] * (SILENT - 1) + ["running"] + [None] * SILENT

    def status() -> str:
        answer = answers.pop(0)
        if answer is None:
            raise RunError("no reply.")
        return answer

    monkeypatch.setattr(following, "time", Clock())
    with pytest.raises(RunError, match=r"no reply\. What was saved is intact.*coterie resume"):
        follow(tmp_path, tmp_path / "answer.json", print, status)
    assert answers == []


def test_an_engine_that_has_ended_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise RunError("it is gone")

    monkeypatch.setattr(following, "time", Clock())
    with pytest.raises(RunError, match="it is gone"):
        follow(tmp_path, tmp_path / "answer.json", print, lambda: "running", check)


# the node of a process


def test_a_loader_of_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match="returned a list"):
        load_node(list, client=0, memory=None)  # type: ignore[arg-type,return-value]


def test_rows_without_a_number_of_their_client_are_refused() -> None:
    with pytest.raises(UsageError, match="partition-id"):
        load_node(lambda: ClientData(rows(1, 40), net(), "cross_entropy"), client=None, memory=None)


def test_a_node_keeps_its_memory_and_gets_its_policy(tmp_path: Path) -> None:
    policy = tmp_path / "node.toml"
    policy.write_text("least_batch = 3")

    def load() -> ClientData:
        return ClientData(rows(1, 40), net(), "cross_entropy")

    node = load_node(load, client=4, memory=tmp_path, shares_memory=True, policy=str(policy))
    assert (node.clients, node.shares_memory, node.policy.least_batch) == ((4,), True, 3)
    assert node.store.folder == tmp_path / "client-4"
    assert load_node(load, client=4, memory=None).store.folder is None
    whole = load_node(lambda: node, client=None, memory=None)
    assert (whole is node, whole.policy.least_batch) == (True, 3)
