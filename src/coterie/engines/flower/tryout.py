"""The app behind `coterie run --engine flower`: the server runs a configuration, every node builds the same problem
(same seed, same rows) and keeps only the rows of its own client.

The server measures on the problem's test rows, and uses the model, its start and the target; the clients' rows are the
nodes' alone.
"""

import json
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.engines.flower.relay import client_app
from coterie.engines.follow import leave_answer, unwatched
from coterie.errors import UsageError
from coterie.experiment.watching import end_with_parent

client: ClientApp = client_app("coterie.engines.flower.tryout:load")
server = ServerApp()


def load(node_config: dict[str, Any], run_config: dict[str, Any]) -> Any:
    """The node of the client whose number the SuperNode was given."""
    from coterie.engines.flower.worker import state_folder
    from coterie.experiment.build import node_of

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
    leave_answer(Path(str(settings["answer"])), lambda: _run(grid, settings))


def _run(grid: Grid, settings: Any) -> dict[str, Any]:
    from coterie.engines.flower.transport import FlowerTransport
    from coterie.experiment import run as experiment

    folder = Path(str(settings["folder"]))

    known = json.loads(str(settings["nodes"]) or "null")

    def network(*_: Any) -> FlowerTransport:
        return FlowerTransport(grid, known and {int(node): int(client) for node, client in known.items()})

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
