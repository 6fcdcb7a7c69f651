"""Invitations: what a partner needs to take part in a study, in one file that is data and nothing else.

An invitation carries the terms of the study, the coordinator's address and the partner's own keys. Whoever has the file
can take part in the partner's place: send it over a channel that both sides trust, to one partner only.
"""

import base64
import io
import os
import secrets
import tomllib
import zipfile
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import tomli_w

from coterie import __version__
from coterie.errors import UsageError
from coterie.problems.sites.terms import Terms

VALID_DAYS = 30
LARGEST = 8 << 20  # bytes of an invitation
ENGINES = ("flower", "nvflare")


@dataclass(frozen=True)
class Invitation:
    """One partner's invitation to a study.

    Args:
        id: a random word that names it.
        study: the name of the study.
        site: the name of the partner's site.
        engine: flower or nvflare.
        address: host:port of the coordinator, which the site dials.
        expires: until when the invitation can be joined with.
        version: coterie's version at the coordinator.
        terms: the terms of the study.
        files: certificates and keys by their names, as the engine wants them.
    """

    study: str
    site: str
    engine: str
    address: str
    expires: datetime
    terms: Terms
    files: dict[str, bytes] = field(repr=False)
    version: str = __version__
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def write(self, path: Path) -> Path:
        """Write the file so that only its owner can read it."""
        about = {
            "id": self.id,
            "study": self.study,
            "site": self.site,
            "engine": self.engine,
            "address": self.address,
            "expires": self.expires,
            "version": self.version,
        }
        data = tomli_w.dumps({"invitation": about, "terms": self.terms.as_dict(), "keys": {"kit": _packed(self.files)}})
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(HEADER + data)
        return path

    @staticmethod
    def read(path: Path) -> "Invitation":
        """The invitation in a file, checked: it comes from elsewhere."""
        try:
            if path.stat().st_size > LARGEST:
                raise UsageError(f"{path} is too large for an invitation.")
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
            about = tables["invitation"]
            texts = {key: about[key] for key in ("study", "site", "engine", "address", "version", "id")}
            if not all(isinstance(value, str) for value in texts.values()) or not isinstance(
                about["expires"], datetime
            ):
                raise ValueError("a value has a wrong type")
            check_name(texts["site"], "site")
            check_name(texts["study"], "study")
            if texts["engine"] not in ENGINES:
                raise ValueError(f"there is no engine {texts['engine'][:40]!r}")
            return Invitation(
                expires=about["expires"],
                terms=Terms.from_dict(tables["terms"]),
                files=_unpacked(tables["keys"]["kit"]),
                **texts,
            )
        except FileNotFoundError:
            raise UsageError(f"there is no invitation {path}; ask the coordinator for one.") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path} is no invitation, or it is damaged ({type(error).__name__}: {error}); ask the coordinator for "
                "another one."
            ) from None

    def check_date(self, now: datetime | None = None) -> None:
        """Refuse an invitation that has expired."""
        if (now or datetime.now(UTC)) > self.expires:
            raise UsageError(
                f"the invitation of {self.site} to {self.study} expired on {self.expires:%Y-%m-%d %H:%M} UTC; ask the "
                f"coordinator for another one: coterie study invite {self.study} --partners {self.site}."
            )

    def check_version(self) -> None:
        """Refuse an invitation of another version of coterie."""
        if self.version != __version__:
            raise UsageError(
                f"the invitation was made by coterie {self.version[:40]}, and this site has {__version__}; install "
                f"the same one: pip install 'coterie[{self.engine}]=={self.version[:40]}'. If the coordinator has "
                f"{__version__} by now, ask for another invitation."
            )


def dates_of(path: Path) -> tuple[datetime, datetime]:
    """From when to when a certificate (PEM) is valid."""
    from cryptography import x509  # both engines of studies have it

    found = x509.load_pem_x509_certificate(path.read_bytes())
    return found.not_valid_before_utc, found.not_valid_after_utc


def certificates_of(kit: Path) -> list[Path]:
    """The certificates in a site's kit: its own, where it has one, and that of the study's authority."""
    names = ("startup/client.crt", "client.crt", "startup/rootCA.pem", "rootCA.pem")
    return [kit / name for name in names if (kit / name).is_file()]


def check_certificates(kit: Path) -> None:
    """Refuse a site's kit whose certificates are not valid now."""
    now = datetime.now(UTC)
    for path in certificates_of(kit):
        begin, end = dates_of(path)
        if now > end:
            raise UsageError(
                f"the certificate {path.name} expired on {end:%Y-%m-%d}; ask the coordinator for another invitation."
            )
        if now < begin:
            raise UsageError(
                f"the certificate {path.name} is not valid before {begin:%Y-%m-%d %H:%M} UTC; set the clock of this "
                "machine by NTP."
            )


def expiry(days: float = VALID_DAYS) -> datetime:
    """So many days from now."""
    return (datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0)


def check_name(name: str, what: str) -> None:
    """Names of studies and sites become folders, certificates and keys."""
    fine = name.isascii() and 0 < len(name) <= 40 and all(c.isalnum() or c in "-_" for c in name)
    if not fine or not name[0].isalpha() or name != name.lower():
        raise UsageError(
            f"{name[:60]!r} is no name of a {what}: take at most 40 lower-case letters, digits, - and _, a "
            "letter first."
        )


def _packed(files: dict[str, bytes]) -> str:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), data)
    return base64.b64encode(buffer.getvalue()).decode()


def _unpacked(text: Any) -> dict[str, bytes]:
    if not isinstance(text, str):
        raise ValueError("keys.kit is no text")
    found = {}
    try:
        with zipfile.ZipFile(io.BytesIO(base64.b64decode(text, validate=True))) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > LARGEST:
                raise ValueError("keys.kit is too large")
            for entry in archive.infolist():
                parts = Path(entry.filename).parts
                if not parts or ".." in parts or Path(entry.filename).is_absolute() or entry.is_dir():
                    raise ValueError("keys.kit names a file outside of its folder")
                found[entry.filename] = archive.read(entry)
    except zipfile.BadZipFile as error:
        raise ValueError(f"keys.kit: {error}") from None
    return found


def write_private(folder: Path, files: dict[str, bytes]) -> None:
    """Write files that only their owner can read, into a folder that only its owner can enter."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)


HEADER = """\
# An invitation to a study of coterie. It holds private keys: keep it to yourself.
# Look at it with: coterie site check YOUR-FILE --invitation THIS-FILE

"""
