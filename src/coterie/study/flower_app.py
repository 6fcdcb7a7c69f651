"""The app of a job of a study on Flower: its server's side. Sites answer by `supernode`, and run no app."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.engines.follow import write_result

client = ClientApp()  # Flower wants one; it has no handler
server = ServerApp()
AGAIN = 0.02  # seconds until a part of a reply that is still on its way is asked for again; Flower waits one second


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Do the job, and write its result for the process that started it."""
    settings = context.run_config
    write_result(Path(str(settings["answer"])), lambda: _done(grid, settings))


def _done(grid: Grid, settings: Any) -> dict[str, Any]:
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.superlink.grid import http_grid

    from coterie.engines.flower.transport import FlowerTransport
    from coterie.study.jobs import perform

    http_grid.pull_objects = partial(pull_objects, initial_backoff=AGAIN, backoff_cap=1.0)  # no setting of Flower's
    nodes: dict[str, int] = json.loads(str(settings["nodes"]))

    def transport_to(sites: Sequence[str]) -> FlowerTransport:
        # Flower knows a node by its key
        return FlowerTransport(grid, {nodes[site]: k for k, site in enumerate(sites) if site in nodes})

    return perform(json.loads(str(settings["task"])), transport_to)
