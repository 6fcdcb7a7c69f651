"""A site's SuperNode: it dials the coordinator's SuperLink by Flower's Fleet interface and answers coterie's orders.

Flower's own SuperNode looks for messages every three seconds and starts, for each of them, a process of the app that
the coordinator sent. This one is a single process that stays and opens no port. It runs no app: of the one that
belongs to a run it reads the settings, which are data.
"""

import fcntl
import json
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message, RecordDict
from flwr.common.config import get_fused_config_from_fab
from flwr.common.constant import ErrorCode
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.fleet_http_connection import http_request_response
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from coterie.engines.flower.envelope import KIND, opened, sealed
from coterie.federation.remote import Node
from coterie.study.home import Home
from coterie.study.node import at_site
from coterie.study.superlink import REFUSED, TWICE

SOON, LATE = 0.05, 2.0  # seconds between two looks for orders: just after one, and at most
SHARE = 0.1  # of the time since the last order; so an order waits at most so much longer than the coordinator paused
RUNS = 3  # nodes that are kept: a handshake beside a training does not make the training load its rows again
NUMBER = "node"  # the file with the number that the SuperLink gave this site


class Line(NamedTuple):
    """Flower's connection of a SuperNode: what `http_request_response` gives."""

    node: int
    receive: Callable[[], tuple[Message, Any] | None]
    send: Callable[[Message, Any, float], tuple[set[str], str]]
    get_run: Callable[[int], Any]
    get_fab: Callable[[str, int], Any]
    pull_object: Callable[[int, str], bytes]
    push_object: Callable[[int, str, str, bytes], None]
    confirm: Callable[[int, str], None]


class SuperNode:
    """Answers the orders that come over a line.

    Args:
        line: Flower's connection.
        load: the node of a job.
    """

    def __init__(self, line: Line, load: Callable[[dict[str, Any]], Node]) -> None:
        self.line, self.load = line, load
        self.nodes: OrderedDict[int, Node] = OrderedDict()

    def once(self) -> bool:
        """Answer one order, if there is one; whether there was."""
        try:
            found = self.line.receive()
            if found is None:
                return False
            message = self._pulled(*found)
            begun = time.monotonic()
            reply = self._reply(message)
            self._push(reply, time.monotonic() - begun)
        except RunNotRunningException:  # the coordinator has ended it meanwhile
            return True
        return True

    def _pulled(self, head: Message, tree: Any) -> Message:
        """A message with its content."""
        run = head.metadata.run_id
        message: Message = pull_and_inflate_object_from_tree(
            tree,
            partial(self.line.pull_object, run),
            partial(self.line.confirm, run),
            return_type=Message,
            initial_backoff=SOON,
            backoff_cap=LATE,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def _reply(self, message: Message) -> Message:
        """What the node of this run answers."""
        try:
            data = self._node(message.metadata.run_id).handle(opened(message.content))
        except RunNotRunningException:
            raise
        except Exception as error:  # the text may hold values: it stays in the log of this site
            print(f"coterie site: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            reason = f"a {type(error).__name__} at the site; its log has more"
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)
        return Message(RecordDict({KIND: sealed(data)}), reply_to=message)

    def _node(self, run: int) -> Node:
        if run not in self.nodes:
            about = self.line.get_run(run)
            settings = get_fused_config_from_fab(self.line.get_fab(about.fab_hash, run).content, about)
            self.nodes[run] = self.load(json.loads(str(settings["job"])))
            if len(self.nodes) > RUNS:
                self.nodes.popitem(last=False)
        self.nodes.move_to_end(run)
        return self.nodes[run]

    def _push(self, reply: Message, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            wanted, session = self.line.send(reply, get_object_tree(reply), seconds)
            push = partial(self.line.push_object, reply.metadata.run_id, session)
            push_objects(get_all_nested_objects(reply), push, object_ids_to_push=wanted)


def serve(node: SuperNode, sleep: Callable[[float], None] = time.sleep) -> None:
    """Answer orders until this process ends; the longer none has come, the less often it looks."""
    last = time.monotonic()
    while True:
        if node.once():
            last = time.monotonic()
        else:
            sleep(min(LATE, max(SOON, SHARE * (time.monotonic() - last))))


def main() -> None:
    """Dial, and answer: the arguments are the folder of the kit, and the address."""
    kit, address = Path(sys.argv[1]), sys.argv[2]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the SuperLink is told
    key: Any = load_ssh_private_key((kit / "node.key").read_bytes(), None)
    home, connected = Home.find(), False
    with (kit / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"this site {TWICE}")
        _end_before(kit, address, key)
        try:
            with http_request_response(address, False, str(kit / "rootCA.pem"), (key, key.public_key())) as connection:
                connected = True
                (kit / NUMBER).write_text(str(connection[0]), encoding="ascii")
                print(f"connected to {address}", flush=True)
                serve(SuperNode(Line(*connection), partial(at_site, home)))
        except KeyboardInterrupt:  # Flower's way to end a SuperNode that the SuperLink does not know
            sys.exit("the coordinator's server has begun anew" if connected else REFUSED)
        sys.exit("the connection has ended")  # with an error, which Flower has logged


def _end_before(kit: Path, address: str, key: Any) -> None:
    """Tell the SuperLink that this site's process before this one has ended, where it could not say so itself."""
    if not (kit / NUMBER).is_file():
        return
    number, trust = int((kit / NUMBER).read_text(encoding="ascii")), str(kit / "rootCA.pem")
    signed = [NodeAuthHttpInterceptor(key, key.public_key())]
    with FleetHttpClient.from_server_address(address, False, trust, signed) as client, suppress(httpx.HTTPError):
        client.DeactivateNode(DeactivateNodeRequest(node_id=number))


if __name__ == "__main__":
    main()
