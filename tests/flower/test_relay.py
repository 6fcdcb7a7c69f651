"""The relay, which Flower starts for every message, and the worker that stays."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra coterie[flower] is not installed")

from coterie.engines.flower import relay
from coterie.federation.remote.codec import Names, decode, encode
from coterie.federation.remote.messages import PROTOCOL, Declaration, Order

WHO = encode(Order(PROTOCOL, 1, "whoami", "r", (), None, ()))


@pytest.fixture
def node(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the node; workers end with it."""
    monkeypatch.setenv("COTERIE_RUNTIME", str(tmp_path_factory.mktemp("s")))
    os.chmod(os.environ["COTERIE_RUNTIME"], 0o700)
    with subprocess.Popen(["sleep", "1000"]) as process:
        monkeypatch.setattr(relay.os, "getppid", lambda: process.pid)
        yield process
        process.kill()


def about(**changes: Any) -> dict[str, Any]:
    how = {"load": "worker_data:load", "modules": [], "shares_memory": False, "state": None, "idle": 300.0}
    where = {"run": 7, "node": 12, "node_config": {"partition-id": 4}, "run_config": {"rows": 5}}
    return {**how, **where, **changes}


def declaration(**changes: Any) -> Declaration:
    return decode(relay.ask(WHO, about(**changes)), Names()).content  # type: ignore[no-any-return]


def workers() -> set[int]:
    """The workers of this test that are alive."""
    return {worker.pid for worker in relay.STARTED if worker.poll() is None}


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_client_s_side_does_not_import_torch() -> None:
    code = "import coterie.engines.flower.relay, coterie.engines.flower.tryout, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_worker_stays_is_replaced_for_another_run_and_ends_with_its_node(node: subprocess.Popen[bytes]) -> None:
    assert declaration().rows == (5,)
    assert declaration().clients == (4,)
    (first,) = workers()
    assert declaration(run=8, run_config={"rows": 6}).rows == (6,)
    eventually(lambda: first not in workers())
    (second,) = workers()
    os.kill(second, signal.SIGKILL)  # its socket is left behind
    assert declaration(run=8, run_config={"rows": 6}).rows == (6,)
    node.kill()
    node.wait()
    eventually(lambda: not workers())
    assert not (relay.private_folder(12) / "socket").exists()


def test_a_loader_that_fails_is_named(node: subprocess.Popen[bytes]) -> None:
    with pytest.raises(RuntimeError, match=r"FileNotFoundError: rows\.csv is not here"):
        declaration(load="worker_data:fail")


def test_the_folder_is_private(node: subprocess.Popen[bytes]) -> None:
    place = relay.private_folder(3)
    assert place.stat().st_mode & 0o777 == 0o700
    Path(place).chmod(0o755)
    with pytest.raises(RuntimeError, match="open to others"):
        relay.private_folder(3)
