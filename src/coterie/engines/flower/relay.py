"""The client's side of a Flower app. Flower starts one process per message; this one imports nothing heavy, hands the
bytes to a worker that stays (`worker.py`) and returns its reply.

The worker is started at the first message. It listens on a socket in a folder that only its user can enter, keeps the
shard, the model and the client memory, and ends with the node, or after a while without orders.
"""

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from coterie.consent import search_path
from coterie.engines.flower.envelope import KIND, opened, sealed
from coterie.engines.frames import STALE, receive, send

STARTED: list[subprocess.Popen[bytes]] = []  # they outlive this process
START = 300.0  # seconds that a worker may take to import torch and load its data


def client_app(
    load_shard: str | Callable[..., Any],
    *,
    modules: tuple[str, ...] = (),
    shares_memory: bool = False,
    state: str | None = None,
    idle: float = 900.0,
    policy: str | None = None,
) -> ClientApp:
    """A ClientApp that runs coterie's works on its node's own rows.

    Args:
        load_shard: load_shard(node_config, run_config) returns a `ClientData`. Give it as "module:function", so that
            the short-lived process of Flower need not import it.
        modules: modules with works of your own that the server may name.
        shares_memory: whether the server may ask for client memory, for its records.
        state: the folder in which client memory is kept; by default one below the user's state directory.
        idle: seconds without orders after which the worker process ends.
        policy: the path of a TOML file at the node that limits what a server may ask for (`NodePolicy`). A file that
            the node's operator names, by `--node-config 'policy="…"'` or in the variable COTERIE_NODE_POLICY, comes
            before it.

    Example:
        >>> app = client_app("hospitals.data:load_shard")  # doctest: +SKIP
    """
    if not isinstance(load_shard, str):
        load_shard = f"{load_shard.__module__}:{load_shard.__qualname__}"
    app = ClientApp()
    settings = {"load": load_shard, "modules": list(modules), "shares_memory": shares_memory}
    settings |= {"state": state, "idle": idle, "policy": policy}

    @app.query(KIND)
    def relay(message: Message, context: Context) -> Message:
        reply = ask(opened(message.content), {**settings, **_about(context)})
        return Message(RecordDict({KIND: sealed(reply)}), reply_to=message)

    return app


def _about(context: Context) -> dict[str, Any]:
    return {
        "run": context.run_id,
        "node": context.node_id,
        "node_config": dict(context.node_config),
        "run_config": dict(context.run_config),
    }


def ask(data: bytes, settings: dict[str, Any]) -> bytes:
    """The worker's reply; it is started, or replaced by one for this run, where needed.

    Args:
        data: the bytes of an order.
        settings: those of `client_app`, with run, node and their configurations.
    """
    folder = private_folder(settings["node"])
    for _ in range(3):
        reply = _ask_worker(folder / "socket", data, settings["run"])
        if reply is not None and reply != STALE:
            return reply
        _start(folder, settings)
    raise RuntimeError(f"the worker does not answer; its log is {folder / 'log'}")


def private_folder(node: int) -> Path:
    """The private folder of a node's worker."""
    # sockets have short names: the system's folder for temporary files, not one deep below a home
    base = Path(os.environ.get("COTERIE_RUNTIME") or Path(tempfile.gettempdir()) / f"coterie-{os.getuid()}")
    for path in (base, base / str(node)):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise RuntimeError(f"{path} belongs to another user or is open to others; remove it")
    return base / str(node)


def _ask_worker(path: Path, data: bytes, run: int) -> bytes | None:
    """The reply of the worker behind a socket, or None where there is no worker."""
    try:
        with closing(socket.socket(socket.AF_UNIX)) as line:
            line.connect(str(path))
            send(line, run.to_bytes(8, "little"))
            send(line, data)
            return receive(line)
    except (FileNotFoundError, ConnectionError, EOFError):
        return None


def _start(folder: Path, settings: dict[str, Any]) -> None:
    """Start a worker and wait until it listens; of several that try at once, one does."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _ask_worker(folder / "socket", b"", settings["run"]) not in (None, STALE):
            return  # another relay was faster
        (folder / "socket").unlink(missing_ok=True)
        # the node's executor started this process: the worker ends with it
        started_with = {**settings, "folder": str(folder), "watch": os.getppid()}
        environment = {**os.environ, "PYTHONPATH": search_path()}
        with (folder / "log").open("wb") as log:
            worker = subprocess.Popen(
                [sys.executable, "-P", "-m", "coterie.engines.flower.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        STARTED.append(worker)
        assert worker.stdin is not None
        with worker.stdin as pipe:
            pipe.write(json.dumps(started_with).encode())
        deadline = time.monotonic() + START
        while not (folder / "socket").exists():
            if worker.poll() is not None or time.monotonic() > deadline:
                worker.kill()
                lines = (folder / "log").read_text(errors="replace").strip().splitlines()
                raise RuntimeError(f"the worker did not start: {lines[-1] if lines else 'it was too slow'}")
            time.sleep(0.02)
