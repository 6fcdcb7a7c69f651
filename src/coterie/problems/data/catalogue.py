"""What `coterie data list|get|check` do, as functions that return plain rows."""

import os
from pathlib import Path
from typing import Any

from coterie.errors import RunError, UsageError
from coterie.problems.data.download import Progress, download, download_archive, fault
from coterie.problems.data.files import blocks
from coterie.problems.data.sets import KNOWN, File, Known, complete, known, places, present

BUILT_IN = "scikit-learn"


def listing() -> list[dict[str, Any]]:
    """One row per data set: its title, whether it is present, where it was found and which folders are searched."""
    return [_row(entry) for entry in KNOWN]


def check(name: str) -> list[dict[str, Any]]:
    """One row per file: its content against the published size and checksum."""
    entry = known(name)
    if not entry.files:
        return [{"data": name, "file": "", "path": None, "state": "fine", "detail": BUILT_IN}]
    candidates = [present(folder / name, entry.files) for folder in places()]
    found = max(candidates, key=len)  # of equals, the first
    return [{"data": name, "file": file.name, **_verdict(file, found)} for file in entry.files]


def fetch(name: str, folder: Path | None = None, progress: Progress | None = None) -> str:
    """Download a data set into folder/name, verified; sound files that are there stay. Returns where it is."""
    entry = known(name)
    if not entry.files:
        return BUILT_IN
    goal = (folder or places()[0]) / name
    wanted = [file for file in entry.files if _verdict(file, present(goal, (file,)))["state"] != "fine"]
    try:
        goal.mkdir(parents=True, exist_ok=True)
        _bring(entry, wanted, goal, progress)
    except OSError as error:
        raise RunError(f"{name} cannot be stored in {goal}: {error.strerror or error}. Name another folder.") from None
    return str(goal)


def _bring(entry: Known, wanted: list[File], goal: Path, progress: Progress | None) -> None:
    if wanted and entry.archive is not None:
        download_archive(entry.archive, wanted, goal, progress)
    for file in wanted:
        if entry.archive is None:
            download(file, goal, progress)
        _settle(file, goal)


def _settle(file: File, goal: Path) -> None:
    """Remove a damaged copy that would be found before the new one: plain before gzipped, for instance."""
    while (found := present(goal, (file,))) and _verdict(file, found)["state"] != "fine":
        found[file.name].unlink()


def _verdict(file: File, found: dict[str, Path]) -> dict[str, Any]:
    """Whether one file is fine, damaged or missing, and why."""
    path = found.get(file.name)
    if path is None:
        return {"path": None, "state": "missing", "detail": f"published: {file.size:,} bytes, {file.digest}"}
    try:
        wrong = fault(file, blocks(path))
    except UsageError as error:
        wrong = str(error)
    return {"path": str(path), "state": "damaged" if wrong else "fine", "detail": wrong or file.digest}


def _row(entry: Known) -> dict[str, Any]:
    files = complete(entry) or {}
    found = os.path.commonpath([path.parent for path in files.values()]) if files else None
    return {
        "name": entry.name,
        "title": entry.title,
        "classes": entry.classes,
        "state": _state(entry, bool(files)),
        "found": found if entry.files else BUILT_IN,
        "searched": [str(folder / entry.name) for folder in places()] if entry.files else [],
        "licence": entry.licence,
    }


def _state(entry: Known, ready: bool) -> str:
    if ready or not entry.files:
        return "ready"
    partly = any(present(folder / entry.name, entry.files) for folder in places())
    return "incomplete" if partly else "missing"
