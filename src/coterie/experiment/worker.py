"""`python -m coterie.experiment.worker PARENT`: makes runs one after the other, as lines on its standard input ask.

A line is {"config": FILE, "folder": DIR}, the answer {"summary": …} or {"error": …}. One process for many runs, because
starting one takes longer than a small run.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, RunError
from coterie.experiment.config import load
from coterie.experiment.run import resume, run
from coterie.experiment.watching import GRACE, end_with_parent


def made(config: Path, folder: Path) -> dict[str, Any]:
    """Start a run or resume it, and return its summary. A worker whose parent was killed may still be saving it."""

    def unwatched(name: str, is_baseline: bool) -> None:
        """Nobody watches."""

    if (folder / "config.toml").is_file():
        summary = resume(folder, unwatched, patience=GRACE)
    else:
        summary = run(load(config), folder, unwatched, patience=GRACE)
    if summary["outcome"] == "stopped":
        raise RunError("its process was stopped; the same command resumes it.")
    return summary


def main() -> None:
    """Until standard input ends, or the process that asks."""
    end_with_parent(int(sys.argv[1]))
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # whatever prints, the answers stay clean
        for line in sys.stdin:
            order = json.loads(line)
            try:
                answer: dict[str, Any] = {"summary": made(Path(order["config"]), Path(order["folder"]))}
            except CoterieError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # Ctrl-C reaches all processes of a terminal; the one that was asked says so
        sys.exit(1)
