"""The process that stays at a node: it keeps shard, model and memory, and answers orders on a private socket.

Started by the relay with its settings as JSON on standard input; ends with the process that it watches, when a relay
of another run asks, or after a while without orders.
"""

import json
import os
import selectors
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from coterie.consent import resolve
from coterie.engines.frames import STALE, receive, send
from coterie.experiment.watching import when_ended

SLOW = 30.0  # seconds that a relay may take to send what it has


def main() -> None:
    """Load, listen, answer."""
    how = json.load(sys.stdin)
    _end_with(how["watch"], Path(how["place"]))
    node = _node(how)
    path = Path(how["place"]) / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        hidden = path.with_name(f"{os.getpid()}.socket")
        server.bind(str(hidden))
        server.listen()
        os.rename(hidden, path)  # whoever sees it can connect
        _serve(server, node, how["run"], how["idle"])
    path.unlink(missing_ok=True)


def _serve(server: socket.socket, node: Any, run: int, idle: float) -> None:
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


def _node(how: dict[str, Any]) -> Any:
    """What the project's loader gives, as a node."""
    import torch

    from coterie.federation.remote import Node, Store, node_policy

    torch.set_num_threads(int(os.environ.get("COTERIE_THREADS", "1")))
    # the node's own app names its loader in its code (`client_app`), and thereby admits it
    load = resolve(how["load"], "load_shard", [how["load"].partition(":")[0]])
    found = load(how["node_config"], how["run_config"])
    path = how["node_config"].get("policy") or how.get("policy")
    if isinstance(found, Node):
        found.policy = node_policy(path, found.policy)
        return found
    client = int(how["node_config"]["partition-id"])
    options = {"modules": tuple(how["modules"]), "shares_memory": how["shares_memory"], "policy": node_policy(path)}
    return found.node(client, store=Store(state_folder(how["state"], client)), **options)


def state_folder(folder: str | None, client: int) -> Path:
    """Where a client's memory is kept."""
    from platformdirs import user_state_path

    base = Path(folder) if folder else user_state_path("coterie") / "flower"
    return base / f"client-{client}"


def _end_with(watched: int, place: Path) -> None:
    """End when the process that is watched ends, whatever this one is doing."""

    def end() -> None:
        (place / "socket").unlink(missing_ok=True)
        os._exit(0)

    when_ended(watched, end)


if __name__ == "__main__":
    main()
