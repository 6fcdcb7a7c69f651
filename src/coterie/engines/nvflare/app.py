"""The two sides of a FLARE job. FLARE makes these objects from the job's configuration, and calls what is marked."""

import logging
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from coterie.engines.follow import leave_answer, unwatched
from coterie.engines.nvflare.compute import Compute, opened, read
from coterie.engines.nvflare.transport import FlareTransport, Stream


def client_of(site: str, sites: list[str]) -> int:
    """The number of a site's client: its place in the list of sites."""
    return sites.index(site)


class Client:
    """A site. `settings` (`compute.sealed`) are sites, and how its compute process finds its rows."""

    def __init__(self, settings: str) -> None:
        self.settings = settings
        self._compute: Compute | None = None

    @collab.init
    def start(self) -> None:
        """Before the first call."""
        _be_quiet()
        how = opened(self.settings)
        site = collab.site_name
        self._compute = Compute({**how, "site": site, "client": client_of(site, how["sites"])})

    @collab.publish
    def handle(self, order: bytes) -> bytes:
        """The node's reply to an order."""
        assert self._compute is not None
        return self._compute.ask(order)

    @collab.final
    def end(self) -> None:
        """After the last call."""
        if self._compute is not None:
            self._compute.close()


class Server:
    """The experiment. `settings` are sites, configuration, result folder; a folder that has a run is resumed."""

    def __init__(self, settings: str) -> None:
        self.settings = settings

    @collab.main
    def main(self) -> None:
        """Run, or go on."""
        _be_quiet()
        how = opened(self.settings)
        leave_answer(Path(how["answer"]), lambda: self._run(how))

    def _run(self, how: dict[str, Any]) -> dict[str, Any]:
        from coterie.experiment import run as experiment

        folder, sites = Path(how["folder"]), how["sites"]
        there = {client.name for client in collab.clients}

        def call(site: str, order: bytes, timeout: float) -> Stream:
            one = collab.get_clients([site])
            stream: Stream = one(blocking=False, timeout=timeout, optional=True).handle(order)
            return stream

        def network(*_: Any) -> FlareTransport:
            # FLARE knows a site by its certificate
            clients = {site: client_of(site, sites) for site in sites if site in there}
            return FlareTransport(call, clients, lambda: bool(collab.is_aborted), own_rows=how["own_rows"])

        if (folder / "config.toml").is_file() and not how["force"]:
            return experiment.resume(folder, unwatched, network=network)
        return experiment.run(read(how["config"]), folder, unwatched, force=how["force"], network=network)


def _be_quiet() -> None:
    """FLARE logs every call, which takes longer than the call."""
    logging.getLogger("nvflare.collab").setLevel(logging.WARNING)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("nvflare.collab", "CellDispatcher", "Group", "ResultWaiter")):
            logging.getLogger(name).setLevel(logging.WARNING)
