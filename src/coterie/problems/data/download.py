"""Fetching public files: verified before they get their names, so a broken transfer leaves nothing that looks whole."""

import hashlib
import os
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from shutil import copyfileobj
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from coterie.errors import RunError, UsageError
from coterie.problems.data.files import BLOCK, blocks, is_gzip, raw_blocks
from coterie.problems.data.sets import File

Progress = Callable[[str, int, int], None]  # file, bytes so far, bytes expected (0: not known)
PATIENCE = 30.0  # seconds without a byte


class _Undelivered(Exception):
    """One source failed; another may not."""


def fault(file: File, content: Iterable[bytes]) -> str | None:
    """What is wrong with a file's content, if anything; reading stops where it is already too long."""
    algorithm, _, expected = file.digest.partition(":")
    digest, size = hashlib.new(algorithm, usedforsecurity=False), 0
    for block in content:
        digest.update(block)
        size += len(block)
        if size > file.size:
            return f"it holds more than the published {file.size:,} bytes"
    if size != file.size:
        return f"it holds {size:,} bytes, published are {file.size:,}"
    if digest.hexdigest() != expected:
        return f"its {algorithm} is {digest.hexdigest()}, published is {expected}"
    return None


def download(file: File, folder: Path, progress: Progress | None) -> Path:
    """One file, from the first of its sources that has it unchanged; stored as it came, plain or gzipped."""
    with _fetched(file, folder, progress, blocks) as part:
        path = folder / (file.name + (".gz" if is_gzip(part) else ""))
        os.replace(part, path)
    return path


def download_archive(archive: File, wanted: list[File], folder: Path, progress: Progress | None) -> None:
    """The wanted files, out of an archive that is not kept."""
    try:
        with _fetched(archive, folder, progress, raw_blocks) as part, tarfile.open(part) as tar:
            for file in wanted:
                _extract(tar, file, folder)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise RunError(f"{archive.name} arrived whole but cannot be unpacked: {error}. Report this.") from None


def _extract(tar: tarfile.TarFile, file: File, folder: Path) -> None:
    """One member by its known name; paths that an archive might bring along are never used."""
    source = next((tar.extractfile(member) for member in tar if member.name == file.name and member.isfile()), None)
    if source is None:
        raise RunError(
            f"the archive holds no {file.name}; the source has changed. Put the file into {folder} yourself."
        )
    path = folder / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with _unverified(path) as part:
        with part.open("wb") as out:
            copyfileobj(source, out, BLOCK)
        wrong = fault(file, raw_blocks(part))
        if wrong is not None:
            raise RunError(f"{file.name} in the archive is not the published one: {wrong}.")
        os.replace(part, path)


@contextmanager
def _unverified(path: Path) -> Iterator[Path]:
    """A name beside a place, so that the rename is atomic; what has not been renamed by the end is removed."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _fetched(
    file: File, folder: Path, progress: Progress | None, reader: Callable[[Path], Iterable[bytes]]
) -> Iterator[Path]:
    """A verified file under a temporary name; no source at all is an error that says what each of them said."""
    failures = []
    with _unverified(folder / file.name) as part:
        for url in file.urls:
            try:
                _receive(url, part, file, progress)
                wrong = fault(file, reader(part))
            except (_Undelivered, UsageError) as error:
                wrong = str(error)
            if wrong is None:
                yield part
                return
            failures.append(f"{url}: {wrong}")
    raise RunError(
        f"{file.name} could not be fetched ({'; '.join(failures)}). Check the network (a proxy is taken from "
        f"$HTTPS_PROXY), or get the file elsewhere and put it into {folder}."
    )


def _receive(url: str, part: Path, file: File, progress: Progress | None) -> None:
    """Copy what an address sends, never more than the file can be."""
    done = 0
    try:
        with (
            urlopen(Request(url, headers={"User-Agent": "coterie"}), timeout=PATIENCE) as answer,
            part.open("wb") as out,
        ):
            expected = int(answer.headers.get("Content-Length") or 0)
            while block := answer.read(BLOCK):
                done += out.write(block)
                if progress is not None:
                    progress(file.name, done, expected)
                if done > file.size:
                    raise _Undelivered(f"it sends more than {file.size:,} bytes")
    except HTTPError as error:
        raise _Undelivered(f"HTTP {error.code} {error.reason}") from None
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, OSError) and error.filename is not None:  # the disk, not the network
            raise
        raise _Undelivered(str(getattr(error, "reason", error)) or type(error).__name__) from None
    if expected and done != expected:
        raise _Undelivered(f"the transfer broke off after {done:,} of {expected:,} bytes")
