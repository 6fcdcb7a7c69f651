"""`coterie doctor`: the usual faults of a study or a site, found in one go: version, time, certificate, port, disk."""

import shutil
import socket
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from coterie import __version__
from coterie.errors import UsageError
from coterie.problems.sites.folder import Study
from coterie.problems.sites.holding import same_version
from coterie.study.coordinator import PACKAGES, last_agreement
from coterie.study.home import KIT, Home, read_settings
from coterie.study.invitation import Invitation
from coterie.study.site import check

DISK = 1 << 30  # bytes that should be free
CLOCK = 60.0  # seconds that clocks may differ
SOON = 14  # days before a certificate's end that are worth a word


class Finding(NamedTuple):
    """One thing that was looked at: whether it is fine, what was seen, and the remedy."""

    what: str
    fine: bool
    seen: str
    remedy: str = ""


def of_study(study: Study) -> list[Finding]:
    """Look at a study at its coordinator."""
    found = [*_installed(study.engine), _disk(study.folder), _data(study.data)]
    found += [_certificate(path) for path in sorted(study.folder.rglob("rootCA.pem"))[-1:]]
    found += [_certificate(path) for path in sorted(study.folder.rglob("server.crt"))[-1:]]
    serve = f"coterie study serve {study.folder}"
    found.append(_port(study.host, study.ports[0], f"Start it with: {serve}. Is the port open in the firewall?"))
    agreement = last_agreement(study)
    for site in () if agreement is None else agreement.sites:
        apart = abs(site.clock) > CLOCK
        found.append(
            Finding(
                f"clock of {site.name}", not apart, f"{site.clock:+.1f} s", "Set both clocks by NTP." if apart else ""
            )
        )
    return found


def of_site(home: Home) -> list[Finding]:
    """Look at a site at its partner."""
    invitation, settings = home.invitation, home.settings()
    found = [*_installed(invitation.engine), _version(invitation), _disk(home.folder), _data(Path(settings["data"]))]
    kit = home.folder / KIT
    found += [
        _certificate(path)
        for name in ("client.crt", "rootCA.pem")
        for path in (kit / "startup" / name, kit / name)
        if path.is_file()
    ]
    host, _, port = invitation.address.rpartition(":")
    remedy = "Is the coordinator's server up, and may this machine dial out to that port?"
    found.append(_port(host, int(port), remedy))
    policy = Path(settings["policy"]) if settings.get("policy") else None
    try:
        read_settings(policy)
        checked = check(Path(settings["data"]), invitation, policy)
        kinds = checked.found.public or checked.refusal or f"{checked.found.rows} rows fit the study"
        found.append(Finding("your file", checked.fits, kinds, "" if checked.fits else "See: coterie site check."))
    except UsageError as error:
        found.append(Finding("your settings", False, str(error), "Correct the file."))
    mode = home.folder.stat().st_mode & 0o077
    found.append(Finding("private folder", not mode, str(home.folder), f"chmod 700 {home.folder}" if mode else ""))
    return found


def of_machine() -> list[Finding]:
    """Look at this machine alone."""
    found = [Finding("coterie", True, __version__), _disk(Path.cwd())]
    for engine, package in PACKAGES.items():
        try:
            found.append(Finding(package, True, version(package)))
        except PackageNotFoundError:
            found.append(
                Finding(package, True, f"not installed; studies on {engine} need: pip install 'coterie[{engine}]'")
            )
    return found


def _installed(engine: str) -> list[Finding]:
    package = PACKAGES.get(engine)
    if package is None:
        return [Finding("coterie", True, __version__)]
    try:
        return [Finding("coterie", True, __version__), Finding(package, True, version(package))]
    except PackageNotFoundError:
        return [Finding(package, False, "not installed", f"pip install 'coterie[{engine}]'")]


def _version(invitation: Invitation) -> Finding:
    reason = same_version(invitation.version)
    remedy = "" if reason is None else f"pip install 'coterie[{invitation.engine}]=={invitation.version}'"
    return Finding("version of the coordinator", reason is None, invitation.version, remedy)


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder if folder.exists() else Path.cwd()).free
    return Finding("disk", free > DISK, f"{free / (1 << 30):.1f} GiB free", "" if free > DISK else "Free some space.")


def _data(path: Path) -> Finding:
    fine = path.exists()
    return Finding("data", fine, str(path), "" if fine else "The file is gone; name it again when you join.")


def _port(host: str, port: int, remedy: str) -> Finding:
    try:
        with socket.create_connection((host, port), 5.0):
            return Finding("port", True, f"{host}:{port} answers")
    except OSError as error:
        return Finding("port", False, f"{host}:{port}: {error.strerror or error}", remedy)


def _certificate(path: Path) -> Finding:
    begin, end = dates_of(path)
    now, days = datetime.now(UTC), (end - datetime.now(UTC)).days
    seen = f"{path.name}: {begin:%Y-%m-%d} to {end:%Y-%m-%d}"
    if now < begin:
        return Finding("certificate", False, seen, "It is not valid yet: set the clock of this machine by NTP.")
    if now > end:
        return Finding("certificate", False, seen, "It has expired: ask for, or make, another invitation.")
    return Finding("certificate", True, seen, f"It ends in {days} days." if days < SOON else "")


def dates_of(path: Path) -> tuple[datetime, datetime]:
    """From when to when a certificate (PEM) is valid."""
    from cryptography import x509  # both engines of studies have it

    found = x509.load_pem_x509_certificate(path.read_bytes())
    return found.not_valid_before_utc, found.not_valid_after_utc
