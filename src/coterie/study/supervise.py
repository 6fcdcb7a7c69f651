"""A process that is started again when it ends, and the files that keep it running across restarts of a machine."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from coterie import __version__
from coterie.engines.lifetime import Lifetime
from coterie.errors import RunError

PAUSE = 5.0  # seconds before a process that ended is started again
QUICK = 20.0  # a process that ends sooner than this did not come up
ATTEMPTS = 5  # times in a row that it may not come up


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    *,
    explain: Callable[[str], str | None] = lambda text: None,
) -> None:
    """Run a command until SIGTERM or Ctrl-C; where it ends by itself, start it again.

    Args:
        command: what is run.
        environment: added to the environment.
        folder: where it is run.
        log: takes its output; it is readable by its owner only.
        explain: what is wrong, from the end of the log; where it says something, the command is not run again.
    """
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
                    list(command),
                    env={**os.environ, **environment, **life.environment},
                    cwd=folder,
                    stdout=output,
                    stderr=output,
                )
                code = _wait(child, stopped)
            if stopped.is_set():
                return
            tail = _tail(log, start)
            if (reason := explain(tail)) is not None:
                raise RunError(reason)
            failed = failed + 1 if time.monotonic() - begun < QUICK else 0
            if failed >= ATTEMPTS:
                last = (tail.strip().splitlines() or [""])[-1]
                raise RunError(f"it ended {ATTEMPTS} times in a row (code {code}): {last[:200]}. The log is {log}.")
            stopped.wait(PAUSE)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _private_log(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def _wait(child: subprocess.Popen[bytes], stopped: threading.Event) -> int:
    while True:
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
