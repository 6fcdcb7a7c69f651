"""Certificates and invitations of yesterday: refused with a remedy by `site join`, `study serve` and `doctor`."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hospitals import hospitals

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.errors import RunError, UsageError
from coterie.problems.sites.folder import Study
from coterie.problems.sites.terms import terms_of
from coterie.study import coordinator, doctor, site
from coterie.study.home import Home
from coterie.study.invitation import Invitation, write_private


def certificate(days: int) -> bytes:
    """A certificate that ends so many days from now."""
    key, end = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC) + timedelta(days)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "study")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = builder.not_valid_before(end - timedelta(365)).not_valid_after(end).sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM)


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Study, Invitation, Path]:
    """A study whose certificates ended a year ago."""
    old = certificate(-365)
    network = SimpleNamespace(
        FOLDER="flare",
        provision=lambda study: write_private(study.folder / "flare", {"server.crt": old, "rootCA.pem": old}),
        kit_of=lambda study, site: {"startup/rootCA.pem": old},
    )
    monkeypatch.setattr(coordinator, "network", lambda engine: network)
    mine, files = hospitals(folder)
    options = {"engine": "nvflare", "host": "localhost", "partners": tuple(files), **options}
    study, invitations = coordinator.new(folder / "study", terms_of(mine, "sick")[0], mine, **options)
    return study, Invitation.read(invitations[0]), files["east"]


def test_an_expired_certificate_is_named_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, invitation, data = made(tmp_path, monkeypatch)
    ended = datetime.now(UTC) - timedelta(days=365)
    home = site.prepare(invitation, data, None, tmp_path / "home")
    with pytest.raises(UsageError, match=f"rootCA.pem expired on {ended:%Y-%m-%d}; ask the coordinator for another"):
        site.run(home)
    with pytest.raises(RunError, match=r"server.crt expired on .* make a new study"):
        coordinator.serve(study)
    for found in (doctor.of_site(home), doctor.of_study(study)):
        faults = [finding for finding in found if finding.what == "certificate" and not finding.fine]
        assert faults
        assert all("It has expired" in fault.remedy for fault in faults)


def test_an_expired_invitation_is_not_joined_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, invitation, data = made(tmp_path, monkeypatch, days=-1.0)
    with pytest.raises(UsageError, match=r"expired on .* ask the coordinator for another one"):
        site.prepare(invitation, data, None, tmp_path / "home")
    assert not Home(tmp_path / "home").folder.exists()
