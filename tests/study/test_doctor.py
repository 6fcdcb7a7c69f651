"""`coterie doctor` finds each of the usual faults, and names the remedy."""

import shutil
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hospitals import hospitals, rows, write
from typer.testing import CliRunner

from coterie import __version__
from coterie.cli import app
from coterie.problems.sites.agreement import Agreement, Present
from coterie.problems.sites.folder import Study
from coterie.problems.sites.terms import terms_of
from coterie.study import doctor
from coterie.study.doctor import Finding, of_site, of_study
from coterie.study.home import KIT, Home
from coterie.study.invitation import Invitation, expiry

RUNNER = CliRunner()


@pytest.fixture
def listening() -> Iterator[int]:
    """A port on which some program listens that is no server of a study."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which all is well: packages, certificates and disk."""
    now = datetime.now(UTC)
    monkeypatch.setattr(doctor, "version", lambda package: "1.0")
    monkeypatch.setattr(doctor, "dates_of", lambda path: (now - timedelta(1), now + timedelta(300)))
    monkeypatch.setattr(doctor, "_greeted", lambda line, authority: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))


def study_at(folder: Path, port: int) -> Study:
    mine, _ = hospitals(folder)
    study = Study(folder / "demo", "demo", terms_of(mine, "sick")[0], mine, "nvflare", "127.0.0.1", (port,), ("north",))
    study.write()
    (study.folder / "rootCA.pem").touch()
    return study


def site_at(folder: Path, port: int, **about: Any) -> Home:
    study = study_at(folder, port)
    home = Home(folder / "home")
    invitation = Invitation("demo", "north", "nvflare", f"127.0.0.1:{port}", expiry(), study.terms, {}, **about)
    home.join(invitation, folder / "sites" / "north.csv", None)
    (home.folder / KIT / "startup").mkdir(parents=True)
    (home.folder / KIT / "startup" / "rootCA.pem").touch()
    return home


def faults(found: list[Finding]) -> dict[str, Finding]:
    assert all(one.remedy for one in found if not one.fine), found
    return {one.what: one for one in found if not one.fine}


@pytest.mark.usefixtures("fine")
def test_where_all_is_well_nothing_is_found(tmp_path: Path, listening: int) -> None:
    home = site_at(tmp_path, listening)
    assert faults(of_site(home)) == {}
    assert faults(of_study(Study.read(tmp_path / "demo"))) == {}
    assert RUNNER.invoke(app, ["doctor", str(home.folder)]).exit_code == 0


@pytest.mark.usefixtures("fine")
def test_ports(tmp_path: Path, listening: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    study = study_at(tmp_path / "closed", closed)
    assert "coterie study serve" in faults(of_study(study))["port"].remedy
    away = site_at(tmp_path / "away", closed)
    assert "Is the coordinator's server up" in faults(of_site(away))["port"].remedy

    def foreign(line: Any, authority: Path) -> None:
        raise ssl.SSLError("wrong version number")

    monkeypatch.setattr(doctor, "_greeted", foreign)
    taken = faults(of_study(study_at(tmp_path / "taken", listening)))["port"]
    assert "not as this study's server" in taken.seen
    assert "Another program has the port" in taken.remedy

    def unknown(address: Any, timeout: float) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    assert "Name or service not known" in faults(of_site(away))["port"].seen


@pytest.mark.usefixtures("fine")
def test_a_port_that_speaks_no_tls_is_another_programs(tmp_path: Path, listening: int, monkeypatch: Any) -> None:
    monkeypatch.undo()  # the real greeting
    monkeypatch.setattr(doctor, "PATIENCE", 0.2)
    monkeypatch.setattr(ssl, "create_default_context", lambda cafile: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    found = doctor._port("127.0.0.1", listening, "remedy", tmp_path)
    assert "not as this study's server" in found.seen


@pytest.mark.usefixtures("fine")
def test_certificates(tmp_path: Path, listening: int, monkeypatch: pytest.MonkeyPatch) -> None:
    home, now = site_at(tmp_path, listening), datetime.now(UTC)
    for begin, end, said in ((-400, -1, "expired"), (1, 400, "by NTP")):
        dates = now + timedelta(begin), now + timedelta(end)
        monkeypatch.setattr(doctor, "dates_of", lambda path, dates=dates: dates)
        assert said in faults(of_site(home))["certificate"].remedy
        assert said in faults(of_study(Study.read(tmp_path / "demo")))["certificate"].remedy
    monkeypatch.setattr(doctor, "dates_of", lambda path: (now - timedelta(1), now + timedelta(5.5)))
    assert [one.remedy for one in of_site(home) if one.what == "certificate"] == ["It ends in 5 days."]


@pytest.mark.usefixtures("fine")
def test_clock_version_and_sites_that_were_left_out(tmp_path: Path, listening: int) -> None:
    study = study_at(tmp_path, listening)._replace(sites=("north", "south"))
    sites = (Present("north", 67, 400.0),)
    Agreement(study.terms.digest, sites, {}, {}, {"south": "the coordinator has coterie 9"}).write(study.folder)
    found = faults(of_study(study))
    assert "NTP" in found["clock of north"].remedy
    assert "study remove" in found["site south"].remedy
    home = site_at(tmp_path, listening, version="0.0.1")
    assert "coterie[nvflare]==0.0.1" in faults(of_site(home))["version of the coordinator"].remedy


@pytest.mark.usefixtures("fine")
def test_disk_packages_and_files(tmp_path: Path, listening: int, monkeypatch: pytest.MonkeyPatch) -> None:
    home = site_at(tmp_path, listening)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    assert "space" in faults(of_site(home))["disk"].remedy
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    file = tmp_path / "sites" / "north.csv"
    write(file, rows(30, 90))
    assert any("has changed since" in one.seen and one.fine for one in of_site(home))
    write(file, rows(30, 90), lambda r: {**r, "dose": r["dose"] * 1000})
    assert 'units = {"dose" = 1000}' in faults(of_site(home))["your file"].remedy
    file.unlink()
    assert {"data", "your file"} == faults(of_site(home)).keys()
    home.folder.chmod(0o755)
    assert "chmod 700" in faults(of_site(home))["private folder"].remedy
    study = Study.read(tmp_path / "demo")
    write(study.data, rows(1, 80), lambda r: {k: v for k, v in r.items() if k != "dose"})
    assert "your file" in faults(of_study(study))
    study.data.unlink()
    assert "data" in faults(of_study(study))


def test_a_study_without_a_network_and_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_at(tmp_path, 1)._replace(engine="embedded", ports=())
    (study.folder / "rootCA.pem").unlink()
    assert "port" not in {one.what for one in of_study(study)}

    def missing(package: str) -> str:
        raise doctor.PackageNotFoundError

    monkeypatch.setattr(doctor, "version", missing)
    found = faults(of_study(study._replace(engine="nvflare")))
    assert found["nvflare"].remedy == "pip install 'coterie[nvflare]'"
    assert __version__
