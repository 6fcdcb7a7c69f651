"""Bad input on the command line: a paragraph with the thing and the remedy, the right exit code, no harm done."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.report.terminal import LiveDisplay

Command = Callable[..., Any]
Contents = Callable[[Path], dict[str, str]]

QUICK = ("--problem", "quadratic", "--rounds", "4", "--set", "federation.mode=vmap")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, where a command might leave something by accident."""
    place = tmp_path / "cwd"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place for runs that are made once and copied."""
    return tmp_path_factory.mktemp("made")


@pytest.fixture
def result(coterie: Command, made: Path, tmp_path: Path) -> Path:
    """A finished run."""
    if not (made / "result").exists():
        assert coterie("run", "--out", made / "result", *QUICK).code == 0
    return shutil.copytree(made / "result", tmp_path / "result")


@pytest.fixture
def stopped(coterie: Command, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run stopped in round 3."""
    if not (made / "stopped").exists():
        with monkeypatch.context() as patch:
            patch.setattr(LiveDisplay, "recorded", _stop_at_3)
            assert coterie("run", "--out", made / "stopped", *QUICK).code == 1
    return shutil.copytree(made / "stopped", tmp_path / "stopped")


def _stop_at_3(self: LiveDisplay, line: dict[str, Any], view: Any) -> None:
    if line["round"] == 3:
        raise KeyboardInterrupt


def assert_one_paragraph(done: Any, code: int, *words: str) -> None:
    assert done.code == code
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "merritfed"], ["unknown method 'merritfed'", "did you mean meritfed"]),
        (["--problem", "freinds"], ["unknown problem 'freinds'", "did you mean friends"]),
        (["--engine", "cloud"], ["run.engine = 'cloud'", "'local'"]),
        (["--set", "problem.data=digitz"], ["digitz", "digits"]),
        (["--set", "problem.model=mpl"], ["mpl", "mlp"]),
        (["--set", "method.stepp=1"], ["unknown key in [method] 'stepp'", "did you mean step"]),
        (["--set", "run.round=1"], ["unknown key in [run] 'round'", "did you mean rounds"]),
        (["--set", "metod.step=1"], ["unknown table 'metod'", "did you mean method"]),
        (["--set", "step=1"], ["'step' names no setting", "table.key=value"]),
        (["--set", "method.step"], ["has no '='"]),
        (["--set", "method.step=fast"], ["method.step = 'fast'", "number"]),
        (["--set", "run.rounds=many"], ["run.rounds = 'many'", "integer"]),
        (["--set", "run.rounds=true"], ["run.rounds = True", "integer"]),
        (["--set", "problem.clients=2.5"], ["problem.clients = 2.5", "integer"]),
        (["--rounds", "0"], ["run.rounds = 0", "greater than or equal to 1"]),
        (["--seed", "-1"], ["run.seed = -1", "greater than or equal to 0"]),
        (["--set", "method.step=-1"], ["method.step = -1", "greater than 0"]),
        (["--set", "method.step=nan"], ["method.step = nan"]),
        (["--set", "problem.active=0"], ["federation.active = 0", "greater than 0"]),
        (["--set", "federation.active=1.5"], ["federation.active = 1.5", "less than or equal to 1"]),
        (["--set", "federation.target=99"], ["federation.target is client 99", "0 … 14"]),
        (["--set", "problem.friends=99"], ["problem.friends is 99", "lower it"]),
        (["--set", "problem.clients=99999"], ["99999 clients", "Lower"]),
        (["--set", "run.device=cuda:99"], ["run.device cuda:99 is not available", "run.device=cpu"]),
        (["--set", "run.dtype=float16"], ["run.dtype = 'float16'", "'float32' or 'float64'"]),
        (["--set", 'run.baselines=["fedavgg"]'], ["unknown method 'fedavgg'", "did you mean fedavg"]),
        (["missing.toml"], ["there is no configuration file missing.toml"]),
    ],
)
def test_a_bad_setting(
    coterie: Command, contents: Contents, tmp_path: Path, result: Path, arguments: list[str], words: list[str]
) -> None:
    before = contents(tmp_path)
    for where in (["--out", tmp_path / "new"], ["--out", result, "--force"], []):
        assert_one_paragraph(coterie("run", *arguments, *where), 2, *words)
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cwd", "result"]
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("arguments", [["run", "--rounds", "many"], ["run", "--bogus"], ["rum"], ["resume"], ["list"]])
def test_bad_usage_of_the_shell_kind(coterie: Command, arguments: list[str]) -> None:
    done = coterie(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert "Traceback" not in done.err
    assert "Error" in done.err
    assert "Usage: coterie" in done.err
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version = 2\n", ["configuration version 2", "reads up to 1", "Install a newer one"]),
        ("[run\n", ["not valid TOML", "line 1"]),
        ("[run]\nronds = 5\n", ["unknown key in [run] 'ronds'", "did you mean rounds"]),
        ("[rum]\nrounds = 5\n", ["unknown table 'rum'", "did you mean run"]),
        ("rounds = 5\n", ["rounds stands outside of any table", "[run]"]),
        ("[run]\nrounds = '5'\n", ["run.rounds = '5'", "integer"]),
    ],
)
def test_a_bad_configuration_file(coterie: Command, tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    assert_one_paragraph(coterie("run", file, "--out", tmp_path / "new"), 2, *words)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_not_empty(coterie: Command, contents: Contents, tmp_path: Path, result: Path) -> None:
    before = contents(result)
    done = coterie("run", "--out", result, *QUICK)
    assert_one_paragraph(done, 2, "is not empty", f"coterie resume {result}", "--force")
    assert contents(result) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    done = coterie("run", "--out", tmp_path / "mine", *QUICK, "--force")
    assert_one_paragraph(done, 2, "no coterie result", "--force empties only result folders")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
    assert coterie("run", "--out", result, *QUICK, "--force", "--seed", "5").code == 0
    assert json.loads((result / "summary.json").read_text())["seed"] == 5


def test_a_folder_that_cannot_be_written(coterie: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = coterie("run", "--out", tmp_path / "file" / "run", *QUICK)
    assert_one_paragraph(done, 2, str(tmp_path / "file" / "run"), "cannot be written", "Choose another --out")
    done = coterie("run", "--out", tmp_path / "file", *QUICK)
    assert_one_paragraph(done, 2, "is a file; name a folder with --out")
    assert (tmp_path / "file").read_text() == "in the way"
    if Path("/proc/self").exists():
        assert_one_paragraph(coterie("run", "--out", "/proc/coterie", *QUICK), 2, "/proc/coterie cannot be written")


def test_a_folder_without_permission(coterie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the refusal of the system is played."""
    real = Path.mkdir

    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.name == "locked":
            raise PermissionError(13, "Permission denied")
        real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    done = coterie("run", "--out", tmp_path / "locked", *QUICK)
    assert_one_paragraph(done, 2, "locked cannot be written: Permission denied", "Choose another --out")
    (tmp_path / "asked").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    done = coterie("run", "--out", tmp_path / "asked", *QUICK)
    assert_one_paragraph(done, 2, "asked cannot be written: permission denied")


def _truncate(folder: Path) -> None:
    for path in (folder / "checkpoint").iterdir():
        path.write_bytes(path.read_bytes()[:200])


def _tamper(folder: Path) -> None:
    for path in (folder / "checkpoint").iterdir():
        data = bytearray(path.read_bytes())
        data[-2] ^= 8
        path.write_bytes(bytes(data))


def _newer(folder: Path) -> None:
    file = folder / "config.toml"
    file.write_text(file.read_text().replace("version = 1", "version = 7"))


def _other(folder: Path) -> None:
    file = folder / "config.toml"
    file.write_text(file.read_text().replace("seed = 0", "seed = 4"))


def _gone(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, ["no checkpoint", "cut off", "coterie run OLD/config.toml --out NEW"]),
        (_tamper, ["no checkpoint", "checksum does not match", "coterie run OLD/config.toml --out NEW"]),
        (_newer, ["configuration version 7", "Install a newer one"]),
        (_other, ["made with run.seed = 0, but config.toml says 4"]),
        (_gone, ["metrics.jsonl is 0 bytes long", "start again in a new folder"]),
    ],
)
def test_a_folder_that_cannot_be_resumed(
    coterie: Command, contents: Contents, stopped: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(stopped)
    before = contents(stopped)
    assert_one_paragraph(coterie("resume", stopped), 2, *words)
    assert contents(stopped) == before


def test_resuming_what_is_no_run(coterie: Command, tmp_path: Path) -> None:
    assert_one_paragraph(coterie("resume", tmp_path / "none"), 2, "there is no folder")
    assert_one_paragraph(coterie("resume", tmp_path), 2, "no config.toml", "coterie run --out DIR")


def test_a_method_that_does_not_fit_says_which_do(
    coterie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.problems.weighting import Weighting

    monkeypatch.setattr(Weighting, "offers", frozenset({"gradient"}))
    done = coterie("run", "--out", tmp_path / "new", *QUICK)
    assert_one_paragraph(done, 2, "meritfed needs target", "problem quadratic offers gradient", "fedavg")


def test_a_run_that_diverges_fails_with_1_and_keeps_its_records(coterie: Command, tmp_path: Path) -> None:
    arguments = ("run", "--problem", "quadratic", "--rounds", "99", "--set", "method.step=1e6")
    told = coterie(*arguments, "--out", tmp_path / "a", "--json")
    assert told.code == 1
    assert told.json["outcome"] == "diverged"
    assert "Lower method.step (now 1e+06)" in told.json["message"]
    shown = coterie(*arguments, "--out", tmp_path / "b")
    assert shown.code == 1
    assert "diverged" in shown.out
    assert "Lower method.step" in shown.out
    assert "Traceback" not in shown.err
    assert (tmp_path / "b" / "model.safetensors").stat().st_size > 0


def test_ctrl_c_fails_with_1_and_says_how_to_go_on(
    coterie: Command, tmp_path: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads((stopped / "summary.json").read_text())["outcome"] == "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(LiveDisplay, "recorded", _stop_at_3)
        shown = coterie("run", "--out", tmp_path / "shown", *QUICK)
        told = coterie("run", "--out", tmp_path / "told", *QUICK, "--json")
    assert shown.code == told.code == 1
    assert f"resume with: coterie resume {tmp_path / 'shown'}" in shown.out
    assert told.json["outcome"] == "stopped"
    assert told.json["message"].endswith(f"coterie resume {tmp_path / 'told'}")
    again = coterie("resume", tmp_path / "shown")
    assert again.code == 0
    assert "going on after round 2" in again.out


def test_ctrl_c_before_anything_began(coterie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.experiment.run.assemble", interrupted)
    done = coterie("run", "--out", tmp_path / "new", *QUICK)
    assert_one_paragraph(done, 1, "stopped by the user")
    assert not (tmp_path / "new").exists()
