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
    """A row a data set: what it is, whether it is there, where it was found, where it is looked for."""
    return [_row(entry) for entry in KNOWN]


def check(name: str) -> list[dict[str, Any]]:
    """A row a file: its content against the published size and checksum."""
    entry = known(name)
    if not entry.forms:
        return [{"data": name, "file": "", "path": None, "state": "fine", "detail": BUILT_IN}]
    folder, form = _fullest(entry)
    found = present(folder, form)
    return [{"data": name, "file": file.name, **_verdict(file, found)} for file in form]


def fetch(name: str, folder: Path | None = None, progress: Progress | None = None) -> str:
    """Download a data set into folder/name, verified; sound files that are there stay. Returns where it is."""
    entry = known(name)
    if not entry.forms:
        return BUILT_IN
    goal, form = (folder or places()[0]) / name, entry.forms[0]
    wanted = [file for file in form if _verdict(file, present(goal, (file,)))["state"] != "fine"]
    try:
        goal.mkdir(parents=True, exist_ok=True)
        _bring(entry, wanted, goal, progress)
    except OSError as error:
        raise RunError(f"{name} cannot be stored in {goal}: {error.strerror or error}. Name another folder.") from None
    return str(goal)


def _bring(entry: Known, wanted: list[File], goal: Path, progress: Progress | None) -> None:
    if wanted and entry.archive is not None:
        download_archive(entry.archive, wanted, goal, progress)
    elif wanted:
        for file in wanted:
            download(file, goal, progress)
    for file in wanted:
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


def _fullest(entry: Known) -> tuple[Path, tuple[File, ...]]:
    """The folder and form that a loader would take, else those with most files there."""
    choices = [(place / entry.name, form) for place in places() for form in entry.forms]
    return max(choices, key=lambda choice: len(present(*choice)) / len(choice[1]))  # of equals, the first


def _row(entry: Known) -> dict[str, Any]:
    files = complete(entry) or {}
    found = os.path.commonpath([path.parent for path in files.values()]) if files else None
    return {
        "name": entry.name,
        "title": entry.title,
        "classes": entry.classes,
        "state": _state(entry, bool(files)),
        "found": found if entry.forms else BUILT_IN,
        "searched": [str(place / entry.name) for place in places()] if entry.forms else [],
        "licence": entry.licence,
    }


def _state(entry: Known, ready: bool) -> str:
    if ready or not entry.forms:
        return "ready"
    partly = any(present(place / entry.name, form) for place in places() for form in entry.forms)
    return "incomplete" if partly else "missing"
