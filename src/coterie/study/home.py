"""A site's home: the folder at a partner that keeps its invitation, its settings, its journal and what it received.

Nothing in it is ever sent. A job finds it by the variable COTERIE_SITE, which the site's own process sets.
"""

import json
import os
import secrets
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from platformdirs import user_state_path

from coterie.errors import UsageError
from coterie.federation.remote import NodePolicy, Record
from coterie.problems.sites.holding import HOME, INSTANCE, Choices
from coterie.problems.sites.terms import Terms
from coterie.storage import append_line, write_atomically
from coterie.study.invitation import Invitation

INVITATION, SETTINGS, JOURNAL, RECEIVED, KIT, MEMORY = (
    "invitation.toml",
    "site.json",
    "journal.jsonl",
    "received",
    "kit",
    "memory",
)
STAGES = ("agree", "train")
Protection = Literal["trust", "sums", "noise"]
PROTECTIONS: dict[Protection, str] = {
    "trust": """
# The partners trust the coordinator: from enough answers it can compute single rows.
least_batch = 16
""",
    "sums": """
# Training leaves a site in sums over several sites, and in few single numbers. Runs need:
#   coterie run --study STUDY --set federation.secure=true --set method.solver=lagged
secure = true
reveal = 1          # single numbers of this site per round
reveal_total = 0    # and over all runs; 0: fewer than the model has parameters
magnitude = 100.0   # parameters beyond this are refused: steep models single rows out
least_batch = 16
""",
    "noise": """
# Every answer in training has noise, and all runs together one budget. Runs need:
#   coterie run --study STUDY --set privacy.clip=1.0 --set privacy.noise=10.0
epsilon = 3.0
delta = 1e-5
least_batch = 16
""",
}
"""What `study new` writes for partners by what protects them from a curious coordinator."""


@dataclass(frozen=True)
class SitePolicy:
    """What a site lets a study do, beside the limits of every node (`NodePolicy`).

    Args:
        node: limits of single orders.
        columns: patterns of the columns of the study that may be used.
        least_rows: fewest rows with which this site takes part.
        stages: what the coordinator may start: "agree" (scales and categories) and "train".
        models: patterns of the names of networks that may be trained.
        receive: whether this site takes a model that the coordinator sends.
        shares_memory: whether the coordinator may ask for models that this site remembers.
    """

    node: NodePolicy = field(default_factory=NodePolicy)
    columns: tuple[str, ...] = ("*",)
    least_rows: int = 1
    stages: tuple[str, ...] = STAGES
    models: tuple[str, ...] = ("*",)
    receive: bool = True
    shares_memory: bool = False

    @staticmethod
    def of(values: Mapping[str, Any]) -> "SitePolicy":
        """The policy in a table of TOML; keys of `NodePolicy` stand beside those of a site."""
        own = {f.name: f.default for f in fields(SitePolicy) if f.name != "node"}
        node = NodePolicy.of({key: value for key, value in values.items() if key not in own})
        found: dict[str, Any] = {}
        for key, value in values.items():
            if key in ("columns", "stages", "models"):
                if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                    raise UsageError(f'policy.{key} must be a list of texts, such as ["*"].')
                found[key] = tuple(value)
            elif key in own:
                if type(value) is not type(own[key]):
                    raise UsageError(f"policy.{key} must be a {type(own[key]).__name__}, not {value!r}.")
                found[key] = value
        if strange := sorted(set(found.get("stages", ())) - set(STAGES)):
            raise UsageError(f"policy.stages has no {strange[0]!r}; it is a list of {' and '.join(STAGES)}.")
        return SitePolicy(node, **found)

    def refusal(self, terms: Terms, rows: int) -> str | None:
        """Why this site does not take part under these terms with so many rows; None where it does."""
        used = (*terms.form.features, terms.label)
        barred = [name for name in used if not any(fnmatchcase(name, pattern) for pattern in self.columns)]
        if barred:
            return f"policy.columns does not admit {', '.join(map(repr, barred))}"
        if rows < self.least_rows:
            return f"policy.least_rows = {self.least_rows} asks for more rows than the {rows} of the file"
        return None


def suggested(protection: Protection) -> str:
    """A site's settings for such a study: the text of a TOML file."""
    first = "# Settings of a site, for: coterie site join --policy site.toml. Every partner decides on them.\n[policy]"
    return first + PROTECTIONS[protection]


def read_settings(path: Path | None) -> tuple[SitePolicy, Choices]:
    """The tables [policy] and [data] of a site's TOML file; defaults without a file."""
    if path is None:
        return SitePolicy(), Choices()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the site's settings {path} cannot be read: {error}.") from None
    if strange := sorted(tables.keys() - {"policy", "data"}):
        raise UsageError(f"{path}: there is no table [{strange[0]}]; the tables are [policy] and [data].")
    try:
        return SitePolicy.of(tables.get("policy", {})), Choices.of(tables.get("data", {}))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Home:
    """The folder of one site."""

    folder: Path

    @staticmethod
    def of(invitation: Invitation, folder: Path | None = None) -> "Home":
        """The home of an invitation: a folder that was named, or one below the user's state directory."""
        return Home(folder or sites_folder() / f"{invitation.study}-{invitation.site}")

    @staticmethod
    def find(folder: Path | None = None) -> "Home":
        """The home that was named, the one of this process, or the only one there is."""
        named = folder or (Path(os.environ[HOME]) if os.environ.get(HOME) else None)
        if named is not None:
            if not (named / INVITATION).is_file():
                raise UsageError(f"{named} is no site; join one with: coterie site join --invitation FILE --data FILE.")
            return Home(named)
        found = sorted(path.parent for path in sites_folder().glob(f"*/{INVITATION}"))
        if len(found) != 1:
            listed = ", ".join(str(path) for path in found) or "none"
            raise UsageError(f"name the site with --home: there are {len(found)} on this machine ({listed}).")
        return Home(found[0])

    @property
    def is_joined(self) -> bool:
        """Whether a site has joined here."""
        return (self.folder / SETTINGS).is_file()

    @property
    def invitation(self) -> Invitation:
        """The invitation that this site joined with; its terms hold, whatever a job says."""
        return Invitation.read(self.folder / INVITATION)

    def settings(self) -> dict[str, Any]:
        """Where the data and the site's own settings are."""
        try:
            found: dict[str, Any] = json.loads((self.folder / SETTINGS).read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.folder / SETTINGS} cannot be read ({error}); join the study again.") from None

    def join(self, invitation: Invitation, data: Path, policy: Path | None) -> None:
        """Keep the invitation, and where the data and the settings are."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.chmod(0o700)
        before = self.folder / INVITATION
        if before.is_file() and Invitation.read(before).id != invitation.id:
            raise UsageError(
                f"{self.folder} belongs to another invitation to {invitation.study}; choose another folder with "
                "--home, or remove it."
            )
        invitation.write(before)
        settings = {"data": str(data.resolve()), "policy": str(policy.resolve()) if policy else None}
        settings["state"] = _state_of(data)
        write_atomically(self.folder / SETTINGS, json.dumps(settings).encode())
        if not (self.folder / INSTANCE).is_file():
            write_atomically(self.folder / INSTANCE, str(secrets.randbits(62)).encode())

    def changed(self) -> str | None:
        """That the file has changed since this site joined; None where it has not."""
        found = self.settings()
        now = _state_of(Path(found["data"]))
        if now is None or found.get("state") in (None, now):
            return None
        return "the file has changed since this site joined; the next handshake uses it as it is now"

    def note(self, record: Record) -> None:
        """Add an order to the journal, whole or not at all."""
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **record._asdict()}
        append_line(self.folder / JOURNAL, json.dumps(line))

    def journal(self) -> Iterator[dict[str, Any]]:
        """All orders so far; a line that was torn, say by a crash, stands for an order that is not known."""
        path = self.folder / JOURNAL
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            for number, line in enumerate(lines, 1):
                yield _entry(line) or {
                    **dict.fromkeys(ENTRY, ""),
                    "cause": f"(line {number} of the journal is damaged)",
                    "received": 0,
                    "sent": 0,
                    "outcome": "unknown",
                }


ENTRY = ("time", *Record._fields)


def _entry(line: str) -> dict[str, Any] | None:
    """An order of the journal; None where the line is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    sound = isinstance(found, dict) and all(key in found for key in ENTRY)
    return found if sound and type(found["received"]) is type(found["sent"]) is int else None


def _state_of(path: Path) -> str | None:
    """Size and time of a file; None where it does not exist."""
    if not path.exists():
        return None
    about = path.stat()
    return f"{about.st_size} bytes, {about.st_mtime_ns}"


def sites_folder() -> Path:
    """Where the homes of this user's sites are."""
    return Path(user_state_path("coterie")) / "sites"


def totals(home: Home) -> list[dict[str, Any]]:
    """What left a site, by run and cause: orders, bytes received and sent, and how many orders were refused."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in home.journal():
        key = (line["run"], line["cause"])
        row = found.setdefault(
            key, {"run": key[0], "cause": key[1], "orders": 0, "received": 0, "sent": 0, "refused": 0, "last": ""}
        )
        row["orders"] += 1
        row["received"] += line["received"]
        row["sent"] += line["sent"]
        row["refused"] += line["outcome"] not in ("done", "repeated")
        row["last"] = line["time"]
    return list(found.values())
