"""What the commands print and write when all is well, with the default run end to end."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from safetensors.torch import load_file
from typer.main import get_command

from coterie import __version__
from coterie.cli import app
from coterie.methods.registry import METHODS
from coterie.problems.catalogue.registry import PROBLEMS

Command = Callable[..., Any]
Contents = Callable[[Path], dict[str, str]]

SUMMARY = ("method", "problem", "seed", "rounds", "outcome", "final", "weights", "communication", "seconds")
TRAFFIC = ("rounds", "floats_up", "floats_down", "bytes_up", "bytes_down", "points")
FILES = (
    "config.toml",
    "metrics.jsonl",
    "weights.csv",
    "ledger.json",
    "events.jsonl",
    "model.safetensors",
    "summary.json",
)


def commands(command: click.Command, *names: str) -> Iterator[tuple[str, ...]]:
    """Every command, in groups too."""
    if isinstance(command, click.Group):
        for name, one in command.commands.items():
            yield from commands(one, *names, name)
    else:
        yield names


@pytest.mark.parametrize("names", list(commands(get_command(app))), ids=" ".join)
def test_every_command_has_help_with_an_example(coterie: Command, names: tuple[str, ...]) -> None:
    done = coterie(*names, "--help")
    assert done.code == 0
    assert f"Example: coterie {' '.join(names)}" in " ".join(done.out.split())
    assert coterie(*names, "-h").out == done.out


def found(names: tuple[str, ...]) -> click.Command:
    """A command by its names."""
    command = get_command(app)
    for name in names:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command


@pytest.mark.parametrize("names", list(commands(get_command(app))), ids=" ".join)
def test_help_shows_what_arguments_mean(coterie: Command, names: tuple[str, ...]) -> None:
    """typer before 0.26 loses it with click 8.5."""
    shown = "".join(coterie(*names, "--help").out.split()).replace("│", "")
    for parameter in found(names).params:
        meaning = getattr(parameter, "help", None)
        assert meaning, f"{parameter.name} has no help"
        assert "".join(meaning.split())[:12] in shown, parameter.name


def test_the_version_is_one(coterie: Command) -> None:
    done = coterie("--version")
    assert (done.code, done.out) == (0, f"coterie {__version__}\n")
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "coterie.__version__"}
    assert f"\nversion: {__version__}\n" in (root / "CITATION.cff").read_text()


def test_help_lists_the_commands_and_does_not_wait_for_torch() -> None:
    code = (
        "import sys; sys.argv = ['coterie', '--help']\n"
        "from coterie.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "slow = {'torch', 'numpy', 'sklearn', 'pydantic', 'safetensors'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name in ("run", "resume", "list"):
        assert name in done.stdout


def test_python_m_coterie_is_the_command_line() -> None:
    arguments = [sys.executable, "-m", "coterie", "list", "nonsense"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown list 'nonsense'; known: engines, methods, models, papers, problems.")
    assert "Traceback" not in done.stderr


def test_lists(coterie: Command) -> None:
    methods = coterie("list", "methods", "--json").json
    assert [row["name"] for row in methods] == [entry.name for entry in METHODS]
    assert {row["name"]: row["learns weights"] for row in methods}["meritfed"] is True
    problems = coterie("list", "problems", "--json").json
    assert [row["name"] for row in problems] == [entry.name for entry in PROBLEMS]
    papers = coterie("list", "papers", "--json").json
    assert sorted(name for row in papers for name in row["methods"]) == sorted(entry.name for entry in METHODS)
    for what, entries in (("methods", METHODS), ("problems", PROBLEMS)):
        shown = coterie("list", what)
        assert shown.code == 0
        for entry in entries:
            assert entry.name in shown.out
    assert "McMahan" in coterie("list", "papers").out


@pytest.mark.parametrize(("what", "name"), [("methods", "meritfed"), ("problems", "files")])
def test_one_entry_is_explained(coterie: Command, what: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    entry = coterie("list", what, name, "--json").json
    shown = coterie("list", what, name).out
    assert entry["about"] in shown
    lines = [line.split() for line in shown.splitlines()]
    for setting in entry["settings"]:
        assert setting["meaning"]
        assert [setting["setting"], *setting["values"].split()] in [
            line[: 1 + len(setting["values"].split())] for line in lines
        ]
        assert setting["meaning"] in shown


def test_what_a_method_needs_and_where_it_was_published(coterie: Command) -> None:
    shown = coterie("list", "methods", "bilevel").out
    assert "paper: Adaptively weighted nodes (2023)" in shown
    assert "learns weights: true" in shown
    assert "needs: gradient and hvp and target" in shown
    assert "round" in shown
    cut = {row["setting"]: row for row in coterie("list", "methods", "meritfed", "--json").json["settings"]}["cut"]
    assert cut == {
        "setting": "cut",
        "values": "whole number ≥ 1 or not set",
        "default": None,
        "meaning": "after this many rounds the mirror step is divided by 10; never if not set",
    }


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("methods", "meritfd"), "unknown method 'meritfd'; did you mean meritfed"),
        (("problems", "fils"), "unknown problem 'fils'; did you mean files"),
        (("papers", "x"), "write: coterie list papers"),
    ],
)
def test_an_unknown_entry_is_refused(coterie: Command, arguments: tuple[str, ...], complaint: str) -> None:
    done = coterie("list", *arguments)
    assert done.code == 2
    assert complaint in done.err


def test_json_is_all_that_is_printed(coterie: Command, tmp_path: Path) -> None:
    done = coterie("run", "--problem", "quadratic", "--rounds", "3", "--out", tmp_path / "run", "--json")
    assert done.code == 0
    assert done.err == ""
    summary = done.json
    for key in SUMMARY:
        assert key in summary
    assert list(summary["communication"]) == list(TRAFFIC)
    assert len(summary["weights"]) == 6
    assert (summary["method"], summary["problem"], summary["rounds"]) == ("meritfed", "quadratic", 3)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())


def test_the_default_run_end_to_end(coterie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = coterie("run", "--rounds", "3")
    assert shown.code == 0
    assert shown.err == ""
    folder = tmp_path / "runs" / "friends-meritfed-0"
    for words in (
        "Who helped",
        "friend",
        "stranger",
        "test accuracy",
        "local-train",
        "fedavg",
        "moved",
        str(folder.name),
    ):
        assert words in shown.out
    for place in (folder, folder / "baselines" / "fedavg", folder / "baselines" / "local-train"):
        for name in FILES:
            assert (place / name).is_file(), name
    rows = (folder / "weights.csv").read_text().splitlines()
    assert rows[0] == ",".join(["round", *(f"client_{k}" for k in range(15))])
    assert [row.split(",")[0] for row in rows[1:]] == ["0", "1", "2", "3"]
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    for key in ("round", "test_accuracy", "test_loss", "validation_loss", "validation_accuracy", "friends_weight"):
        assert key in line
    ledger = json.loads((folder / "ledger.json").read_text())
    assert ledger["total"] == line["communication"]
    assert set(ledger["total"]) == set(TRAFFIC)
    numbers = 15 * 3 * sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert ledger["total"]["floats_up"] == ledger["total"]["floats_down"] == numbers
    assert ledger["total"]["bytes_up"] == 4 * numbers
    assert coterie("run", "--rounds", "1", "--set", "run.baselines=[]").code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "friends-meritfed-0",
        "friends-meritfed-0-2",
    ]


def test_config_toml_runs_the_same_again(coterie: Command, tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    arguments = ("--method", "fedavg", "--problem", "quadratic", "--rounds", "3", "--seed", "4")
    assert coterie("run", *arguments, "--out", one).code == 0
    assert coterie("run", one / "config.toml", "--out", two).code == 0
    assert (one / "config.toml").read_bytes() == (two / "config.toml").read_bytes()
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert coterie("run", one / "config.toml", "--seed", "5", "--set", "method.step=0.2", "--out", three).code == 0
    config = tomllib.loads((three / "config.toml").read_text())
    assert (config["run"]["seed"], config["run"]["rounds"], config["method"]["step"]) == (5, 3, 0.2)
    assert (one / "model.safetensors").read_bytes() != (three / "model.safetensors").read_bytes()


def test_resuming_a_finished_run_says_so_and_does_nothing(coterie: Command, contents: Contents, tmp_path: Path) -> None:
    arguments = ("--problem", "quadratic", "--rounds", "3", "--set", 'run.baselines=["fedavg"]')
    told = coterie("run", *arguments, "--out", tmp_path / "run", "--json").json
    before = contents(tmp_path)
    again = coterie("resume", tmp_path / "run")
    assert again.code == 0
    assert "meritfed has done all its 3 rounds; nothing was left to run." in again.out
    assert "Who helped" in again.out
    assert coterie("resume", tmp_path / "run", "--json").json == told
    assert contents(tmp_path) == before


def test_methods_are_compared_by_a_measure_that_all_have(coterie: Command, tmp_path: Path) -> None:
    """meritfed has an objective F(w) on the quadratic, fedavg has no weights and none."""
    arguments = ("--problem", "quadratic", "--rounds", "2", "--set", 'run.baselines=["fedavg"]')
    done = coterie("run", *arguments, "--out", tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "objective" in summary["final"]
    table = done.out[done.out.index("trained by") :].splitlines()
    assert "distance to optimum" in table[0]
    for row, final in zip(table[1:], (summary["final"], summary["baselines"]["fedavg"]["final"]), strict=False):
        assert f"{final['distance_to_optimum']:.4g}" in row


def test_a_folder_with_brackets_in_its_name_is_shown_as_it_is(coterie: Command, tmp_path: Path) -> None:
    folder = tmp_path / "a [/b] [bold]c"
    done = coterie("run", "--problem", "quadratic", "--rounds", "1", "--out", folder)
    assert done.code == 0
    assert str(folder) in done.out


@pytest.mark.usefixtures("no_waiting_for_disks")
def test_the_default_run_finds_the_friends_and_beats_both_baselines(coterie: Command, tmp_path: Path) -> None:
    done = coterie("run", "--out", tmp_path / "run", "--json")
    summary = done.json
    assert (summary["outcome"], summary["rounds"]) == ("finished", 200)
    assert summary["final"]["friends_weight"] >= 0.8
    accuracy = summary["final"]["test_accuracy"]
    others = {name: one["final"]["test_accuracy"] for name, one in summary["baselines"].items()}
    assert set(others) == {"local-train", "fedavg"}
    assert accuracy > max(others.values()) + 0.05


def test_the_summary_says_what_went_wrong_and_where_to_look(coterie: Command, tmp_path: Path) -> None:
    done = coterie(
        "run", "--rounds", 3, "--set", "faults.crash=.3", "--set", "run.baselines=[]", "--out", tmp_path / "f"
    )
    assert done.code == 0, done.err
    crashed = sum('"crashed"' in line for line in (tmp_path / "f" / "events.jsonl").read_text().splitlines())
    assert crashed > 0
    assert f"Events: {crashed} × crashed" in done.out + done.err
    assert f"coterie report {tmp_path / 'f'}" in done.out + done.err
