"""The child process of a site in which works run: the site's own process only hands bytes on.

A child that was killed is started again at the next order; what its client remembers is in a folder.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.consent import resolve, search_path
from coterie.engines.frames import receive, send

if TYPE_CHECKING:
    from coterie.federation.remote import Node

STUDY = "coterie.study.node"  # loads a site's own rows, under the site's own terms
CUSTOM = "custom"  # FLARE's folder of a job's own files


class Lost(Exception):
    """The compute process of a site has ended; the next order starts another one."""


class Compute:
    """The parent's side: starts the child when it is needed, and asks it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self._child: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._lock = threading.Lock()

    def ask(self, order: bytes) -> bytes:
        """The child's reply."""
        with self._lock:
            if self._line is None:
                self._start()
            assert self._line is not None
            try:
                send(self._line, order)
                return receive(self._line)
            except (OSError, EOFError):
                code = self._ended()
                raise Lost(f"its compute process has ended (code {code}); it is started again") from None

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._ended()

    @property
    def process(self) -> int | None:
        """The number of the child, if there is one."""
        return None if self._child is None else self._child.pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": search_path()}
        with theirs:
            command = [sys.executable, "-P", "-m", "coterie.engines.nvflare.compute", str(theirs.fileno())]
            self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self._line = ours
        send(ours, json.dumps(self.settings).encode())

    def _ended(self) -> int | None:
        if self._line is not None:
            self._line.close()  # at which the child ends
        code = None
        if self._child is not None:
            try:
                code = self._child.wait(5.0)
            except subprocess.TimeoutExpired:
                self._child.kill()
                code = self._child.wait()
        self._line = self._child = None
        return code


def main() -> None:
    """The child's side: build the node, then answer until the parent hangs up."""
    with socket.socket(fileno=int(sys.argv[1])) as line:
        try:
            node = _node(json.loads(receive(line)))
            while True:
                send(line, node.handle(receive(line)))
        except (EOFError, ConnectionError):
            return


def _node(settings: dict[str, Any]) -> "Node":
    """The node of this site: of a configured problem, or of the rows that the project's own loader gives."""
    from coterie.engines.load import client_folder, load_node, read_config

    name, client = settings["load"], settings["client"]
    memory = Path(settings["memory"]) if settings["memory"] else None

    def load() -> Any:
        if name:
            module = name.partition(":")[0]
            admitted = [module] if module == STUDY or _came_with_the_job(module) else None
            job = [settings["job"]] if module == STUDY else []
            return resolve(name, "load", admitted)(settings["site"], *job)
        from coterie.experiment.build import node_of

        return node_of(read_config(settings["config"]), (client,), folder=client_folder(memory, client))

    return load_node(
        load,
        client=client,
        memory=memory,
        modules=settings.get("modules", ()),
        shares_memory=settings.get("shares_memory", False),
        policy=settings.get("policy"),
    )


def _came_with_the_job(module: str) -> bool:
    """Whether a module is one of the job's own files, which the site's FLARE has let in; others need consent here."""
    top = module.partition(".")[0]
    spec = find_spec(top) if top.isidentifier() else None
    if spec is None or spec.origin is None:
        return False
    folders = [Path(entry).resolve() for entry in sys.path if Path(entry).name == CUSTOM]
    return any(Path(spec.origin).resolve().is_relative_to(folder) for folder in folders)


def sealed(settings: dict[str, Any]) -> str:
    """Settings as text without braces, which FLARE takes for names of variables; JSON itself writes ASCII only."""
    return json.dumps(settings).translate({ord("{"): "‹", ord("}"): "›"})


def opened(text: str) -> dict[str, Any]:
    """The settings again."""
    settings: dict[str, Any] = json.loads(text.translate({ord("‹"): "{", ord("›"): "}"}))
    return settings


if __name__ == "__main__":
    main()
