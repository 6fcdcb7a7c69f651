"""What the tests share: one thread, the command line in this process, and looks at result folders."""

import json
import os
import signal
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from coterie import machine  # isort: skip  (fixes MKL's branch, so before torch is used)
import pytest
import torch
from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs so; our children must hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

# the same examples in every run, and no clock: a busy machine makes no test fail
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")

torch.set_num_threads(1)  # sums depend on it in the last bit, and small work only waits for threads


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of the promise that no bit depends on the chunk skip where the self-check says that it does."""
    if item.get_closest_marker("chunk_free") and machine.depends_on_chunk():
        pytest.skip(machine.concerns({})[-1])


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def coterie(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command line, run by its entry point in this process."""
    from coterie.cli import main

    def run(*arguments: Any) -> Done:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return Done(code if isinstance(code, int) else int(code is not None), *capsys.readouterr())

    return run


@pytest.fixture
def contents() -> Callable[[Path], dict[str, str]]:
    """Every file below a folder with its checksum: two are equal if nothing was touched."""

    def look(folder: Path) -> dict[str, str]:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}

    return look


@pytest.fixture
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power fails in a test, and not even SIGKILL loses what was written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def workers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids and comparisons make their runs in this process, one at a time: a worker takes longer to start than to run.

    What a process of its own is for, `experiment/test_compare.py` tests with real ones.
    """
    from coterie.errors import CoterieError, RunError
    from coterie.experiment import processes, worker

    turn = Lock()

    class Here:
        """A worker without a process."""

        is_there = True

        def __init__(self, threads: int, portable: bool) -> None:
            pass

        def make(self, config: Path, folder: Path) -> dict[str, Any]:
            try:
                with turn:
                    return worker.made(config, folder)
            except CoterieError as error:
                raise RunError(f"the run in {folder} failed: {error}") from None

        def stop(self) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(processes, "_Worker", Here)
