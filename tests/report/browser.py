"""A headless Chromium, driven over its debugging pipe: no package is needed for that."""

import json
import os
import shutil
import subprocess
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE = 120.0  # seconds for one answer, on a busy machine


class Page:
    """One tab: what it logs and asks for is kept."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb")
        self._inbox: Queue[dict[str, Any]] = Queue()
        self._number, self._session = 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def begin(self) -> None:
        """A tab, with its events."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def _listen(self) -> None:
        buffer = b""
        while chunk := self._answers.read1(1 << 16):
            *whole, buffer = (buffer + chunk).split(b"\0")
            for message in whole:
                self._inbox.put(json.loads(message))

    def close(self) -> None:
        """When the browser has ended."""
        self._listener.join()
        self._commands.close()
        self._answers.close()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events on the way are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            try:
                answer = self._inbox.get(timeout=PATIENCE)
            except Empty:
                raise TimeoutError(f"the browser did not answer {method}") from None
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        kind, about = event.get("method"), event.get("params", {})
        if kind == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif kind == "Runtime.exceptionThrown":
            self.errors.append(str(about["exceptionDetails"]))
        elif kind == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(str(about["args"]))
        elif kind == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif kind == "Page.loadEventFired":
            self._loaded = True

    def open(self, address: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page at a size, in light or dark, and wait until it is there."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=theme)
        self._loaded = False
        self.ask("Page.navigate", url=address)
        while not self._loaded:
            self._note(self._inbox.get(timeout=PATIENCE))

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def picture(self, out: Path, *, whole: bool = True) -> None:
        """A screenshot."""
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        out.write_bytes(b64decode(data))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A Chromium with a profile of its own, ended afterwards."""
    assert CHROMIUM is not None
    command_out, command_in = os.pipe()
    answer_out, answer_in = os.pipe()

    def wire() -> None:  # the browser reads commands from 3 and answers on 4
        os.dup2(command_out, 103)
        os.dup2(answer_in, 104)
        os.dup2(103, 3)
        os.dup2(104, 4)

    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
        preexec_fn=wire,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_out)
    os.close(answer_in)
    page = Page(command_in, answer_out)
    try:
        page.begin()
        yield page
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        page.close()
