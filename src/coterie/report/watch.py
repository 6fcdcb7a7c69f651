"""The report of a run that goes on, on a local server: loopback only, read-only, GET only, no other host's pages.

Its address holds a random token, because other users of a machine reach its loopback too.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import compare_digest, token_urlsafe
from threading import Lock, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from coterie.errors import RunError, UsageError
from coterie.plugins import label
from coterie.report.page import POLICY, content, document
from coterie.report.results import Run, read
from coterie.report.svg import esc

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost")
GROWING = ("config.toml", "metrics.jsonl", "weights.csv", "events.jsonl", "summary.json", "ledger.json")
GRACE = 5.0  # seconds for open pages to fetch the last of a run
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Live:
    """A result folder as the page shows it; drawn anew only where its files have grown."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}.")
        self.folder = folder
        self._lock = Lock()
        self._stamp, self._answer = "", {"stamp": "", "html": "", "state": ""}

    def stamp(self) -> str:
        """Changes whenever a file does."""
        places = [self.folder, *sorted((self.folder / "baselines").glob("*"))]
        marks = []
        for path in (place / name for place in places for name in GROWING):
            try:
                found = path.stat()
                marks.append(f"{found.st_size:x}.{found.st_mtime_ns:x}")
            except OSError:
                marks.append("-")
        return ",".join(marks)

    def answer(self) -> dict[str, str]:
        """What the page asks for."""
        with self._lock:
            stamp = self.stamp()
            if stamp != self._stamp:
                self._stamp, self._answer = stamp, self._draw(stamp)
            return self._answer

    def _draw(self, stamp: str) -> dict[str, str]:
        try:
            run = read(self.folder)
        except UsageError as error:
            return {"stamp": stamp, "html": f"<p>Waiting: {esc(error)}</p>", "state": "waiting"}
        now = run.final["round"] if run.summary is None else run.summary.get("rounds", run.final["round"])
        state = f"round {now} of {run.rounds}, {'finished' if ended(run) else 'going on'}"
        return {"stamp": stamp, "html": content([run])[0], "state": state}

    def is_over(self) -> bool:
        """Whether the run, with its baselines, has ended."""
        try:
            return ended(read(self.folder))
        except UsageError:
            return False


def ended(run: Run) -> bool:
    """Finished with all its baselines, or ended some other way."""
    if run.summary is None:
        return False
    if run.summary["outcome"] != "finished":
        return True
    wanted = run.config["run"].get("baselines") or []
    return {label(str(name)) for name in wanted} <= set(run.summary.get("baselines") or {})


def handler(live: Live, token: str) -> type[BaseHTTPRequestHandler]:
    """Answers to GET /TOKEN/ and GET /TOKEN/data.json, and to nothing else."""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "coterie", ""
        timeout = 30  # a connection that says nothing is closed

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            given, _, page = address.path.removeprefix("/").partition("/")
            port = self.connection.getsockname()[1]
            if self.headers.get("Host", "").lower() not in {f"{name}:{port}" for name in NAMES}:
                self._send(HTTPStatus.FORBIDDEN, "text/plain", "this page is for this machine only\n")
            elif not compare_digest(given.encode(), token.encode()):
                self._send(HTTPStatus.FORBIDDEN, "text/plain", "open the whole address that coterie watch prints\n")
            elif page == "":
                self._send(HTTPStatus.OK, "text/html", document("<p>Reading …</p>", live.folder.name, live=True))
            elif page == "data.json":
                answer = live.answer()
                if parse_qs(address.query).get("stamp") == [answer["stamp"]]:
                    self._send(HTTPStatus.NO_CONTENT, "application/json", "")
                else:
                    self._send(HTTPStatus.OK, "application/json", json.dumps(answer))
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is the page and data.json\n")

        def _refuse(self) -> None:
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", "GET only\n", {"Allow": "GET"})

        do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse

        def _send(self, status: HTTPStatus, kind: str, text: str, more: dict[str, str] | None = None) -> None:
            body = text.encode()
            self.send_response(status)
            for name, value in {**HEADERS, **(more or {})}.items():
                self.send_header(name, value)
            if status is not HTTPStatus.NO_CONTENT:
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD" and status is not HTTPStatus.NO_CONTENT:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quietly."""

    return Handler


class Server(ThreadingHTTPServer):
    """Quiet where a browser goes away in the middle of an answer."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is nothing to report."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[tuple[str, Live]]:
    """The server in a thread of its own; gives its address."""
    live, token = Live(folder), token_urlsafe(24)
    try:
        server = Server((LOOPBACK, port), handler(live, token))
    except OSError as error:
        raise RunError(f"port {port} cannot be used: {error.strerror or error}. Choose another with --port.") from None
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_address[1]}/{token}/", live
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def watch(folder: Path, port: int, tell: Callable[[str], None], *, until_end: bool = False) -> None:
    """Serve until stopped, or until the run has ended and open pages have seen it."""
    with serving(folder, port) as (address, live):
        tell(address)
        while not (until_end and live.is_over()):
            time.sleep(1.0)
        time.sleep(GRACE)
