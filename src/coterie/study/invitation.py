"""Invitations: what a partner needs to take part in a study, in one file that is data and nothing else.

An invitation carries the terms of the study, the coordinator's address and the partner's own keys. Whoever has the file
can take part in the partner's place: send it over a channel that both sides trust, to one partner only.
"""

import base64
import io
import re
import secrets
import tomllib
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w

from coterie import __version__
from coterie.errors import UsageError, clean, gist
from coterie.problems.sites.terms import Terms
from coterie.storage import make_folder, write_atomically

VALID_DAYS = 30
LARGEST = 8 << 20  # bytes of an invitation
ENGINES = ("nvflare",)
PART = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,100}")  # of the path of a file in a kit: no backslash, no drive, no ..


@dataclass(frozen=True)
class Invitation:
    """One partner's invitation to a study.

    Args:
        id: a random word that names it.
        study: the name of the study.
        site: the name of the partner's site.
        engine: nvflare.
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
        make_folder(path.parent)
        write_atomically(path, (HEADER + data).encode(), 0o600)
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
            if about["expires"].tzinfo is None:
                raise ValueError("expires has no time zone")
            if any(clean(value) != value for value in texts.values()):
                raise ValueError("a value is too long or holds characters that are no text")
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
        except (OSError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"{path} is no invitation, or it is damaged ({gist(error)}); ask the coordinator for another one."
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
    from cryptography import x509  # nvflare brings it

    found = x509.load_pem_x509_certificate(path.read_bytes())
    return found.not_valid_before_utc, found.not_valid_after_utc


def certificates_of(kit: Path) -> list[Path]:
    """The certificates in a site's kit: its own, where it has one, and that of the study's authority."""
    found = [kit / "startup" / name for name in ("client.crt", "rootCA.pem")]
    return [path for path in found if path.is_file()]


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
    try:
        with zipfile.ZipFile(io.BytesIO(base64.b64decode(text, validate=True))) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > LARGEST:
                raise ValueError("keys.kit is too large")
            check_kit([entry.filename for entry in entries])
            return {entry.filename: archive.read(entry) for entry in entries}
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # also: encrypted, packed in another way
        raise ValueError(f"keys.kit: {error}") from None


def check_kit(names: Sequence[str]) -> None:
    """Refuse names of files that are outside of their folder, or that are one file on some system.

    Args:
        names: with / between folders.
    """
    for name in names:
        if not all(PART.fullmatch(part) for part in name.split("/")):
            raise ValueError(f"keys.kit names {clean(name, 60)!r}, a file outside of its folder or no plain name")
    plain = sorted(name.lower() for name in names)
    for name, after in pairwise(plain):
        if name == after:
            raise ValueError(f"keys.kit names {name!r} twice")
    if inside := {str(above) for name in plain for above in PurePosixPath(name).parents} & {*plain}:
        raise ValueError(f"keys.kit names {min(inside)!r} as a file and as a folder")


def write_private(folder: Path, files: dict[str, bytes]) -> None:
    """Write files that only their owner can read, into a folder that only its owner can enter."""
    check_kit(list(files))
    _private_folder(folder)
    for name, data in files.items():
        path = folder / name
        _private_folder(path.parent)
        write_atomically(path, data, 0o600)


def _private_folder(path: Path) -> None:
    make_folder(path)
    path.chmod(0o700)


HEADER = """\
# An invitation to a study of coterie. It holds private keys: keep it to yourself.
# Look at it with: coterie site check YOUR-FILE --invitation THIS-FILE

"""
