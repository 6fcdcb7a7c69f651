"""Runs whose server is another process, of Flower or FLARE: it leaves an answer, and whoever started it follows."""

import json
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, RunError, UsageError

LOOK = 0.3  # seconds between two looks at the result folder
STOPPED = {"error": "the server's app was stopped; `coterie resume` goes on.", "exit_code": 1}


def leave_answer(place: Path, run: Callable[[], dict[str, Any]]) -> None:
    """Run, and leave the summary or what went wrong; nothing where whoever started this is on another machine."""
    from coterie.storage import write_json  # brings torch, which Flower's client processes do without

    answer: dict[str, Any] = STOPPED
    try:
        answer = {"summary": run()}
    except CoterieError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    except Exception:
        answer = {"error": traceback.format_exc(), "exit_code": 1}
        raise
    finally:
        if place.name and place.parent.is_dir():
            write_json(place, answer)


def answered(place: Path) -> dict[str, Any]:
    """The summary that was left, or the error."""
    said = json.loads(place.read_text(encoding="utf-8"))
    if "summary" in said:
        summary: dict[str, Any] = said["summary"]
        return summary
    kind: type[CoterieError] = UsageError if said["exit_code"] == 2 else RunError
    raise kind(said["error"])


def unwatched(name: str, is_baseline: bool) -> None:
    """Nobody watches the rounds there; they are told from the result folder."""


def speaker(options: dict[str, Any]) -> Callable[[str], None]:
    """Says things on standard error, but not where JSON was asked for."""
    return lambda text: None if options.get("json") else print(text, file=sys.stderr, flush=True)


def tell(metrics: Path, told: int, say: Callable[[str], None]) -> int:
    """Say what was recorded since the last look."""
    if not metrics.is_file():
        return told
    lines = metrics.read_text(encoding="utf-8").split("\n")[:-1]
    for line in lines[told:]:
        found = json.loads(line)
        measures = [f"{k} {v:.4g}" for k, v in found.items() if isinstance(v, float) and k != "seconds"][:4]
        say(f"round {found['round']}: {', '.join(measures)} ({found['seconds']:.0f} s)")
    return len(lines)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, so that everything it started is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise RunError("stopped by the user; what was saved is intact, and `coterie resume` goes on.") from None
    finally:
        signal.signal(signal.SIGTERM, before)
