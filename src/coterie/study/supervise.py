"""A process that is started again when it ends, and the files that keep it running across restarts of a machine.

It waits for days: this module imports no torch.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from coterie import __version__
from coterie.engines.lifetime import Lifetime
from coterie.errors import CoterieError, RunError
from coterie.storage import sole_user

PAUSE = 5.0  # seconds before a process that ended is started again
QUICK = 20.0  # a process that ends sooner than this did not come up
ATTEMPTS = 5  # times in a row that it may not come up


class Task(NamedTuple):
    """What is kept running: FLARE's server at a coordinator, or FLARE's client at a site.

    Args:
        command: what is run.
        environment: added to the environment.
        folder: where it is run.
        log: takes its output; it is readable by its owner only.
        port: the port on which a server listens at last; a site has none.
        ready: what is printed then.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    log: str
    port: int | None = None
    ready: str = ""


def become(task: Task) -> NoReturn:
    """Keep a task running in place of this process, and without what it has imported: waiting needs no torch."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "coterie.study.supervise", json.dumps(task)])


def main(task: Task) -> None:
    """Keep a task running; the folder of a site is taken for as long as it runs."""
    try:
        with nullcontext() if task.port else sole_user(Path(task.folder)):
            supervise(task)
    except CoterieError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def supervise(task: Task) -> None:
    """Run a command until SIGTERM or Ctrl-C; where it ends by itself, start it again.

    Args:
        task: what is run.
    """
    log = Path(task.log)
    stopped = threading.Event()
    child: subprocess.Popen[bytes] | None = None

    def end(*_: Any) -> None:
        stopped.set()
        if child is not None:
            child.terminate()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    failed = 0
    try:
        while not stopped.is_set():
            begun = time.monotonic()
            with Lifetime("study") as life, _private_log(log) as output:  # whatever it starts ends with it, or with us
                start = output.tell()
                child = subprocess.Popen(
                    list(task.command),
                    env={**os.environ, **task.environment, **life.environment},
                    cwd=task.folder,
                    stdout=output,
                    stderr=output,
                )
                code = _wait(child, stopped, task)
            if stopped.is_set():
                return
            tail = _tail(log, start)
            if task.port is None and (reason := explain(tail)) is not None:
                raise RunError(reason)
            failed = failed + 1 if time.monotonic() - begun < QUICK else 0
            if failed >= ATTEMPTS:
                last = (tail.strip().splitlines() or [""])[-1]
                raise RunError(f"it ended {ATTEMPTS} times in a row (code {code}): {last[:200]}. The log is {log}.")
            stopped.wait(PAUSE)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listens(host: str, port: int, seconds: float = 2.0) -> bool:
    """Whether somebody listens at an address."""
    try:
        with socket.create_connection((host, port), seconds):
            return True
    except OSError:
        return False


def explain(text: str) -> str | None:
    """What is wrong where a site's client ends, from the end of its log; None where it should be started again."""
    low = text.lower()
    if "duplicate" in low or "already registered" in low or "already exists" in low:
        return "another site is connected with this invitation; each invitation is for one site."
    if "certificate has expired" in low or "certificate_expired" in low:
        return "a certificate has expired; ask the coordinator for another invitation."
    if "certificate_verify_failed" in low or "certificate verify failed" in low:
        return "the coordinator's certificate does not fit this invitation; ask for another one."
    return None


def _private_log(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def _wait(child: subprocess.Popen[bytes], stopped: threading.Event, task: Task) -> int:
    port = task.port
    while True:
        if port is not None and listens("localhost", port):
            port = None
            print(task.ready, flush=True)
        try:
            return child.wait(1.0)
        except subprocess.TimeoutExpired:
            if stopped.is_set():
                break
    try:
        return child.wait(10.0)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read()[-20_000:].decode(errors="replace")


def unit(description: str, command: Sequence[str]) -> str:
    """A systemd unit of the user's that runs a command of coterie, and runs it again after a restart."""
    line = shlex.join([sys.executable, "-m", "coterie", *command]).replace("%", "%%").replace("$", "$$")
    return f"""\
[Unit]
Description={description}
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={line}
Restart=always
RestartSec=10
NoNewPrivileges=yes
PrivateTmp=yes
UMask=0077

[Install]
WantedBy=default.target
"""


def dockerfile(
    extra: str, command: Sequence[str], *, folders: Sequence[tuple[Path, bool]] = (), ports: Sequence[int] = ()
) -> str:
    """A Dockerfile that runs a command of coterie.

    Args:
        extra: of coterie's packages, the one that the engine needs.
        command: of coterie.
        folders: folders of this machine that the command uses, each with whether it is written to; they are mounted
            under the same names, so that stored paths hold inside too.
        ports: ports on which the command listens.
    """
    mounts = [f"-v {shlex.quote(f'{path}:{path}' + ('' if writes else ':ro'))}" for path, writes in folders]
    opened = [f"-p {port}:{port}" for port in ports]
    run = ["docker run -d --restart unless-stopped", '--user "$(id -u):$(id -g)"', *opened, *mounts, "coterie-study"]
    lines = " \\\n#     ".join(run)
    return f"""\
# docker build -t coterie-study -f Dockerfile .
# {lines}
FROM python:3.12-slim
RUN pip install --no-cache-dir 'coterie[{extra}]=={__version__}'
ENV HOME=/tmp
WORKDIR /tmp
CMD {json.dumps(["coterie", *command])}
"""


if __name__ == "__main__":
    main(Task(*json.loads(sys.argv[1])))
