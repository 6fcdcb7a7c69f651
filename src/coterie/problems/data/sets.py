"""The known data sets (sets.toml): their files with checksums, where to get them, and where coterie looks for them.

Sizes and checksums are those of the content, so a file may lie there plain or gzipped, whoever compressed it.
"""

import os
import tomllib
from dataclasses import dataclass
from importlib.resources import files as resources
from pathlib import Path

from platformdirs import user_cache_path
from pydantic import TypeAdapter

from coterie.errors import UsageError
from coterie.settings import chosen

VARIABLE = "COTERIE_DATA"


@dataclass(frozen=True)
class File:
    """A file by its public name, below the data set's folder."""

    name: str
    size: int
    digest: str  # algorithm:hexadecimal
    urls: tuple[str, ...] = ()  # of the file, plain or gzipped


@dataclass(frozen=True)
class Known:
    """A data set: a title, the number of classes, the licence and its files (none where it is built in)."""

    name: str
    title: str
    classes: int
    licence: str
    files: tuple[File, ...] = ()
    archive: File | None = None  # where the files come in one piece, its digest is that of the archive itself


_TABLES = tomllib.loads((resources("coterie.problems.data") / "sets.toml").read_text(encoding="utf-8"))
KNOWN = TypeAdapter(tuple[Known, ...]).validate_python([{"name": name, **table} for name, table in _TABLES.items()])


def known(name: str) -> Known:
    """The data set of that name; an unknown one is an error that lists the nearest."""
    return chosen("data set", name, {entry.name: entry for entry in KNOWN})


def places() -> list[Path]:
    """The folders that hold one folder per data set, in the order in which they are searched."""
    given = os.environ.get(VARIABLE, "")
    return [*([Path(given).expanduser()] if given else []), user_cache_path("coterie")]


def present(folder: Path, files: tuple[File, ...]) -> dict[str, Path]:
    """The files that exist, by name: plain or gzipped, in their subfolder or straight in the folder."""
    found = {}
    for file in files:
        bare = file.name.rpartition("/")[2]
        candidates = [folder / (name + end) for name in (file.name, bare) for end in ("", ".gz")]
        path = next((path for path in candidates if os.path.isfile(path)), None)  # unlike Path's, it never raises
        if path is not None:
            found[file.name] = path
    return found


def complete(entry: Known) -> dict[str, Path] | None:
    """The files of a data set in the first folder that has them all."""
    candidates = (present(folder / entry.name, entry.files) for folder in places())
    return next((found for found in candidates if found and len(found) == len(entry.files)), None)


def locate(name: str) -> dict[str, Path]:
    """The files of a data set, or an error that lists the folders searched and how to get the files."""
    entry = known(name)
    found = complete(entry)
    if found is None:
        raise UsageError(_missing(entry))
    return found


def _missing(entry: Known) -> str:
    folders = [folder / entry.name for folder in places()]
    searched = "; ".join(f"{folder} ({_state(folder, entry)})" for folder in folders)
    files = ", ".join(file.name for file in entry.files)
    return (
        f"data set {entry.name} was not found. Looked in: {searched}. Get it with `coterie data get {entry.name}`, or "
        f"put {files} (plain or .gz) into {folders[0]}; ${VARIABLE} sets another folder."
    )


def _state(folder: Path, entry: Known) -> str:
    """Why a folder will not do."""
    found = present(folder, entry.files)
    absent = ", ".join(file.name for file in entry.files if file.name not in found)
    return f"without {absent}" if found else "nothing there"
