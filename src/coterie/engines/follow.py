"""Runs whose server is another process, of Flower or FLARE: that process writes its result into a file, and the process
that started it follows the run until the file is there."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, RunError, UsageError
from coterie.experiment.watching import terminable

Log = Callable[[str], None]

POLL = 0.3  # seconds between two reads of the result folder
STATUS_EVERY = 15.0  # seconds between two questions about the status, which take an engine a second or more
SILENT = 4  # failed questions in a row after which an engine is taken to be gone
OVER = ("finished", "stopped", "failed", "aborted", "abandoned")  # in the words of Flower and FLARE
STOPPED = {"error": "the server's app was stopped; `coterie resume` goes on.", "exit_code": 1}


def write_result(path: Path, run: Callable[[], dict[str, Any]]) -> None:
    """Run, and write the summary or the error into a file, unless its folder is on another machine.

    Args:
        path: the file; nothing is written where it has no name or its folder is not here.
        run: what returns the summary.
    """
    from coterie.storage import write_json  # imports torch, which Flower's client processes do without

    result: dict[str, Any] = STOPPED
    try:
        result = {"summary": run()}
    except CoterieError as error:
        result = {"error": str(error), "exit_code": error.exit_code}
    except Exception:
        result = {"error": traceback.format_exc(), "exit_code": 1}
        raise
    finally:
        if path.name and path.parent.is_dir():
            write_json(path, result)


def read_result(path: Path) -> dict[str, Any]:
    """The summary that `write_result` wrote; its error is raised again."""
    result = json.loads(path.read_text(encoding="utf-8"))
    if "summary" in result:
        summary: dict[str, Any] = result["summary"]
        return summary
    kind: type[CoterieError] = UsageError if result["exit_code"] == 2 else RunError
    raise kind(result["error"])


def no_observer(name: str, is_baseline: bool) -> None:
    """No observer in the server's process: the rounds are read from the result folder."""


def stderr_logger(options: dict[str, Any]) -> Log:
    """Prints lines on standard error; none where the options ask for JSON."""
    return lambda text: None if options.get("json") else print(text, file=sys.stderr, flush=True)


def print_new_rounds(metrics: Path, printed: int, log: Log) -> int:
    """Log the rounds that were recorded after the first `printed` ones; the number of rounds in the file."""
    if not metrics.is_file():
        return printed
    lines = metrics.read_text(encoding="utf-8").split("\n")[:-1]
    for line in lines[printed:]:
        record = json.loads(line)
        measures = [f"{k} {v:.4g}" for k, v in record.items() if isinstance(v, float) and k != "seconds"][:4]
        log(f"round {record['round']}: {', '.join(measures)} ({record['seconds']:.0f} s)")
    return len(lines)


def how_to_resume(folder: Path) -> str:
    """The end of an error text about a run that ended too early."""
    return f"What was saved is intact. Resume it with: coterie resume {folder}"


def follow(
    folder: Path, result: Path, log: Log, status: Callable[[], str], check: Callable[[], None] = lambda: None
) -> str | None:
    """Log the rounds of a run until its result is there; None, or the status with which it ended without a result.

    Args:
        folder: the result folder.
        result: the file that ends the run.
        log: takes one line per recorded round.
        status: asks the engine how the run is doing. It may fail with a `RunError`: an engine that does not answer
            may come back, and only several failures in a row end the run.
        check: raises a `RunError` where the engine's own process has ended.
    """
    printed, asked, silent = 0, time.monotonic(), 0
    metrics = folder / "metrics.jsonl"
    while not result.exists():
        time.sleep(POLL)
        printed = print_new_rounds(metrics, printed, log)
        check()
        if time.monotonic() - asked <= STATUS_EVERY:
            continue
        try:
            state, silent = status(), 0
        except RunError as error:
            silent += 1
            if silent == SILENT:
                raise RunError(f"{error} {how_to_resume(folder)}") from None
            state = ""
        asked = time.monotonic()
        if any(word in state.lower() for word in OVER) and not result.exists():
            return state
    print_new_rounds(metrics, printed, log)
    return None


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, so that everything it started is ended."""
    try:
        with terminable():
            yield
    except KeyboardInterrupt:
        raise RunError("stopped by the user; what was saved is intact, and `coterie resume` goes on.") from None
