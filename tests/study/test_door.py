"""What partners reach of a SuperLink, over TLS: the calls of SuperNodes and nothing else."""

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hospitals import hospitals

pytest.importorskip("flwr")
pytest.importorskip("cryptography")
pytest.importorskip("uvicorn")

from coterie.engines.lifetime import free_ports
from coterie.problems.sites.folder import Study
from coterie.problems.sites.terms import terms_of
from coterie.study import coordinator, door, superlink

pytestmark = pytest.mark.flower
CALL = "/v1/fleet/pull-messages"


class Upstream(BaseHTTPRequestHandler):
    """Stands for the SuperLink: answers with what it was asked, and fails where the body says so."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.seen.append((self.path, body))
        status = int(body) if body.isdigit() else 200
        self.send_response(status)
        self.send_header("x-signature", self.headers.get("x-signature", ""))
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Front(NamedTuple):
    """A door on loopback, and what came through it."""

    port: int
    seen: list[tuple[str, bytes]]
    context: ssl.SSLContext

    def post(self, path: str, body: bytes = b"", method: str = "POST", **headers: str) -> tuple[int, bytes, Any]:
        line = HTTPSConnection("127.0.0.1", self.port, context=self.context, timeout=20)
        try:
            line.request(method, path, body, headers)
            reply = line.getresponse()
            return reply.status, reply.read(), reply.headers
        finally:
            line.close()


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A study on Flower with its certificates."""
    folder = tmp_path_factory.mktemp("door")
    mine, files = hospitals(folder)
    (port,) = free_ports(1)
    options: dict[str, Any] = {"engine": "flower", "host": "localhost", "port": port, "partners": tuple(files)}
    return coordinator.new(folder / "study", terms_of(mine, "sick")[0], mine, **options)[0]


@contextmanager
def opened(study: Study, upstream: str, seen: list[tuple[str, bytes]]) -> Iterator[Front]:
    """A door before an address."""
    folder = study.folder / superlink.FOLDER
    certificate, key, authority = (folder / name for name in ("server.crt", "server.key", "rootCA.pem"))
    (port,) = free_ports(1)
    here = door.Door(upstream, authority)
    before = door.server(here, "127.0.0.1", port, certificate, key)
    thread = threading.Thread(target=lambda: asyncio.run(door.serve(before, here)))
    thread.start()
    until(lambda: before.started)
    yield Front(port, seen, ssl.create_default_context(cafile=str(authority)))
    before.should_exit = True
    thread.join(30)


@pytest.fixture(scope="module")
def front(study: Study) -> Iterator[Front]:
    seen: list[tuple[str, bytes]] = []
    behind = ThreadingHTTPServer(("127.0.0.1", 0), type("Behind", (Upstream,), {"seen": seen}))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    folder = study.folder / superlink.FOLDER
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    behind.socket = context.wrap_socket(behind.socket, server_side=True)
    threading.Thread(target=behind.serve_forever, daemon=True).start()
    with opened(study, f"https://127.0.0.1:{behind.server_address[1]}", seen) as found:
        yield found
    behind.shutdown()
    behind.server_close()


def until(what: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_calls_of_supernodes_are_handed_on_with_their_headers(front: Front) -> None:
    status, body, headers = front.post(CALL, b"order", **{"x-signature": "signed"})
    assert (status, body, headers["x-signature"]) == (200, b"order", "signed")
    assert front.seen[-1] == (CALL, b"order")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/runtime/pull-messages",
        "/",
        "/v1/fleet/",
        "/v1/fleet",
        "/V1/FLEET/pull-messages",
        "/v1/fleet/Pull-Messages",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/%2E%2E%2Fcontrol%2Fstart-run",
        "/v1/fleet/%252e%252e/control/start-run",
        "/v1/fleet/..%5ccontrol",
        "/v1/fleet//pull-messages",
        "//v1/fleet/pull-messages",
        "/v1//fleet/pull-messages",
        "/v1/fleet/pull-messages/",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/pull%2dmessages",
        "/v1/fleet/pull-messages;/v1/control/start-run",
        "/v1/fleet/pull-messages%00",
    ],
)
def test_other_paths_are_refused(front: Front, path: str) -> None:
    before = len(front.seen)
    assert front.post(path, b"order")[0] == 404
    assert len(front.seen) == before


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_other_methods_are_refused(front: Front, method: str) -> None:
    before = len(front.seen)
    assert front.post(CALL, method=method)[0] == 404
    assert len(front.seen) == before


def test_a_query_does_not_reach_the_superlink(front: Front) -> None:
    assert front.post(f"{CALL}?x=/v1/control/", b"order")[0] == 200
    assert front.seen[-1][0] == CALL


def test_bodies_that_are_too_large_are_refused(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "LARGEST", 1000)
    before = len(front.seen)
    assert front.post(CALL, b"x" * 1000)[0] == 200
    assert front.post(CALL, b"x" * 1001)[0] == 413
    line = HTTPSConnection("127.0.0.1", front.port, context=front.context, timeout=20)
    line.request("POST", CALL, (b"x" * 300 for _ in range(4)), encode_chunked=True)  # its length is not declared
    assert line.getresponse().status == 413
    line.close()
    assert len(front.seen) == before + 1


def test_a_call_that_ends_early_is_not_handed_on(front: Front) -> None:
    before = len(front.seen)
    with socket.create_connection(("127.0.0.1", front.port)) as plain:
        line = front.context.wrap_socket(plain, server_hostname="localhost")
        line.sendall(f"POST {CALL} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nhalf".encode())
        line.close()
    assert front.post(CALL, b"whole")[0] == 200
    assert [body for _, body in front.seen[before:]] == [b"whole"]


@pytest.mark.parametrize("status", [401, 403, 409, 500, 503])
def test_errors_of_the_superlink_are_passed_on(front: Front, status: int) -> None:
    assert front.post(CALL, str(status).encode())[:2] == (status, str(status).encode())


def test_a_superlink_that_is_gone_is_a_bad_gateway(study: Study) -> None:
    """Flower's SuperNodes try again after 502."""
    (nobody,) = free_ports(1)
    with opened(study, f"https://127.0.0.1:{nobody}", []) as front:
        assert front.post(CALL, b"order")[0] == 502


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_superlink_is_left_behind(study: Study, number: signal.Signals) -> None:
    """`study serve` that is stopped, or killed, ends its SuperLink and all that this one has started."""
    mark = f"mark{os.getpid()}{number}"
    serving = subprocess.Popen(
        [sys.executable, "-m", "coterie", "study", "serve", str(study.folder)], env={**os.environ, "MARK_OF_TEST": mark}
    )
    try:
        until(lambda: coordinator.listens(study), 300.0)
        assert any("flower-superlink" in command for command in _marked(mark))
    finally:
        serving.send_signal(number)
        serving.wait(60)
    until(lambda: not _marked(mark), 60.0)
    assert not coordinator.listens(study)


def _marked(mark: str) -> list[str]:
    """The commands of all processes whose environment has the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK_OF_TEST={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found
