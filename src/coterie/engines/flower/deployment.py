"""Flower's processes on this machine: a SuperLink, SuperNodes and runs, all ended when it is over, whatever happens."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from coterie.engines.lifetime import Lifetime, free_ports
from coterie.errors import RunError

OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
NAME = "coterie"  # of the connection in Flower's configuration
START = 60.0


class Keys(NamedTuple):
    """TLS files of the SuperLink; with `authenticate`, SuperNodes need a registered key too."""

    authority: Path
    certificate: Path
    key: Path
    authenticate: bool = True


class Deployment:
    """Flower's processes and their folder (configuration, logs, sockets). Use it in a `with` statement.

    Args:
        folder: An existing folder, which stays; by default a temporary one, which is removed at the end.
        keys: TLS files; by default the connections, on loopback only, are plain.
    """

    def __init__(self, folder: Path | None = None, keys: Keys | None = None) -> None:
        self.life = Lifetime("flower")
        self.folder, self.keys = folder or self.life.folder, keys
        (self.port,) = free_ports(1)
        self.address = f"127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (self.folder / "flwr").mkdir()
        trust = (
            "insecure = true" if keys is None else f"root-certificates = {json.dumps(str(keys.authority.resolve()))}"
        )
        text = f"[superlink.{NAME}]\naddress = {json.dumps(self.address)}\n{trust}\n"
        (self.folder / "flwr" / "config.toml").write_text(text, encoding="utf-8")

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def superlink(self, *more: str) -> None:
        """Start the SuperLink and wait until it listens."""
        secure = ["--insecure"]
        if self.keys is not None:
            secure = ["--ssl-ca-certfile", str(self.keys.authority), "--ssl-certfile", str(self.keys.certificate)]
            secure += ["--ssl-keyfile", str(self.keys.key)]
            secure += ["--enable-supernode-auth"] if self.keys.authenticate else []
        self.start("superlink", "flower-superlink", *secure, "--host", "127.0.0.1", "--port", str(self.port), *more)
        self._until_listening("superlink", self.port)
        self.life.note()

    def supernode(
        self, client: int, clients: int, *more: str, name: str | None = None, insecure: bool | None = None
    ) -> str:
        """Start the SuperNode of a client; its name."""
        name = name or f"supernode-{client}"
        plain = self.keys is None if insecure is None else insecure
        trust = ["--insecure"] if plain or self.keys is None else ["--root-certificates", str(self.keys.authority)]
        at = ["--superlink", self.address, "--host", "127.0.0.1", "--port", str(free_ports(1)[0])]
        config = f"partition-id={client} num-partitions={clients}"
        self.start(name, "flower-supernode", *trust, *at, "--node-config", config, *more)
        return name

    def start(self, name: str, program: str, *arguments: str, **more: str) -> None:
        """Start one process; it ends if this process does."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [_program(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(more),
                start_new_session=True,
            )

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """The output of one of Flower's own commands.

        It runs in the deployment's folder: Flower takes the name of a connection for an app where it finds a folder of
        that name.
        """
        done = subprocess.run(
            [_program("flwr"), *arguments, "--format", "json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self.environment({}),
            cwd=self.folder,
            timeout=120,
        )
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            answer = {"success": False, "error-message": (done.stderr or done.stdout).decode(errors="replace")[-500:]}
        if not answer.get("success", True):
            raise RunError(f"flwr {arguments[0]} failed: {answer.get('error-message', '')}")
        return answer

    def submit(self, app: Path, superlink: str = NAME, *, nodes: int | None = None) -> str:
        """Start a run of an app; its id.

        Args:
            app: the folder of the app.
            superlink: the name of the connection in Flower's configuration.
            nodes: the number of simulated nodes, for a SuperLink with --simulation.
        """
        simulated = f"num-supernodes={nodes} client-resources-num-cpus=1"
        more = [] if nodes is None else ["--federation-config", simulated]
        return str(self.flwr("run", str(app.resolve()), superlink, *more)["run-id"])

    def status(self, run: str, superlink: str = NAME) -> str:
        """The status of a run: "running", "finished:completed" …"""
        runs = self.flwr("list", superlink, "--run-id", run).get("runs", [{}])
        return str(runs[0].get("status", "unknown"))

    def ended(self) -> list[str]:
        """The names of processes that have ended by themselves."""
        return [name for name, process in self.processes.items() if process.poll() is not None]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End a process as if its machine had failed; those that it started see it go and end too."""
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait()

    def close(self) -> None:
        """End everything, politely and then not."""
        self.life.close()
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        self.processes.clear()

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """The environment of Flower's processes: no telemetry, programs and configuration of this deployment."""
        here = str(Path(sys.executable).parent)
        (self.folder / "run").mkdir(exist_ok=True, mode=0o700)
        return {
            **os.environ,
            **OFFLINE,
            **self.life.environment,
            "PATH": os.pathsep.join([here, os.environ.get("PATH", "")]),
            "FLWR_HOME": str(self.folder / "flwr"),
            "COTERIE_RUNTIME": str(self.folder / "run"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **more,
        }

    def log(self, name: str) -> str:
        """The log of a process."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _until_listening(self, name: str, port: int) -> None:
        deadline = time.monotonic() + START
        while time.monotonic() < deadline and self.processes[name].poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.1)
        raise RunError(f"Flower's {name} did not start: {self.log(name)[-300:]}")


def _program(name: str) -> str:
    """Flower's program beside this Python."""
    path = Path(sys.executable).parent / name
    return str(path) if path.exists() else name
