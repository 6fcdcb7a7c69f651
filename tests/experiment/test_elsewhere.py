"""A run in another process leaves its summary, or what went wrong, for whoever started it."""

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.engines.follow import answered, leave_answer, tell
from coterie.errors import RunError, UsageError


def failing(error: BaseException) -> Any:
    def run() -> dict[str, Any]:
        raise error

    return run


def test_the_summary_arrives(tmp_path: Path) -> None:
    leave_answer(tmp_path / "answer.json", lambda: {"outcome": "finished"})
    assert answered(tmp_path / "answer.json") == {"outcome": "finished"}


@pytest.mark.parametrize("kind", [UsageError, RunError])
def test_an_expected_error_arrives_as_what_it_was(kind: type[Exception], tmp_path: Path) -> None:
    leave_answer(tmp_path / "answer.json", failing(kind("no such thing")))
    with pytest.raises(kind, match="no such thing"):
        answered(tmp_path / "answer.json")


@pytest.mark.parametrize(("error", "words"), [(ValueError("odd"), "ValueError: odd"), (SystemExit(3), "was stopped")])
def test_whatever_ends_it_is_told_and_not_swallowed(error: BaseException, words: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        leave_answer(tmp_path / "answer.json", failing(error))
    with pytest.raises(RunError, match=words):
        answered(tmp_path / "answer.json")


@pytest.mark.parametrize("place", ["", "elsewhere/answer.json"])
def test_nothing_is_left_where_nobody_waits(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    leave_answer(Path(place), dict)
    assert list(tmp_path.iterdir()) == []


def test_only_whole_new_lines_are_told(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", []
    assert tell(path, 0, said.append) == 0
    lines = [json.dumps({"round": t, "test_loss": 0.5, "seconds": 2.0}) for t in range(3)]
    path.write_text(lines[0] + "\n" + lines[1] + "\n" + lines[2][:9])
    assert tell(path, 1, said.append) == 2
    assert said == ["round 1: test_loss 0.5 (2 s)"]
