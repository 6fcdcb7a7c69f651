"""The process that stays at a node: it keeps shard, model and memory, and answers orders on a private socket.

The relay starts it, with its settings as JSON on standard input. It ends with the process that it watches, when a relay
of another run asks, or after a while without orders.
"""

import json
import os
import selectors
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.consent import resolve
from coterie.engines.frames import STALE, receive, send
from coterie.experiment.watching import when_ended

if TYPE_CHECKING:
    from coterie.federation.remote import Node

SLOW = 30.0  # seconds that a relay may take to send what it has


def main() -> None:
    """Load, listen, answer."""
    settings = json.load(sys.stdin)
    folder = Path(settings["folder"])
    _end_with(settings["watch"], folder)
    node = _node(settings)
    path = folder / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        hidden = path.with_name(f"{os.getpid()}.socket")
        server.bind(str(hidden))
        server.listen()
        os.rename(hidden, path)  # only now, so that a relay that sees it can connect
        _serve(server, node, settings["run"], settings["idle"])
    path.unlink(missing_ok=True)


def _serve(server: socket.socket, node: "Node", run: int, idle: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while selector.select(idle):
            line = server.accept()[0]
            with line, suppress(OSError, EOFError):  # a relay that was killed; the next one asks again
                line.settimeout(SLOW)
                same = int.from_bytes(receive(line), "little") == run
                data = receive(line)
                send(line, node.handle(data) if same else STALE)
                if not same:
                    return


def _node(settings: dict[str, Any]) -> "Node":
    """What the project's loader gives, as a node."""
    from coterie.engines.load import load_node

    node_config = settings["node_config"]

    def load() -> Any:
        # the node's own app names its loader in its code (`client_app`), and thereby admits it
        loader = resolve(settings["load"], "load_shard", [settings["load"].partition(":")[0]])
        return loader(node_config, settings["run_config"])

    return load_node(
        load,
        client=int(node_config["partition-id"]) if "partition-id" in node_config else None,
        memory=memory_folder(settings["state"]),
        modules=settings["modules"],
        shares_memory=settings["shares_memory"],
        policy=node_config.get("policy") or settings.get("policy"),
    )


def memory_folder(folder: str | None) -> Path:
    """Where the memory of clients is kept: in a folder of the project's choice, or below the user's state directory."""
    from platformdirs import user_state_path

    return Path(folder) if folder else user_state_path("coterie") / "flower"


def _end_with(watched: int, folder: Path) -> None:
    """End when the process that is watched ends, whatever this one is doing."""

    def end() -> None:
        (folder / "socket").unlink(missing_ok=True)
        os._exit(0)

    when_ended(watched, end)


if __name__ == "__main__":
    main()
