"""The live page: loopback only, read-only, for no other host, and it follows a run."""

import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser import CHROMIUM, browser
from made import make

from coterie.errors import RunError, UsageError
from coterie.report.results import read
from coterie.report.watch import Live, Server, ended, handler, serving

Command = Callable[..., Any]


def ask(address: str, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], str]:
    place = urlsplit(address)
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=300)
    connection.request(method, place.path.rstrip("/") + path, headers={"Host": host or place.netloc})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def test_the_page_and_its_values(tmp_path: Path, contents: Callable[[Path], dict[str, str]]) -> None:
    folder = make(tmp_path / "a", finished=False)
    before = contents(folder)
    with serving(folder) as (address, _):
        status, headers, page = ask(address)
        assert status == 200
        assert "data-live" in page
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        status, _, text = ask(address, "/data.json")
        assert status == 200
        fresh = json.loads(text)
        assert fresh["state"] == "round 20 of 20, going on"
        assert "weights over the rounds" in fresh["html"]
        assert ask(address, f"/data.json?stamp={fresh['stamp']}")[0] == 204
        make(folder)
        assert json.loads(ask(address, f"/data.json?stamp={fresh['stamp']}")[2])["state"] == "round 20 of 20, finished"
    assert set(contents(folder)) - set(before) == {"ledger.json", "summary.json"}  # which `make` wrote


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example", "localhost:1"]
)
def test_other_hosts_are_refused(tmp_path: Path, host: str) -> None:
    with serving(make(tmp_path / "a")) as (address, _):
        status, _, text = ask(address, "/data.json", host=host)
    assert status == 403
    assert "html" not in text


def test_nothing_but_get_and_nothing_but_two_addresses(tmp_path: Path) -> None:
    with serving(make(tmp_path / "a")) as (address, _):
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            assert ask(address, "/", method)[0] == 405
        for path in ("/config.toml", "/../config.toml", "/%2e%2e/config.toml", "/data.json/x"):
            assert ask(address, path)[0] == 404
        assert urlsplit(address).hostname == "127.0.0.1"
        assert ask(address, host=f"localhost:{urlsplit(address).port}")[0] == 200


def test_without_the_token_nothing_is_shown(tmp_path: Path) -> None:
    with serving(make(tmp_path / "a")) as (address, _), serving(tmp_path / "a") as (another, _):
        place = urlsplit(address)
        assert len(place.path) > 30
        assert place.path != urlsplit(another).path
        bare = f"http://{place.netloc}/"
        token = place.path.strip("/")
        wrong = ("/", "/data.json", "/x/data.json", f"/{token[:-1]}/data.json", "/%00/data.json")
        for path in (*wrong, f"{urlsplit(another).path}data.json"):
            status, _, text = ask(bare, path)
            assert status == 403, path
            assert "html" not in text
        with socket.create_connection(("127.0.0.1", place.port)) as line:  # bytes that a client library would not send
            line.sendall(f"GET /é/ HTTP/1.0\r\nHost: {place.netloc}\r\n\r\n".encode())
            assert b" 403 " in line.recv(100)
        assert ask(address)[0] == 200


def test_a_browser_that_goes_away_leaves_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(make(tmp_path / "a")) as (address, _):
        place = urlsplit(address)
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", place.port)) as line:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, do not close
                request = f"GET {place.path}data.json HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n"
                line.sendall(request.encode())
        assert ask(address)[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_errors_of_connections_are_silent_and_others_are_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server(("127.0.0.1", 0), handler(Live(make(tmp_path / "a")), "token"))
    with server:
        for error, shown in ((BrokenPipeError(), False), (ConnectionResetError(), False), (ValueError("odd"), True)):
            try:
                raise error
            except (OSError, ValueError):
                server.handle_error(None, ("127.0.0.1", 1))
            assert ("Traceback" in capfd.readouterr().err) is shown


def test_a_folder_without_a_run_waits_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as (address, live):
        assert json.loads(ask(address, "/data.json")[2])["state"] == "waiting"
        assert not live.is_over()
        with pytest.raises(RunError, match="--port"), serving(tmp_path, urlsplit(address).port):
            pass
    with pytest.raises(UsageError, match="no folder"), serving(tmp_path / "none"):
        pass


def test_when_a_run_has_ended(tmp_path: Path) -> None:
    assert not ended(read(make(tmp_path / "a", finished=False)))
    folder = make(tmp_path / "b")
    assert ended(read(folder))
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("baselines = []", 'baselines = ["fedavg"]'))
    assert not ended(read(folder))
    summary = folder / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "outcome": "diverged"}))
    assert ended(read(folder))


def wait_for(what: Callable[[], bool], seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit, "it took too long"
        time.sleep(0.05)


def test_a_run_is_followed_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    command = [sys.executable, "-m", "coterie", "run", "--problem", "quadratic", "--rounds", "60", "--out", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with serving(folder) as (address, live):
        run = subprocess.Popen(
            [*command, "--set", "run.baselines=[]", "--json"], stdout=subprocess.DEVNULL, env=environment
        )
        seen: list[str] = []

        def over() -> bool:
            state = json.loads(ask(address, "/data.json")[2])["state"]
            if state not in seen:
                seen.append(state)
            return state.endswith("finished")

        try:
            wait_for(over)
            assert run.wait(timeout=300) == 0
        finally:
            run.kill()
            run.wait()
        assert live.is_over()
    assert seen[0] == "waiting"
    assert seen[-1] == "round 60 of 60, finished"


def test_the_command_ends_with_the_run_if_asked(
    coterie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.report.watch.GRACE", 0.0)
    done = coterie("watch", make(tmp_path / "a"), "--until-end")
    assert done.code == 0
    assert "http://127.0.0.1:" in done.out
    assert coterie("watch", tmp_path / "none").code == 2


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_live_page_refreshes_in_a_browser(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", rounds=10, finished=False)
    with serving(folder) as (address, _), browser(tmp_path / "profile") as page:
        page.open(address)
        state = "document.querySelector('.state').textContent"
        wait_for(lambda: page.run(state) == "round 10 of 10, going on")
        click = "dispatchEvent(new MouseEvent('click', {bubbles: true}))"
        page.run(f"document.querySelector('#test_accuracy-rounds .key').{click}")
        make(folder, rounds=20)
        wait_for(lambda: page.run(state) == "round 20 of 20, finished")
        hidden = "document.querySelectorAll('.key[aria-pressed=false]').length"
        assert page.run(hidden) == 1  # what was hidden stays so
        assert page.errors == []
        assert all(url.startswith((address, "data:", "about:")) for url in page.requests)
