"""Who belongs to a study: invited again, taken out, left; what is kept; and the files that keep a site running."""

import configparser
import json
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hospitals import hospitals
from test_nodes import nodes
from typer.testing import CliRunner

from coterie import __version__
from coterie.cli import app
from coterie.errors import UsageError
from coterie.federation.remote import InProcess
from coterie.problems.sites.agreement import Agreement
from coterie.problems.sites.folder import Study
from coterie.problems.sites.holding import ABOUT, HOME
from coterie.storage import sole_user
from coterie.study import coordinator
from coterie.study import site as partner
from coterie.study.home import JOURNAL, RECEIVED, Home
from coterie.study.invitation import Invitation
from coterie.study.jobs import for_sites, perform
from coterie.study.kept import kept, note_run
from coterie.study.supervise import dockerfile, unit

RUNNER = CliRunner()
KITS = SimpleNamespace(provision=lambda study: None, kit_of=lambda study, site: {"key": site.encode()})


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study of two partners."""
    monkeypatch.setattr(coordinator, "network", lambda engine: KITS)
    mine, _ = hospitals(tmp_path)
    folder = tmp_path / "demo"
    words = ["study", "new", str(folder), "--label", "sick", "--data", str(mine), "--partners", "north,south"]
    assert RUNNER.invoke(app, words).exit_code == 0
    return folder


def joined(study: Path, site: str, home: Path) -> Home:
    invitation = Invitation.read(study / "invitations" / f"{site}.invite")
    return partner.prepare(invitation, study.parent / "sites" / f"{site}.csv", None, home)


def said(*words: str, code: int = 0) -> str:
    found = RUNNER.invoke(app, [*words])
    assert found.exit_code == code, (found.output, found.exception)
    return " ".join(found.output.split())


def handshake(study: Path, homes: dict[str, Home], monkeypatch: pytest.MonkeyPatch) -> Agreement:
    """What the sites in these homes agree on; on a network each would be a process with its own variable."""
    found = Study.read(study)
    (home,) = homes.values()
    policy = study.parent / "site.toml"
    policy.write_text("[policy]\nseconds = 0\n")
    settings = json.loads((home.folder / "site.json").read_text())
    (home.folder / "site.json").write_text(json.dumps({**settings, "policy": str(policy)}))
    monkeypatch.setenv(HOME, str(home.folder))
    job = {
        "study": str(study),
        "stage": "agree",
        "timeout": 5.0,
        "patience": 0.2,
        "sites": list(found.sites),
        "absent": {},
    }
    network = InProcess(nodes(homes, for_sites(found, "agree", found.sites)))
    return Agreement.read(study, perform(job, lambda sites: network)["agreement"])


def test_invited_again(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = joined(made, "north", tmp_path / "first")
    assert [site.name for site in handshake(made, {"north": first}, monkeypatch).sites] == ["north"]
    second = joined(made, "north", tmp_path / "second")  # the same invitation at another site
    with pytest.raises(Exception, match="north: another site has joined with this invitation before"):
        handshake(made, {"north": second}, monkeypatch)
    text = said("study", "invite", str(made), "--partners", "north,east")
    assert "the invitation that north had is no longer accepted" in text
    assert "coterie study serve" in text
    assert Study.read(made).sites == ("north", "south", "east")
    for old in (first, second):
        with pytest.raises(Exception, match=ABOUT["invitation"]):
            handshake(made, {"north": old}, monkeypatch)
    third = joined(made, "north", tmp_path / "third")
    again = handshake(made, {"north": third}, monkeypatch)
    assert [site.name for site in again.sites] == ["north"]
    assert again.left_out == {"south": "it is not there", "east": "it is not there"}
    with pytest.raises(UsageError, match="belongs to another invitation"):
        joined(made, "north", first.folder)
    with pytest.raises(UsageError, match="same name"):
        coordinator.invite(Study.read(made), ["west", "west"])


def test_whoever_leaves_deletes_its_keys_and_later_runs_go_on_without_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = {site: joined(made, site, tmp_path / site) for site in ("north", "south")}
    handshake(made, {"north": homes["north"]}, monkeypatch)
    home = homes["north"]
    (home.folder / RECEIVED / "run").mkdir(parents=True)
    assert (home.folder / JOURNAL).is_file()
    with sole_user(home.folder):  # as if it ran
        refused = RUNNER.invoke(app, ["site", "leave", "--home", str(home.folder)])
    assert "another coterie is at work" in str(refused.exception)
    text = said("site", "leave", "--home", str(home.folder))
    assert not home.folder.exists()
    assert (tmp_path / "north-journal.jsonl").is_file()
    assert (tmp_path / "north-received").is_dir()
    assert "coterie study remove demo --partners north" in text
    left = handshake(made, {"south": homes["south"]}, monkeypatch)
    assert [site.name for site in left.sites] == ["south"]
    assert left.left_out == {"north": "it is not there"}
    note_run(made, tmp_path, "train", "collaborate", ["north", "south"])
    held = {Path(row["file"]).name: row["holds"] for row in kept(Study.read(made), "north")}
    assert {"study.toml", "north.invite", "members.json", "invited.json", tmp_path.name} <= held.keys()
    assert "client_0" in held[tmp_path.name]
    assert sum("number of rows" in holds for holds in held.values()) == 1
    assert sum("why it did not" in holds for holds in held.values()) == 1
    assert "The sites are now: south" in said("study", "remove", str(made), "--partners", "north")
    after = handshake(made, {"south": homes["south"]}, monkeypatch)
    assert after.left_out == {}
    rest = {Path(row["file"]).name for row in kept(Study.read(made), "north")}
    assert not rest & {"study.toml", "north.invite", "members.json", "invited.json"}
    assert tmp_path.name in rest  # results stay, and are listed
    assert "its row and its column" in said("study", "kept", str(made), "north")
    assert "Nothing is kept of nobody" in said("study", "kept", str(made), "nobody")
    assert "has no site 'north'" in str(
        RUNNER.invoke(app, ["study", "remove", str(made), "--partners", "north"]).exception
    )


def test_the_service_of_a_site(made: Path, tmp_path: Path) -> None:
    home = tmp_path / "a home, 100 % mine"
    data = tmp_path / "sites" / "north.csv"
    words = ["--invitation", str(made / "invitations" / "north.invite"), "--data", str(data), "--home", str(home)]
    text = said("site", "join", *words, "--service")
    assert "systemctl --user enable --now" in text
    service = home / "coterie-demo-north.service"
    command = read_unit(service)
    assert command[1:] == ["-m", "coterie", "site", "join", "--home", str(home)]
    verify(service)
    verify(made / "coterie-demo.service")
    assert read_unit(made / "coterie-demo.service")[3:] == ["study", "serve", str(made)]
    for path, folders in ((home / "Dockerfile", [home, data.parent]), (made / "Dockerfile", [made, tmp_path])):
        read_dockerfile(path, folders)


def read_unit(path: Path) -> list[str]:
    """The command of a systemd unit, read strictly."""
    parser = configparser.ConfigParser(strict=True, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(path)
    assert parser.sections() == ["Unit", "Service", "Install"]
    assert parser["Service"]["Restart"] == "always"
    return shlex.split(parser["Service"]["ExecStart"].replace("%%", "%").replace("$$", "$"))


def verify(path: Path) -> None:
    """By systemd's own reader, where there is one."""
    program = shutil.which("systemd-analyze")
    if program is not None:
        done = subprocess.run([program, "verify", "--user", str(path)], capture_output=True, text=True, timeout=60)
        assert path.name not in done.stderr, done.stderr


def read_dockerfile(path: Path, folders: list[Path]) -> None:
    """Every line has an instruction that is known, the extra exists, and all folders are mounted where they are."""
    lines = path.read_text().splitlines()
    kinds = [line.split(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert kinds == ["FROM", "RUN", "ENV", "WORKDIR", "CMD"]
    (command,) = (json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD "))
    assert command[0] == "coterie"
    assert any(str(folders[0]) in word for word in command)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (wanted,) = (line for line in lines if line.startswith("RUN "))
    assert f"coterie[nvflare]=={__version__}" in wanted
    assert "nvflare" in project["optional-dependencies"]
    shown = shlex.split(" ".join(line.strip("#\\ ") for line in lines[1:] if line.startswith("#")))
    mounted = [shown[i + 1].split(":")[0] for i, word in enumerate(shown) if word == "-v"]
    assert mounted == [str(folder) for folder in folders]


def test_words_of_commands_survive_their_files() -> None:
    text = unit("a site", ["site", "join", "--home", "/100 %/$HOME"])
    assert "'/100 %%/$$HOME'" in text
    assert json.loads(dockerfile("nvflare", ['a "b"']).splitlines()[-1].removeprefix("CMD ")) == ["coterie", 'a "b"']
