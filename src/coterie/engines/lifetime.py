"""Deployments on this machine: whatever a run has started is ended with it, however the run itself ends.

A `Lifetime` is a private folder and a mark, a random word that every process of the deployment inherits in its
environment. A small keeper process waits for the end of the run's own process and then ends all that have the mark,
also after SIGKILL. A record in the user's runtime folder names owner, processes and folder, so that the next run can do
the same where the keeper was killed too.

Only the standard library is imported here: the keeper starts within milliseconds and needs no package.
"""

import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

MARK = "COTERIE_DEPLOYMENT"
PATIENCE = 5.0  # seconds between the request to end and the kill
CHECK = 0.1  # seconds between two looks at the processes that shall end
POLL = 0.5  # seconds between two looks of the keeper at its parent
HAS_PROC = Path("/proc/self/environ").exists()


class Process(NamedTuple):
    """A process: its number and the time of its start, which together never name another one, and its command."""

    pid: int
    start: str
    command: str


class Record(NamedTuple):
    """What is known of a deployment; `owner` is the process that runs it, `place` the machine or container."""

    engine: str
    mark: str
    owner: Process
    begun: str
    folder: str | None
    place: str = ""
    started: tuple[Process, ...] = ()

    @property
    def path(self) -> Path:
        """The file of this record."""
        return runtime_folder() / f"{self.mark}.json"

    @property
    def is_left_over(self) -> bool:
        """Whether the process that ran it is gone; of another place nothing is known."""
        return self.place == _place() and _start_of(self.owner.pid) != self.owner.start

    def write(self) -> None:
        """Write the file, whole or not at all."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self._asdict()), encoding="utf-8")
        os.replace(part, self.path)

    def processes(self) -> list[Process]:
        """Its processes that are alive: recorded or marked ones, and all their descendants."""
        table = dict(_table(self.mark))
        recorded = {(process.pid, process.start) for process in self.started}
        found = {pid for pid, (_, marked, process) in table.items() if marked or (pid, process.start) in recorded}
        while children := {pid for pid, (parent, _, _) in table.items() if parent in found} - found:
            found |= children
        return sorted(table[pid][2] for pid in found - {os.getpid(), self.owner.pid})

    def end(self) -> list[Process]:
        """End its processes, politely and then not, and remove its folder; the processes that were ended.

        The record stays where something could not be ended.
        """
        ended: set[Process] = set()
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline, asked = time.monotonic() + PATIENCE, set[Process]()
            while (left := self.processes()) and time.monotonic() < deadline:
                for process in set(left) - asked:
                    _send(process, number)
                asked |= set(left)
                time.sleep(CHECK)
            ended |= asked - set(left)
            if not left:
                self.forget()
                break
        return sorted(ended)

    def forget(self) -> None:
        """Remove the folder with keys and logs, and the record."""
        if self.folder is not None and not Path(self.folder).is_symlink():
            shutil.rmtree(self.folder, ignore_errors=True)
        self.path.unlink(missing_ok=True)


class Lifetime:
    """A deployment of this process. Use it in a `with` statement; everything is ended and removed at its end.

    Args:
        engine: The name of what is started.

    ```
    with Lifetime("nvflare") as life:
        subprocess.Popen(command, cwd=life.folder, env={**os.environ, **life.environment})
    ```
    """

    def __init__(self, engine: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="coterie-"))
        begun = time.strftime("%Y-%m-%d %H:%M:%S")
        owner = Process(os.getpid(), _start_of(os.getpid()) or "", "coterie")
        self.record = Record(engine, secrets.token_hex(16), owner, begun, str(self.folder), _place())
        self.record.write()
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self.record.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name != MARK},
            start_new_session=True,
        )

    @property
    def environment(self) -> dict[str, str]:
        """What the environment of its processes must have."""
        return {MARK: self.record.mark}

    def __enter__(self) -> "Lifetime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def inherited(self) -> AbstractContextManager[None]:
        """Processes that a library starts from this one are part of the deployment."""
        return with_variable(MARK, self.record.mark)

    def note(self) -> None:
        """Record the processes as they are now."""
        self.record = self.record._replace(started=tuple(self.record.processes()))
        self.record.write()

    def close(self) -> None:
        """End all processes, remove the folder and the record, and dismiss the keeper."""
        self.record.end()
        with suppress(BrokenPipeError):
            self._keeper.communicate(b"over")


@contextmanager
def with_variable(name: str, value: str) -> Iterator[None]:
    """A variable of the environment, for as long as the `with` statement lasts."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def records() -> list[Record]:
    """All deployments of this user on this machine, the oldest first."""
    found = []
    for path in runtime_folder().glob("*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):  # removed just now, or of another version of coterie
            found.append(_read(path))
    return sorted(found, key=lambda record: record.begun)


def end_left_over() -> str | None:
    """End what is left of runs that were killed together with their keepers; a sentence about it."""
    left = [record for record in records() if record.is_left_over]
    if not left:
        return None
    count = sum(len(record.end()) for record in left)
    names = ", ".join(f"{record.engine} of {record.begun}" for record in left)
    return f"{count} processes and {len(left)} folders that killed runs had left are ended and removed ({names})."


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody uses now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def runtime_folder() -> Path:
    """The folder of records, which only this user can enter."""
    usual = Path(f"/run/user/{os.getuid()}")  # the same from a shell, a desktop and a timer
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or (usual if usual.is_dir() else tempfile.gettempdir()))
    folder = base / f"coterie-{os.getuid()}" / "deployments"
    for path in (folder.parent, folder):
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            from coterie.errors import UsageError

            raise UsageError(f"{path} belongs to another user or is open to others; remove it or set XDG_RUNTIME_DIR.")
    return folder


def _read(path: Path) -> Record:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    started = tuple(Process(*process) for process in found["started"])
    return Record(**{**found, "owner": Process(*found["owner"]), "started": started})


def _send(process: Process, number: signal.Signals) -> None:
    """Send a signal to this very process, not to another one that has got its number since."""
    with suppress(ProcessLookupError):
        if not hasattr(os, "pidfd_open"):
            if _start_of(process.pid) == process.start:
                os.kill(process.pid, number)
            return
        handle = os.pidfd_open(process.pid)
        try:
            if _start_of(process.pid) == process.start:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _place() -> str:
    """This machine and, in a container, its own numbering of processes: several can share a runtime folder."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid') if HAS_PROC else ''}"


def _start_of(pid: int) -> str | None:
    """When a process was started, in a form that differs between boots; None where there is no such process."""
    if HAS_PROC:
        stat = _stat(pid)
        return None if stat is None or stat[0] == "Z" else f"{_boot()}-{stat[19]}"
    start = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return start or None


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state, parent …"""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _table(mark: str) -> Iterable[tuple[int, tuple[int, bool, Process]]]:
    """Every process that can be seen: its number, its parent, whether it has the mark, and which it is."""
    if not HAS_PROC:
        yield from _table_of_ps(mark)
        return
    boot, needle = _boot(), f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(folder.name))
        if stat is None or stat[0] == "Z":
            continue
        try:
            marked = needle in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or it has ended
            marked = False
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        yield int(folder.name), (int(stat[1]), marked, Process(int(folder.name), f"{boot}-{stat[19]}", command))


def _table_of_ps(mark: str) -> Iterable[tuple[int, tuple[int, bool, Process]]]:
    """The same by `ps`, which shows the environments of this user's processes."""
    command = ["ps", "axeww", "-o", "pid=,ppid=,lstart=,command="]
    environment = {**os.environ, "LC_ALL": "C"}
    for line in subprocess.run(command, capture_output=True, text=True, env=environment).stdout.splitlines():
        pid, parent, *rest = line.split(None, 7)
        start, words = " ".join(rest[:5]), rest[5] if len(rest) > 5 else ""
        yield int(pid), (int(parent), f"{MARK}={mark}" in words.split(), Process(int(pid), start, words[:200]))


def _keep(path: Path) -> None:
    """The keeper's side: wait for the end of the process that started this one, then end what it has left."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    with suppress(FileNotFoundError):  # without its record a deployment is over, perhaps before this process began
        owner = _read(path).owner
        while os.getppid() == owner.pid and not select.select([sys.stdin], [], [], POLL)[0]:
            continue
        _read(path).end()


if __name__ == "__main__":
    _keep(Path(sys.argv[1]))
