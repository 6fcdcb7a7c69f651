"""The two sides of a job of a study on Flower.

The client's side imports nothing heavy: Flower starts a process for every message.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.engines.flower.relay import client_app
from coterie.engines.follow import write_result

client: ClientApp = client_app("coterie.study.node:for_flower")
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Do the job, and write its result for the process that started it."""
    settings = context.run_config
    write_result(Path(str(settings["answer"])), lambda: _done(grid, settings))


def _done(grid: Grid, settings: Any) -> dict[str, Any]:
    from coterie.engines.flower.transport import FlowerTransport
    from coterie.study.jobs import perform

    nodes: dict[str, int] = json.loads(str(settings["nodes"]))

    def transport_to(sites: Sequence[str]) -> FlowerTransport:
        # Flower knows a node by its key
        return FlowerTransport(grid, {nodes[site]: k for k, site in enumerate(sites) if site in nodes})

    return perform(json.loads(str(settings["task"])), transport_to)
