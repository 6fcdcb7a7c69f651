"""The app behind `coterie run --engine flower`: the server runs a configuration, every node builds the same problem
(same seed, same rows) and keeps only the rows of its own client.

The server measures on the problem's test rows, and uses the model, its start and the target; the clients' rows are the
nodes' alone.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.engines.flower.relay import client_app
from coterie.engines.follow import no_observer, write_result
from coterie.errors import UsageError
from coterie.experiment.watching import end_with_parent

if TYPE_CHECKING:
    from coterie.federation.remote import Node

client: ClientApp = client_app("coterie.engines.flower.tryout:load")
server = ServerApp()


def load(node_config: dict[str, Any], run_config: dict[str, Any]) -> "Node":
    """The node of the client whose number the SuperNode was given."""
    from coterie.engines.flower.worker import memory_folder
    from coterie.engines.load import NO_NUMBER, client_folder, read_config
    from coterie.experiment.build import node_of

    if "partition-id" not in node_config:
        raise UsageError(NO_NUMBER)
    client = int(node_config["partition-id"])
    folder = client_folder(memory_folder(str(run_config["memory"]) or None), client)
    return node_of(read_config(str(run_config["config"])), (client,), folder=folder)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run or resume the experiment, and write the result for the process that started it."""
    end_with_parent()
    settings = context.run_config
    write_result(Path(str(settings["answer"])), lambda: _run(grid, settings))


def _run(grid: Grid, settings: Any) -> dict[str, Any]:
    from coterie.engines.flower.transport import FlowerTransport
    from coterie.engines.load import read_config
    from coterie.experiment import run as experiment

    folder = Path(str(settings["folder"]))
    known = json.loads(str(settings["nodes"]) or "null")

    def network(*_: Any) -> FlowerTransport:
        return FlowerTransport(grid, known and {int(node): int(client) for node, client in known.items()})

    if settings["resume"]:
        return experiment.resume(folder, no_observer, network=network)
    force = bool(settings["force"])
    config = read_config(str(settings["config"]))
    return experiment.run(config, folder, no_observer, force=force, network=network)
