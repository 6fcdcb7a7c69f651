"""The two sides of a study's job on FLARE, the only classes of coterie that a job may name.

A site's own process only hands bytes on: it imports no torch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nvflare.collab import collab

from coterie.engines.nvflare.app import Client, Server, call, client_of

if TYPE_CHECKING:
    from coterie.engines.nvflare.transport import FlareTransport


class StudyClient(Client):
    """A site in a job of a study."""


class StudyServer(Server):
    """The coordinator in a job of a study."""

    def _run(self, settings: dict[str, Any]) -> dict[str, Any]:
        from coterie.engines.nvflare.transport import FlareTransport
        from coterie.study.jobs import perform

        connected = {client.name for client in collab.clients}

        def transport_to(sites: Sequence[str]) -> "FlareTransport":
            clients = {site: client_of(site, list(sites)) for site in sites if site in connected}
            return FlareTransport(call, clients, lambda: bool(collab.is_aborted))

        return perform(settings["job"], transport_to)
