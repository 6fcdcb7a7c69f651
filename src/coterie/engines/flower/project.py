"""`coterie flower new` and `coterie flower try`: a project of one's own, and a federation on this machine to try it."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from coterie.engines.flower.deployment import Deployment
from coterie.engines.follow import Log, follow, interruptible
from coterie.engines.templates import write_template
from coterie.errors import RunError, UsageError

TEMPLATE = Path(__file__).parent / "template"


def new(folder: Path) -> list[Path]:
    """Write a project into a new folder; the files."""
    package = re.sub(r"\W+", "_", folder.resolve().name.lower()).strip("_")
    if not package or package[0].isdigit():
        raise UsageError(f"{folder.name!r} gives no name for a Python package; choose one that begins with a letter.")
    return write_template(TEMPLATE, folder, PACKAGE=package, NAME=package.replace("_", "-"))


def settings_of(folder: Path) -> dict[str, Any]:
    """The run settings of a project's pyproject.toml."""
    path = folder / "pyproject.toml"
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
        return found
    except FileNotFoundError:
        raise UsageError(f"{folder} is no Flower project: it has no pyproject.toml.") from None
    except (KeyError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} has no [tool.flwr.app.config] ({error}).") from None


def try_out(folder: Path, clients: int, out: Path, log: Log) -> dict[str, Any]:
    """Run a project with SuperNodes on this machine; the summary that its server wrote.

    Args:
        folder: the project.
        clients: the number of SuperNodes.
        out: the result folder.
        log: takes one line per recorded round.
    """
    settings_of(folder)
    with interruptible(), Deployment() as flower:
        flower.superlink()
        for k in range(clients):
            flower.supernode(k, clients)
        (out / "summary.json").unlink(missing_ok=True)
        run = flower.submit(folder, out=str(out.resolve()))
        log(f"run {run} has started; results go to {out}")

        def check() -> None:
            if "superlink" in flower.ended():
                raise RunError("Flower's SuperLink has ended before the run did.")

        status = follow(out, out / "summary.json", log, lambda: flower.status(run), check)
        if status is not None:
            raise RunError(f"the run ended without a result ({status}):\n{flower.log('superlink')[-800:]}")
        summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        return summary
