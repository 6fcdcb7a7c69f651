"""The two sides of a FLARE job. FLARE makes these objects from the job's configuration, and calls what is marked.

A site's own process only hands bytes on: it imports no torch.
"""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.collab import collab

from coterie.engines.follow import no_observer, write_result
from coterie.engines.nvflare.compute import Compute, opened

if TYPE_CHECKING:
    from coterie.engines.nvflare.transport import FlareTransport, Stream


def client_of(site: str, sites: list[str]) -> int:
    """The number of a site's client: its position in the list of sites."""
    return sites.index(site)


class Client:
    """A site.

    Args:
        settings: the sites and how the compute process finds the rows, as `compute.sealed` writes them.
    """

    def __init__(self, settings: str) -> None:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # FLARE imports it at a job's start if it can
        self.settings = settings
        self._compute: Compute | None = None

    @collab.init
    def start(self) -> None:
        """Before the first call."""
        _be_quiet()
        settings = opened(self.settings)
        site = collab.site_name
        self._compute = Compute({**settings, "site": site, "client": client_of(site, settings["sites"])})

    @collab.publish
    def handle(self, order: bytes) -> bytes:
        """The node's reply to an order."""
        assert self._compute is not None
        return self._compute.ask(order) if order else order

    @collab.final
    def end(self) -> None:
        """After the last call."""
        if self._compute is not None:
            self._compute.close()


class Server:
    """The experiment; where the result folder has a run, it is resumed.

    Args:
        settings: sites, configuration and result folder, as `compute.sealed` writes them.
    """

    def __init__(self, settings: str) -> None:
        self.settings = settings

    @collab.main
    def main(self) -> None:
        """Run, or resume."""
        _be_quiet()
        settings = opened(self.settings)
        write_result(Path(settings["answer"]), lambda: self._run(settings))

    def _run(self, settings: dict[str, Any]) -> dict[str, Any]:
        from coterie.engines.load import read_config
        from coterie.engines.nvflare.transport import FlareTransport
        from coterie.experiment import run as experiment

        folder, sites = Path(settings["folder"]), settings["sites"]
        connected = {client.name for client in collab.clients}

        def network(*_: Any) -> "FlareTransport":
            # FLARE knows a site by its certificate
            clients = {site: client_of(site, sites) for site in sites if site in connected}
            return FlareTransport(call, clients, lambda: bool(collab.is_aborted), own_rows=settings["own_rows"])

        if (folder / "config.toml").is_file() and not settings["force"]:
            return experiment.resume(folder, no_observer, network=network)
        config = read_config(settings["config"])
        return experiment.run(config, folder, no_observer, force=settings["force"], network=network)


def call(site: str, order: bytes, timeout: float) -> "Stream":
    """Send an order to a site of the job, and do not wait."""
    client = collab.get_clients([site])
    stream: Stream = client(blocking=False, timeout=timeout, optional=True).handle(order)
    return stream


def _be_quiet() -> None:
    """FLARE logs every call, which takes longer than the call."""
    logging.getLogger("nvflare.collab").setLevel(logging.WARNING)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("nvflare.collab", "CellDispatcher", "Group", "ResultWaiter")):
            logging.getLogger(name).setLevel(logging.WARNING)
