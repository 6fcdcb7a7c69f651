"""Faults of the files: collected first, reported all at once."""

from collections.abc import Sequence
from typing import NamedTuple

from coterie.errors import UsageError


class Finding(NamedTuple):
    """One thing that is wrong, in which file, and what to do about it."""

    file: str
    what: str
    remedy: str = ""


class BadFiles(UsageError):
    """All findings as a table: one line per file and fault, then the remedies, each once."""

    def __init__(self, findings: Sequence[Finding], files: int) -> None:
        self.findings = tuple(findings)
        width = max(len(one.file) for one in findings)
        lines = [f"  {one.file:{width}}  {one.what}" for one in findings]
        remedies = dict.fromkeys(one.remedy for one in findings if one.remedy)
        faults = f"{len(findings)} {'fault' if len(findings) == 1 else 'faults'}"
        head = f"{faults} found in {files} {'file' if files == 1 else 'files'}; nothing was trained."
        super().__init__("\n".join([head, *lines, *(f"Remedy: {one}" for one in remedies)]))


class Findings:
    """A list that grows while files are read."""

    def __init__(self) -> None:
        self.found: list[Finding] = []

    def add(self, file: str, what: str, remedy: str = "") -> None:
        """One more."""
        self.found.append(Finding(file, what, remedy))

    def settle(self, files: int) -> None:
        """Refuse to go on if anything was found."""
        if self.found:
            raise BadFiles(self.found, files)
