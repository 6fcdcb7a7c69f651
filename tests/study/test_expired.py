"""Certificates and invitations of yesterday: refused with a remedy by `site join`, `study serve` and `doctor`."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hospitals import hospitals

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from coterie.errors import RunError, UsageError
from coterie.problems.sites.folder import Study
from coterie.problems.sites.terms import terms_of
from coterie.study import coordinator, doctor, site, superlink
from coterie.study.home import Home
from coterie.study.invitation import Invitation


class TwoYearsAgo(datetime):
    """A clock for the one who makes certificates."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.now(tz) - timedelta(days=730)


def made(folder: Path, **options: Any) -> tuple[Study, Invitation, Path]:
    mine, files = hospitals(folder)
    options = {"engine": "flower", "host": "localhost", "partners": tuple(files), **options}
    study, invitations = coordinator.new(folder / "study", terms_of(mine, "sick")[0], mine, **options)
    return study, Invitation.read(invitations[0]), files["east"]


def test_an_expired_certificate_is_named_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(superlink, "datetime", TwoYearsAgo)
        study, invitation, data = made(tmp_path)
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


def test_an_expired_invitation_is_not_joined_with(tmp_path: Path) -> None:
    _, invitation, data = made(tmp_path, days=-1.0)
    with pytest.raises(UsageError, match=r"expired on .* ask the coordinator for another one"):
        site.prepare(invitation, data, None, tmp_path / "home")
    assert not Home(tmp_path / "home").folder.exists()
