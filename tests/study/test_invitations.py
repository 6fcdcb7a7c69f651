"""Invitations are data: what is wrong with one is said, and none leads out of its folder."""

import base64
import errno
import io
import os
import re
import sys
import warnings
import zipfile
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hospitals import hospitals
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fuzz"))

from targets import Target, mutated

from coterie.errors import RunError, UsageError
from coterie.federation.remote import Record
from coterie.problems.sites.terms import terms_of
from coterie.study import invitation as invitations
from coterie.study import kept
from coterie.study.home import Home, SitePolicy, read_settings, totals
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


def with_kit(path: Path, archive: bytes) -> Path:
    """The invitation in a file with another kit."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("kit = ")]
    crooked = path.with_name("crooked.invite")
    crooked.write_text("\n".join([*lines, f'kit = "{base64.b64encode(archive).decode()}"']))
    return crooked


def packed(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, warnings.catch_warnings(action="ignore"):
        for name in names:
            archive.writestr(name, "x")
    return buffer.getvalue()


OUTSIDE = (
    "../evil",
    "/tmp/evil",
    "a/../../evil",
    "..\\evil",
    "a\\evil",
    "C:evil",
    "C:/evil",
    "a//b",
    "./a",
    "a/",
    "a\x1b[2J",
    "é",
)


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_kit_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    crooked = with_kit(invitation(tmp_path).write(tmp_path / "north.invite"), packed("startup/key", name))
    with pytest.raises(UsageError, match=r"outside of its folder or no plain name.*ask the coordinator"):
        Invitation.read(crooked)
    with pytest.raises(ValueError, match="outside"):
        write_private(tmp_path / "kit", {name: b"x"})
    assert not (tmp_path / "kit").exists()


@pytest.mark.parametrize(
    ("names", "said"), [(("a/key", "A/key"), "twice"), (("a", "a/key"), "as a file and as a folder")]
)
def test_no_two_files_of_a_kit_are_one(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    path = invitation(tmp_path).write(tmp_path / "north.invite")
    with pytest.raises(UsageError, match=said):
        Invitation.read(with_kit(path, packed(*names)))


def _encrypted() -> bytes:
    data = bytearray(packed("key"))
    data[data.index(b"PK\x01\x02") + 8] |= 1
    data[6] |= 1
    return bytes(data)


def _packed_otherwise() -> bytes:
    data = bytearray(packed("key"))
    data[data.index(b"PK\x01\x02") + 10] = 97
    return bytes(data)


@pytest.mark.parametrize("archive", [_encrypted(), _packed_otherwise(), packed("key")[:-30], b""])
def test_a_kit_that_cannot_be_unpacked_is_refused(tmp_path: Path, archive: bytes) -> None:
    path = invitation(tmp_path).write(tmp_path / "north.invite")
    with pytest.raises(UsageError, match="is no invitation, or it is damaged"):
        Invitation.read(with_kit(path, archive))


CROOKED = [
    (r"^expires = .*$", "expires = 2030-01-01T00:00:00"),
    (r"^expires = .*$", "expires = 2030-01-01"),
    (r"^address = .*$", 'address = "host\\u001b[2J:1"'),
    (r"^version = .*$", f'version = "{"9" * 400}"'),
    (r"^scaling = .*$", 'scaling = "other"'),
    (r"^impute = .*$", "impute = []"),
    (r"^words = ", "words = 3 #"),
    (r"^least_rows = ", f"deep = {'[' * 3000}{']' * 3000}\nleast_rows = "),
    (r"(?s)^\[terms\].*?^\[keys\]", "[keys]"),
    (r"(?s)\A.*?^\[terms\]", "terms = 3\n[other]"),
    (r"(?s)\A.*?^\[terms\]", "invitation = 3\n[terms]"),
]


@pytest.mark.parametrize(("old", "new"), CROOKED)
def test_a_crooked_invitation_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = invitation(tmp_path).write(tmp_path / "north.invite")
    text, count = re.subn(old, lambda _: new, path.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)
    with pytest.raises(UsageError, match="ask the coordinator"):
        Invitation.read(path)


@given(number=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mutated_invitation_is_read_or_refused(tmp_path: Path, number: int) -> None:
    path = tmp_path / "north.invite"
    if not path.exists():
        invitation(tmp_path).write(path)
    target = Target("invitations", lambda: [path.read_bytes()], lambda data, place: None)
    other = tmp_path / "other.invite"
    other.write_bytes(mutated(target, number))
    with suppress(UsageError):
        Invitation.read(other).check_date()


@pytest.mark.parametrize("torn", [b'{"time": "20', b"\xff\xfe", b"[1]", b'{"time": 3}', b"[" * 5000])
def test_a_torn_line_of_the_journal_hides_no_other(tmp_path: Path, torn: bytes) -> None:
    home = Home(tmp_path)
    home.note(Record("run", "shared/gradient", 10, 20, "done"))
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(torn)
    home.note(Record("run", "shared/gradient", 1, 2, "done"))
    assert [line["cause"] for line in home.journal()] == [
        "shared/gradient",
        "(line 2 of the journal is damaged)",
        "shared/gradient",
    ]
    assert [(row["orders"], row["received"], row["sent"]) for row in totals(home)] == [(2, 11, 22), (1, 0, 0)]


def test_a_full_disk_loses_nothing_of_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, found = Home(tmp_path), invitation(tmp_path)
    home.note(Record("run", "shared/gradient", 10, 20, "done"))
    found.write(tmp_path / "north.invite")
    write_private(tmp_path / "kit", {"startup/key": b"old"})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        for write, file in (
            (lambda: home.note(Record("run", "shared/gradient", 1, 2, "done")), "journal.jsonl"),
            (lambda: found.write(tmp_path / "north.invite"), "north.invite"),
            (lambda: write_private(tmp_path / "kit", {"startup/key": b"new"}), "key"),
        ):
            with pytest.raises(RunError, match=f"{file} cannot be written: No space left on device.*intact"):
                write()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    home.note(Record("run", "shared/gradient", 1, 2, "done"))
    assert len(list(home.journal())) == 2


def test_a_damaged_register_of_a_study_is_named(tmp_path: Path) -> None:
    (tmp_path / "invited.json").write_text('{"north": ')
    with pytest.raises(UsageError, match=r"invited.json cannot be read .*restore it"):
        kept.invited(tmp_path)


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


def test_the_settings_that_the_page_shows_bar_no_work(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    (text,) = (block for block in re.findall(r"```toml\n(.*?)```", page, re.S) if "[policy]" in block)
    (tmp_path / "site.toml").write_text(text)
    assert read_settings(tmp_path / "site.toml")[0].node.works == SitePolicy().node.works


def test_private_files_are_private(tmp_path: Path) -> None:
    write_private(tmp_path / "kit", {"startup/key": b"secret"})
    assert (tmp_path / "kit" / "startup" / "key").stat().st_mode & 0o077 == 0
    assert (tmp_path / "kit").stat().st_mode & 0o077 == 0


def test_services_begin_again_after_a_restart() -> None:
    text = unit("a site", ["site", "join", "--home", "/with space"])
    assert "Restart=always" in text
    assert "'/with space'" in text
    assert 'CMD ["coterie", "study", "serve", "/data/x"]' in dockerfile("nvflare", ["study", "serve", "/data/x"])
