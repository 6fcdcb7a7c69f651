"""`coterie doctor`: the usual faults of a study or a site, found in one go: version, time, certificate, port, disk."""

import shutil
import socket
import ssl
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from coterie import __version__
from coterie.errors import UsageError
from coterie.problems.sites.folder import Study
from coterie.problems.sites.holding import same_version
from coterie.problems.sites.terms import own_tables
from coterie.study.coordinator import NETWORK, last_agreement
from coterie.study.home import KIT, Home, read_settings
from coterie.study.invitation import Invitation, certificates_of, dates_of
from coterie.study.site import check

PATIENCE = 5.0  # seconds to wait for an answer
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
    found = [*_installed(study.engine), _disk(study.folder), _data(study.data), *_own_file(study)]
    roots = sorted(study.folder.rglob("rootCA.pem"))[-1:]
    found += [_certificate(path) for path in (*roots, *sorted(study.folder.rglob("server.crt"))[-1:])]
    serve = f"coterie study serve {study.folder}"
    for port in study.ports:
        remedy = f"Start it with: {serve}. Is the port open in the firewall?"
        found.append(_port(study.host, port, remedy, roots[0] if roots else None))
    agreement = last_agreement(study)
    if agreement is None:
        return found
    for site in agreement.sites:
        apart = abs(site.clock) > CLOCK
        remedy = "Set both clocks by NTP." if apart else ""
        found.append(Finding(f"clock of {site.name}", not apart, f"{site.clock:+.1f} s", remedy))
    for name, reason in agreement.left_out.items():
        if name in study.sites:
            remedy = f"Look there with: coterie doctor. If it has left: coterie study remove {study.folder}"
            found.append(Finding(f"site {name}", False, reason, f"{remedy} --partners {name}."))
    return found


def _own_file(study: Study) -> list[Finding]:
    """Whether the coordinator's file still has the form that its partners were told."""
    if not study.data.exists():
        return []
    try:
        rows = own_tables(study.data, study.terms).holders[0].rows
        return [Finding("your file", True, f"{rows} rows fit the study")]
    except UsageError as error:
        remedy = "Restore the file, or make the study anew: partners were told other columns."
        return [Finding("your file", False, str(error), remedy)]


def of_site(home: Home) -> list[Finding]:
    """Look at a site at its partner."""
    invitation, settings = home.invitation, home.settings()
    found = [*_installed(invitation.engine), _version(invitation), _disk(home.folder), _data(Path(settings["data"]))]
    if (changed := home.changed()) is not None:
        found.append(Finding("data", True, changed))
    kit = home.folder / KIT
    found += [_certificate(path) for path in certificates_of(kit)]
    host, _, port = invitation.address.rpartition(":")
    remedy = "Is the coordinator's server up, and may this machine dial out to that port?"
    roots = [path for path in certificates_of(kit) if path.name == "rootCA.pem"]
    found.append(_port(host, int(port), remedy, roots[0] if roots else None))
    policy = Path(settings["policy"]) if settings.get("policy") else None
    try:
        read_settings(policy)
        checked = check(Path(settings["data"]), invitation, policy)
        kinds = checked.found.public or checked.refusal or f"{checked.found.rows} rows fit the study"
        remedies = [fault.remedy for fault in checked.found.faults] or ["Change your policy, or leave the study."]
        found.append(Finding("your file", checked.fits, kinds, "" if checked.fits else " ".join(remedies)))
    except UsageError as error:
        found.append(Finding("your settings", False, str(error), "Correct the file."))
    mode = home.folder.stat().st_mode & 0o077
    found.append(Finding("private folder", not mode, str(home.folder), f"chmod 700 {home.folder}" if mode else ""))
    return found


def of_machine() -> list[Finding]:
    """Look at this machine alone."""
    found = [Finding("coterie", True, __version__), _disk(Path.cwd())]
    try:
        found.append(Finding(NETWORK, True, version(NETWORK)))
    except PackageNotFoundError:
        found.append(Finding(NETWORK, True, f"not installed; live studies need: pip install 'coterie[{NETWORK}]'"))
    return found


def _installed(engine: str) -> list[Finding]:
    own = Finding("coterie", True, __version__)
    if engine != NETWORK:
        return [own]
    try:
        return [own, Finding(NETWORK, True, version(NETWORK))]
    except PackageNotFoundError:
        return [Finding(NETWORK, False, "not installed", f"pip install 'coterie[{NETWORK}]'")]


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


def _port(host: str, port: int, remedy: str, authority: Path | None = None) -> Finding:
    """Whether the coordinator's server answers: it has a certificate of the study's authority."""
    address = f"{host}:{port}"
    try:
        line = socket.create_connection((host, port), PATIENCE)
    except OSError as error:
        return Finding("port", False, f"{address}: {error.strerror or error}", remedy)
    with line:
        try:
            if authority is not None:
                _greeted(line, authority)
            return Finding("port", True, f"{address} answers")
        except OSError:  # no TLS, or another certificate
            other = "Another program has the port, or the server of another study: end it, or choose another --port."
            return Finding("port", False, f"{address} answers, but not as this study's server", other)


def _greeted(line: socket.socket, authority: Path) -> None:
    """Compare the certificate of whoever answers with the study's authority."""
    context = ssl.create_default_context(cafile=str(authority))
    context.check_hostname = False  # the address may be that of a tunnel
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # authorities of engines leave optional fields out
    context.wrap_socket(line).close()


def _certificate(path: Path) -> Finding:
    begin, end = dates_of(path)
    now, days = datetime.now(UTC), (end - datetime.now(UTC)).days
    seen = f"{path.name}: {begin:%Y-%m-%d} to {end:%Y-%m-%d}"
    if now < begin:
        return Finding("certificate", False, seen, "It is not valid yet: set the clock of this machine by NTP.")
    if now > end:
        return Finding("certificate", False, seen, "It has expired: ask for, or make, another invitation.")
    return Finding("certificate", True, seen, f"It ends in {days} days." if days < SOON else "")
