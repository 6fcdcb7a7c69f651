"""Invitations are data: what is wrong with one is said, and none leads out of its folder."""

import base64
import io
import zipfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hospitals import hospitals

from coterie.errors import UsageError
from coterie.problems.sites.terms import terms_of
from coterie.study import invitation as invitations
from coterie.study.home import Home, SitePolicy, read_settings
from coterie.study.invitation import Invitation, check_name, expiry, write_private
from coterie.study.site import prepare, run
from coterie.study.supervise import dockerfile, unit


def invitation(folder: Path, site: str = "north", days: float = 3.0) -> Invitation:
    mine, _ = hospitals(folder)
    terms, _ = terms_of(mine, "sick")
    return Invitation("demo", site, "nvflare", "host.example:8002", expiry(days), terms, {"startup/client.key": b"k"})


def test_an_invitation_survives_its_file_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    found = invitation(tmp_path)
    path = found.write(tmp_path / "north.invite")
    assert Invitation.read(path) == found
    assert path.stat().st_mode & 0o077 == 0
    assert "b'k'" not in repr(found)


def test_an_expired_invitation_is_refused_with_the_remedy(tmp_path: Path) -> None:
    found = invitation(tmp_path, days=1.0)
    found.check_date()
    with pytest.raises(UsageError, match="coterie study invite demo --partners north"):
        found.check_date(found.expires + timedelta(seconds=1))


def test_what_is_no_invitation_is_refused(tmp_path: Path) -> None:
    path = invitation(tmp_path).write(tmp_path / "north.invite")
    text = path.read_text()
    with pytest.raises(UsageError, match="there is no invitation"):
        Invitation.read(tmp_path / "none.invite")
    for old, new in (
        ('engine = "nvflare"', 'engine = "other"'),
        ('site = "north"', 'site = "../north"'),
        ("[invitation]", "[other]"),
        ('kind = "classification"', 'kind = "other"'),
        ('kit = "', 'kit = "*'),
    ):
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(UsageError):
            Invitation.read(path)


def test_a_damaged_file_is_no_invitation(tmp_path: Path) -> None:
    path = invitation(tmp_path).write(tmp_path / "north.invite")
    data = path.read_bytes()
    for part in (data[:40], data[:400], data[: len(data) // 2], data[:-5], bytes(range(256)), b"a,b\n1,2\n"):
        path.write_bytes(part)
        with pytest.raises(UsageError, match=r"damaged .* ask the coordinator for another one"):
            Invitation.read(path)


def test_another_version_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    other = replace(invitation(tmp_path), version="0.0.1")
    with pytest.raises(UsageError, match=r"pip install 'coterie\[nvflare\]==0.0.1'"):
        prepare(other, tmp_path / "sites" / "north.csv", None, tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_a_site_with_an_expired_certificate_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_private(tmp_path / "kit", {"startup/client.crt": b""})
    now = datetime.now(UTC)
    for begin, end, said in ((-2, -1, "expired on"), (1, 2, "by NTP")):
        dates = now + timedelta(begin), now + timedelta(end)
        monkeypatch.setattr(invitations, "dates_of", lambda path, dates=dates: dates)
        with pytest.raises(UsageError, match=said):
            run(Home(tmp_path))


def test_no_kit_leads_out_of_its_folder(tmp_path: Path) -> None:
    path = invitation(tmp_path).write(tmp_path / "north.invite")
    for name in ("../evil", "/tmp/evil", "a/../../evil"):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(name, "x")
        lines = [line for line in path.read_text().splitlines() if not line.startswith("kit = ")]
        crooked = tmp_path / "crooked.invite"
        crooked.write_text("\n".join([*lines, f'kit = "{base64.b64encode(buffer.getvalue()).decode()}"']))
        with pytest.raises(UsageError, match="outside"):
            Invitation.read(crooked)


@pytest.mark.parametrize("name", ["North", "", "9a", "a b", "a/b", "ä", "x" * 41])
def test_names_become_folders_and_certificates(name: str) -> None:
    with pytest.raises(UsageError, match="no name of a site"):
        check_name(name, "site")


def test_a_home_belongs_to_one_invitation(tmp_path: Path) -> None:
    first, second = invitation(tmp_path), invitation(tmp_path)
    home = Home.of(first, tmp_path / "home")
    home.join(first, tmp_path / "x.csv", None)
    home.join(first, tmp_path / "x.csv", None)
    assert home.invitation == first
    assert home.folder.stat().st_mode & 0o077 == 0
    with pytest.raises(UsageError, match="another invitation"):
        home.join(second, tmp_path / "x.csv", None)
    with pytest.raises(UsageError, match="no site"):
        Home.find(tmp_path)


def test_settings_of_a_site_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(
        '[policy]\ncolumns = ["age", "dose"]\nleast_rows = 30\nworks = ["files/*"]\n[data]\nunseen = "share"\n'
    )
    policy, choices = read_settings(path)
    assert policy.columns == ("age", "dose")
    assert policy.node.works == ("files/*",)
    assert choices.unseen == "share"
    terms = invitation(tmp_path).terms
    assert "'pain'" in str(policy.refusal(terms, 100))
    assert "least_rows" in str(SitePolicy(least_rows=30).refusal(terms, 20))
    assert SitePolicy().refusal(terms, 20) is None
    for text, said in (
        ("[polcy]\n", "no table"),
        ("[policy]\nleast = 1\n", "no key of a node policy"),
        ('[policy]\nstages = ["run"]\n', "has no 'run'"),
        ("[policy]\nreceive = 1\n", "must be a bool"),
        ('[policy]\ncolumns = "age"\n', "list of texts"),
        ('[data]\nunseen = "maybe"\n', "refuse, share or missing"),
        ("[policy\n", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            read_settings(path)


def test_private_files_are_private(tmp_path: Path) -> None:
    write_private(tmp_path / "kit", {"startup/key": b"secret"})
    assert (tmp_path / "kit" / "startup" / "key").stat().st_mode & 0o077 == 0
    assert (tmp_path / "kit").stat().st_mode & 0o077 == 0


def test_services_begin_again_after_a_restart() -> None:
    text = unit("a site", ["site", "join", "--home", "/with space"])
    assert "Restart=always" in text
    assert "'/with space'" in text
    assert 'CMD ["coterie", "study", "serve", "/data/x"]' in dockerfile("nvflare", ["study", "serve", "/data/x"])
