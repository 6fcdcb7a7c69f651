"""Ending: by SIGTERM as by Ctrl-C; a worker with its parent or its node, a server's app with its SuperLink."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

LOOK = 0.5  # seconds between two looks where the system cannot tell by itself
GRACE = 20.0  # seconds to save what there is


def when_ended(process: int, then: Callable[[], None]) -> None:
    """Do something, in a thread, as soon as a process that is no child of this one has ended."""

    def look() -> None:
        _until_ended(process)
        then()

    threading.Thread(target=look, daemon=True).start()


def end_with_parent(parent: int | None = None) -> None:
    """Stop as by SIGTERM when the process that started this one is gone, and end for good a little later.

    Else a worker would finish its run for nobody, and Flower's server app go on asking a SuperLink that was killed;
    both would keep the result folder to themselves.

    Args:
        parent: the process that started this one. Without it the present parent is taken, which is another one where
            the first has ended already.
    """

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    when_ended(os.getppid() if parent is None else parent, end)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM interrupts this process as Ctrl-C does, so that it can save its state and end what it started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _until_ended(process: int) -> None:
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):
            select.select([os.pidfd_open(process)], [], [])
            return
    with suppress(OSError):
        while True:
            os.kill(process, 0)
            time.sleep(LOOK)
