"""Looks into result folders, for tests."""

import json
from pathlib import Path
from typing import Any

FILES = ("weights.csv", "model.safetensors", "ledger.json")


def lines(path: Path) -> list[dict[str, Any]]:
    """Strict JSON, a line each; seconds do not count."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [{**json.loads(line, parse_constant=refuse), "seconds": 0} for line in path.read_text().splitlines()]


def happened(folder: Path) -> list[dict[str, Any]]:
    """The events but for resumes."""
    return [event for event in lines(folder / "events.jsonl") if event["event"] != "resumed"]


def summary_of(folder: Path) -> dict[str, Any]:
    """Without seconds and the notes of resumes."""
    summary = json.loads((folder / "summary.json").read_text())
    summary.pop("notes", None)
    for one in (summary, *summary.get("baselines", {}).values()):
        one["seconds"] = 0
    return summary


def assert_same_results(one: Path, two: Path) -> None:
    """Byte for byte but for seconds and the notes of resumes, in baselines too."""
    for name in FILES:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    best = [path / "model-best.safetensors" for path in (one, two)]
    assert [path.is_file() for path in best] in ([True, True], [False, False])
    assert len({path.read_bytes() for path in best if path.is_file()}) < 2, "model-best.safetensors"
    assert lines(one / "metrics.jsonl") == lines(two / "metrics.jsonl")
    assert happened(one) == happened(two)
    assert summary_of(one) == summary_of(two)
    baselines = sorted(path.name for path in (one / "baselines").glob("*"))
    assert baselines == sorted(path.name for path in (two / "baselines").glob("*"))
    for name in baselines:
        assert_same_results(one / "baselines" / name, two / "baselines" / name)
