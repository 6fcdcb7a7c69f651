"""Signals, full disks, read-only folders, torn checkpoints and jumping clocks: the results are those of a calm run.

Or the run refuses with a reason, and what was saved before is intact.
"""

import errno
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from folders import assert_same_results, lines
from test_kill import ROUNDS, RUN, errors_beside, killer
from test_loop import EVENTFUL, unwatched

from coterie.cli import main
from coterie.errors import RunError, UsageError
from coterie.experiment import checkpoint, loop
from coterie.experiment import run as experiment
from coterie.experiment.build import assemble
from coterie.experiment.config import Config, load

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="made with fork")

SETS = {
    "run.problem": "quadratic",
    "run.rounds": 3,
    "run.threads": 1,
    "run.checkpoint": 1,
    "run.baselines": [],
    "problem.clients": 4,
    "problem.friends": 2,
    "problem.dimension": 3,
    "problem.rows": 8,
    "faults.any": 0.3,
    "federation.clip": 3.0,
    "federation.mode": "vmap",
}


@pytest.fixture(scope="module")
def config() -> Config:
    return load(sets=SETS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, config: Config) -> Path:
    folder = tmp_path_factory.mktemp("chaos") / "whole"
    experiment.run(config, folder, unwatched)
    return folder


# signals


@needs_fork
@pytest.mark.parametrize("signals", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_signals_at_random_moments(tmp_path: Path, signals: int) -> None:
    """SIGKILL, SIGTERM and SIGINT in turn, half of the latter two twice; under faults, with two baselines."""
    calm, folder = tmp_path / "calm", tmp_path / "run"
    arguments = [*RUN, "--set", "faults.any=0.2"]
    told = killer("signals", signals, 3, 3 * ROUNDS, folder, "--", *arguments)
    assert told["calm"] == 0, errors_beside(calm)
    assert told["code"] == 0, errors_beside(folder)
    assert "Traceback" not in errors_beside(folder)
    allowed = {signal.SIGKILL: {-9}, signal.SIGTERM: {1, -15}, signal.SIGINT: {1, -2, 99}}
    assert all(code in allowed[number] for number, code in told["codes"]), told["codes"]
    assert sum(code == 1 for _, code in told["codes"]) >= signals // 4, "hardly any was stopped while it ran"
    assert_same_results(calm, folder)
    assert not list(folder.rglob("*.tmp"))


# disks


class Disk:
    """A disk that is full from the at-th step of writing on, until `room` is made."""

    def __init__(self, at: int) -> None:
        self.at, self.steps = at, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps >= self.at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            self.step()
            return real(*args, **kwargs)

        return stand_in

    def file(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """An open that gives files on this disk."""
        return lambda *args, **kwargs: File(real(*args, **kwargs), self)


class File:
    """A file whose content reaches the disk when it is flushed."""

    def __init__(self, real: Any, disk: Disk) -> None:
        self.real, self.disk = real, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __enter__(self) -> "File":
        return self

    def __exit__(self, *_: object) -> None:
        self.real.close()

    def write(self, data: bytes) -> int:
        self.disk.step()
        return self.real.write(data)

    def flush(self) -> None:
        self.disk.step()
        self.real.flush()


@contextmanager
def on(disk: Disk) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", disk.before(lambda descriptor: None))
        patch.setattr(os, "replace", disk.before(os.replace))
        patch.setattr(tempfile, "mkstemp", disk.before(tempfile.mkstemp))
        patch.setattr(os, "fdopen", disk.file(os.fdopen))
        patch.setattr(Path, "open", disk.file(Path.open))
        yield


def outcome_of(config: Config, folder: Path) -> str | None:
    """What a run failed of; None if it did not fail. Errors that are no RunError go through."""
    try:
        experiment.run(config, folder, unwatched)
    except RunError as error:
        return str(error)
    return None


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_from_any_step_of_writing_on(
    tmp_path: Path, whole: Path, config: Config, stride: int
) -> None:
    failures, at = 0, 1 - stride
    while True:
        at += stride
        folder, disk = tmp_path / f"at_{at}", Disk(at)
        with on(disk):
            said = outcome_of(config, folder)
        if said is None:
            break
        assert "No space left on device" in said
        failures += 1
        if (folder / "config.toml").exists():
            experiment.resume(folder, unwatched)
        else:
            experiment.run(config, folder, unwatched)
        assert_same_results(whole, folder)
        assert not list(folder.rglob("*.tmp")), at
    assert failures > 30 // stride
    assert_same_results(whole, folder)


def test_a_disk_that_is_really_full(tmp_path: Path, config: Config) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=64k tmpfs '{place}' 2>/dev/null"):
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        folder = place / "run"
        with pytest.raises(RunError, match="No space left on device"):
            experiment.run(config.with_run(rounds=150), folder, unwatched)
        kept = sorted((folder / "checkpoint").iterdir())
        assert kept
        with pytest.raises(RunError, match="No space left on device"):
            experiment.resume(folder, unwatched)
        os.system(f"mount -o remount,size=64m '{place}'")
        resumed = experiment.resume(folder, unwatched)
        assert (resumed["outcome"], resumed["rounds"]) == ("finished", 150)
    finally:
        os.system(f"umount '{place}'")


def as_nobody(*arguments: str, errors: Path) -> int:
    """The command line in a process of its own, without the rights of root; its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 99
    try:
        with errors.open("a") as said, redirect_stdout(StringIO()), redirect_stderr(said):
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            sys.argv = ["coterie", *arguments]
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code)


@needs_fork
def test_a_folder_that_may_not_be_written(whole: Path, config: Config) -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to others
        os.chmod(place, 0o755)
        folder, errors = Path(place) / "run", Path(place) / "errors"
        errors.touch()
        experiment.run(config.with_run(rounds=2), folder, unwatched)
        text = (folder / "config.toml").read_text().replace("rounds = 2", "rounds = 3")
        (folder / "config.toml").write_text(text)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        assert as_nobody("resume", str(folder), errors=errors) == 2
        new = ["run", "--problem", "quadratic", "--rounds", "1", "--out", str(folder / "below")]
        assert as_nobody(*new, errors=errors) == 2, errors.read_text()
        said = errors.read_text()
        assert said.count("error:") == 2
        assert said.count("Permission denied") + said.count("permission denied") == 2
        assert "Traceback" not in said
        assert {path: path.read_bytes() for path in before} == before
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        experiment.resume(folder, unwatched)
        assert_same_results(whole, folder)


# torn checkpoints


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_checkpoint_torn_at_every_byte(tmp_path: Path, whole: Path, config: Config, stride: int) -> None:
    """Cut off there, or the rest filled with zeros as some file systems do: the one before is taken."""
    folder = tmp_path / "run"
    experiment.run(config.with_run(rounds=2), folder, unwatched)
    parts = assemble(config)
    template, settings = parts.method.init(parts.problem, parts.fed.n), parts.config.settings()
    newest = folder / "checkpoint" / "00000002.safetensors"
    data = newest.read_bytes()
    for length in range(0, len(data), stride):
        for torn in (data[:length], data[:length].ljust(len(data), b"\0")):
            if torn == data:
                continue
            newest.write_bytes(torn)
            _, progress, notes = checkpoint.load(folder / "checkpoint", template, settings)
            assert progress.rounds == 1, length
            assert notes[0].startswith("00000002.safetensors: it")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_run_with_a_torn_checkpoint_goes_on_from_the_one_before(
    tmp_path: Path, whole: Path, config: Config, share: float
) -> None:
    folder = tmp_path / "run"
    experiment.run(config.with_run(rounds=2), folder, unwatched)
    (folder / "config.toml").write_text((whole / "config.toml").read_text())
    newest = folder / "checkpoint" / "00000002.safetensors"
    data = newest.read_bytes()
    newest.write_bytes(data[: int(share * len(data))])
    summary = experiment.resume(folder, unwatched)
    assert summary["notes"][0].startswith("00000002.safetensors: it")
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert lines(folder / "metrics.jsonl") == lines(whole / "metrics.jsonl")
    older = folder / "checkpoint" / "00000002.safetensors"
    assert older.exists()


def test_where_both_are_torn_nothing_is_made_up(tmp_path: Path, config: Config) -> None:
    folder = tmp_path / "run"
    experiment.run(config.with_run(rounds=2), folder, unwatched)
    (folder / "config.toml").write_text((folder / "config.toml").read_text().replace("rounds = 2", "rounds = 3"))
    for path in (folder / "checkpoint").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    records = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(UsageError, match=r"no checkpoint .* can be used .*Start again in a new folder"):
        experiment.resume(folder, unwatched)
    assert (folder / "metrics.jsonl").read_bytes() == records


# clocks


def test_clocks_that_jump_change_nothing_but_seconds(
    tmp_path: Path, whole: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1e9, -1e9] * 1000)
    monkeypatch.setattr(loop, "perf_counter", lambda: next(times))
    monkeypatch.setattr("time.time", lambda: next(times))
    folder = tmp_path / "run"
    experiment.run(config.with_run(rounds=1), folder, unwatched)
    (folder / "config.toml").write_text((whole / "config.toml").read_text())
    experiment.resume(folder, unwatched)
    assert_same_results(whole, folder)


def test_the_faulty_run_is_eventful(whole: Path) -> None:
    """Else nothing above would have been tested under faults."""
    assert len(lines(whole / "events.jsonl")) >= 3
    assert EVENTFUL.faults == type(EVENTFUL.faults)()
