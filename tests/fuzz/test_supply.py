"""What is installed is pinned, consistent and of known licence; nothing opens a socket that was not asked for."""

import re
import socket
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from coterie.experiment import run as experiment
from coterie.experiment.config import load

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.licences import GROUPS, declared, licence, needed  # noqa: E402

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
APART = {"flower-simulation"}  # wants exactly one version of Ray, another than the one that is tested


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    names = [canonicalize_name(one.name) for one in found]
    assert len(set(names)) == len(names), "something is pinned twice"
    return {canonicalize_name(one.name): str(one.specifier) for one in found}


def listed() -> dict[str, str]:
    """The licences of docs/LICENSES.md by package."""
    text = (ROOT / "docs/LICENSES.md").read_text()
    return dict(re.findall(r"^\| ([a-z0-9-]+) \| ([^|]+) \|", text, re.MULTILINE))


@pytest.mark.parametrize("extra", ["", *(extra for extra in EXTRAS if extra not in APART)])
def test_everything_installed_is_pinned_as_it_is_installed(extra: str) -> None:
    """Whatever importlib.metadata says that an extra brings along; what is not installed here cannot be looked at."""
    known = pins()
    names = needed(extra)
    assert extra not in ("", "dev") or len(names) > 8
    missing = {name: distribution(name).version for name in names if name not in known}
    assert missing == {}, "run make constraints"
    for name in names:
        pin, version = known[name], distribution(name).version.partition("+")[0]
        assert pin == f"=={version}", f"{name} {version} is installed, {pin} is tested"


def test_what_is_declared_directly_is_pinned_within_its_bounds() -> None:
    known = pins()
    for extra in ("", *(extra for extra in EXTRAS if extra not in APART)):
        for requirement in declared(extra):
            version = known[canonicalize_name(requirement.name)].removeprefix("==")
            assert requirement.specifier.contains(version), f"{requirement} does not admit {version}"


def test_upper_bounds_have_a_reason() -> None:
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if re.search(r"\"[a-z][\w-]*(\[\w+\])?[^\"]*<\d", line):
            assert "#" in line, line


def test_every_licence_is_stated_and_listed() -> None:
    for name in set().union(*(needed(extra) for extra in GROUPS.values())):
        assert licence(name) not in ("", "not stated"), name
        assert listed().get(name), f"{name} is missing in docs/LICENSES.md; run python -m benchmarks.licences"


def test_every_pinned_package_has_its_licence_listed() -> None:
    assert pins().keys() - {canonicalize_name(name) for name in listed()} == set()


def test_pip_finds_nothing_broken() -> None:
    command = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a socket was asked for")


def test_a_run_opens_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("socket", "create_connection", "getaddrinfo", "socketpair"):
        monkeypatch.setattr(socket, name, refuse)
    sets = {"run.problem": "friends", "run.rounds": 2, "problem.clients": 3, "problem.friends": 1, "run.threads": 1}
    summary = experiment.run(load(sets=sets), tmp_path / "run", lambda name, is_baseline: None)
    assert summary["outcome"] == "finished"


IMPORT = """
import socket, sys
def refuse(*_, **__):
    raise SystemExit("a socket was asked for")
for name in ("socket", "create_connection", "getaddrinfo"):
    setattr(socket, name, type(name, (), {"__init__": refuse}) if name == "socket" else refuse)
import coterie, coterie.cli, coterie.experiment.run
"""


def test_an_import_opens_no_socket() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
