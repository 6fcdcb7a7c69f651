"""The app behind `coterie run --engine flower`: the server runs a configuration, every node builds the same problem
(same seed, same rows) and keeps only the rows of its own client.

The server measures on the problem's test rows, and uses the model, its start and the target; the clients' rows are the
nodes' alone.
"""

import json
import traceback
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.errors import CoterieError, UsageError
from coterie.experiment.watching import end_with_parent
from coterie.flower.relay import client_app

client: ClientApp = client_app("coterie.flower.tryout:load")
server = ServerApp()


def load(node_config: dict[str, Any], run_config: dict[str, Any]) -> Any:
    """The node of the client whose number the SuperNode was given."""
    from coterie.experiment.build import node_of
    from coterie.flower.worker import state_folder

    if "partition-id" not in node_config:
        raise UsageError("this SuperNode has no number; start it with --node-config 'partition-id=0 num-partitions=5'.")
    number = int(node_config["partition-id"])
    config = _config(run_config)
    return node_of(config, (number,), folder=state_folder(str(run_config["memory"]) or None, number))


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run or resume the experiment, and leave an answer for whoever started it."""
    end_with_parent()
    settings = context.run_config
    answer: dict[str, Any] = {"error": "the server's app was stopped; `coterie resume` goes on.", "exit_code": 1}
    try:
        answer = {"summary": _run(grid, settings)}
    except CoterieError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    except Exception:
        answer = {"error": traceback.format_exc(), "exit_code": 1}
        raise
    finally:
        place = Path(str(settings["answer"]))
        if place.name and place.parent.is_dir():  # whoever started this may be on another machine
            _leave(place, answer)


def _run(grid: Grid, settings: Any) -> dict[str, Any]:
    from coterie.experiment import run as experiment
    from coterie.flower.transport import FlowerTransport

    folder = Path(str(settings["folder"]))

    known = json.loads(str(settings["nodes"]) or "null")

    def network(*_: Any) -> FlowerTransport:
        return FlowerTransport(grid, known and {int(node): int(client) for node, client in known.items()})

    def unwatched(name: str, is_baseline: bool) -> None:
        return None

    if settings["resume"]:
        return experiment.resume(folder, unwatched, network=network)
    force = bool(settings["force"])
    return experiment.run(_config(settings), folder, unwatched, force=force, network=network)


def _config(settings: Any) -> Any:
    import tomllib

    from coterie.experiment.config import resolve

    tables = tomllib.loads(str(settings["config"]))
    tables.pop("version", None)
    return resolve(tables)


def _leave(path: Path, answer: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(answer), encoding="utf-8")
    part.replace(path)
