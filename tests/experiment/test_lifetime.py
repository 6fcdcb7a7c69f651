"""Deployments end with the run that started them, whatever ends it; and only what is ours is ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.engines import lifetime
from coterie.engines.lifetime import MARK, Lifetime, Process, Record, end_left_over, free_ports, records
from coterie.errors import UsageError

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"

# a run whose service restarts what it has started, in sessions of their own, as FLARE's do
RUN = """
import subprocess, sys, time
from coterie.engines.lifetime import Lifetime
service = "while true; do setsid sleep 600; done"
with Lifetime("example") as life:
    (life.folder / "key.pem").write_text("secret")
    with life.inherited():
        subprocess.Popen(["bash", "-c", service], start_new_session=True)
    while len(life.record.processes()) < 2:
        time.sleep(0.01)
    life.note()
    print(life.record.mark, life._keeper.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").mkdir(mode=0o700)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def run() -> Iterator[tuple[subprocess.Popen[str], Record, int]]:
    """A run in a process of its own, its record, and its keeper's number."""
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        mark, keeper = process.stdout.readline().split()
        (record,) = (one for one in records() if one.mark == mark)
        yield process, record, int(keeper)
        process.kill()
    record.end()


def until(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60.0
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


Run = tuple[subprocess.Popen[str], Record, int]


def test_everything_goes_when_the_run_is_killed(run: Run) -> None:
    process, record, _ = run
    assert len(record.processes()) >= 2  # the service and what it started, in another session
    assert not record.is_left_over
    process.kill()
    until(lambda: not record.path.exists())
    assert record.processes() == []
    assert not Path(str(record.folder)).exists()  # keys included


def test_what_a_killed_keeper_leaves_is_ended_by_the_next_run(run: Run) -> None:
    process, record, keeper = run
    os.kill(keeper, signal.SIGKILL)
    assert end_left_over() is None  # the run is in progress
    assert len(record.processes()) >= 2
    process.kill()
    process.wait()
    assert "processes and 1 folders that killed runs had left" in str(end_left_over())
    assert (record.processes(), records(), end_left_over()) == ([], [], None)
    assert not Path(str(record.folder)).exists()


def test_what_another_machine_or_container_has_recorded_is_left_alone() -> None:
    """Its numbers of processes mean nothing here, where the runtime folder is shared."""
    with Lifetime("example") as life:
        elsewhere = life.record._replace(place="another", owner=Process(2**22 + 1, "0-0", ""))
        elsewhere.write()
        assert end_left_over() is None
        assert life.folder.is_dir()
        elsewhere._replace(place=life.record.place).write()
        assert "0 processes" in str(end_left_over())
        assert not life.folder.exists()


def test_the_end_removes_processes_folder_and_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "PATIENCE", 60.0)
    with Lifetime("example") as life:
        child = subprocess.Popen(SLEEP, env={**os.environ, **life.environment})
        assert [process.pid for process in life.record.processes()] == [child.pid]
        assert life.folder.stat().st_mode & 0o077 == 0
    assert child.wait() == -signal.SIGTERM
    assert not life.folder.exists()
    assert records() == []
    assert life._keeper.returncode == 0


def test_an_error_ends_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "PATIENCE", 60.0)
    life = Lifetime("example")
    child = subprocess.Popen(SLEEP, env={**os.environ, **life.environment})
    with pytest.raises(ZeroDivisionError), life:
        raise ZeroDivisionError
    assert child.wait() == -signal.SIGTERM
    assert not life.folder.exists()


def test_a_process_that_ignores_the_request_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "PATIENCE", 0.3)
    with Lifetime("example") as life:
        command = [sys.executable, "-I", "-S", "-c", STUBBORN]
        child = subprocess.Popen(command, env={**os.environ, **life.environment}, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL


def test_a_recorded_number_that_is_another_process_now_is_left_alone() -> None:
    """Numbers of processes are used again; the time of the start tells."""
    child = subprocess.Popen(SLEEP)
    try:
        start = lifetime._start_of(child.pid)
        assert start is not None
        gone = Process(2**22 + 1, "0-0", "")
        other = Record("example", "f" * 32, gone, "", None, "", (Process(child.pid, "0-0", ""),))
        assert other.processes() == []
        lifetime._send(Process(child.pid, "0-0", ""), signal.SIGKILL)
        assert child.poll() is None
        same = other._replace(started=(Process(child.pid, start, ""),))
        assert [process.pid for process in same.processes()] == [child.pid]
        assert [process.pid for process in same.end()] == [child.pid]
    finally:
        child.kill()
        child.wait()


def test_ps_tells_the_same_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    if subprocess.run(["sh", "-c", "command -v ps"], stdout=subprocess.DEVNULL).returncode:
        pytest.skip("ps is not installed")
    monkeypatch.setattr(lifetime, "HAS_PROC", False)
    with Lifetime("example") as life:
        child = subprocess.Popen(SLEEP, env={**os.environ, **life.environment})
        (found,) = life.record.processes()
        assert (found.pid, found.start) == (child.pid, lifetime._start_of(child.pid))
        assert not life.record.is_left_over
    assert child.wait() == -signal.SIGTERM


def test_the_mark_is_inherited_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "outer")
    with Lifetime("example") as life:
        with life.inherited():
            assert os.environ[MARK] == life.record.mark
        assert os.environ[MARK] == "outer"


def test_records_that_cannot_be_read_hinder_nobody() -> None:
    with Lifetime("example") as life:
        life.record.path.with_name("torn.json").write_text("{")
        life.record.path.with_name("newer.json").write_text(json.dumps({"version": 9}))
        assert records() == [life.record]


def test_a_runtime_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "runtime" / f"coterie-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(UsageError, match="XDG_RUNTIME_DIR"):
        records()


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
