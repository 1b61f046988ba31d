"""A headless Chromium for tests of pages, by the DevTools protocol over pipes: no port, no other package.

`make browser` installs one. Nothing but files and the loopback address can be reached: names of hosts resolve nowhere.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
DEADLINE_S = 60.0


def find_chromium() -> str | None:
    """Return the program of a Chromium, None if this machine has none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a headless Chromium; keeps what the page says on its console and what it asks the network for."""

    def __init__(self, process: subprocess.Popen[bytes], send_fd: int, receive_fd: int) -> None:
        self._process, self._send_fd, self._receive_fd = process, send_fd, receive_fd
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.console: list[str] = []  # messages, exceptions and log entries, violations of policies among them
        self.requests: list[str] = []  # addresses
        self.loaded = 0  # events of a page that has loaded

    def start(self, *, width: int, height: int, scheme: str) -> None:
        """Open an empty page of this size; scheme: "light" or "dark"."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str) -> None:
        """Load an address and wait until the page has loaded."""
        before = self.loaded
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + DEADLINE_S
        while self.loaded == before:
            self._receive(deadline)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send_fd, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self._receive_fd], [], [], left)[0]
            assert ready, f"Chromium did not answer within {DEADLINE_S:g} s"
            part = os.read(self._receive_fd, 1 << 20)
            assert part, f"Chromium has ended ({self._process.poll()})"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled":
            self.console.append(
                f"{params['type']}: {[one.get('value', one.get('description')) for one in params['args']]}"
            )
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(f"exception: {details.get('exception', {}).get('description', details['text'])}")
        elif method == "Log.entryAdded":
            self.console.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded += 1


@contextmanager
def chromium(folder: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator[Browser]:
    """Start a headless Chromium with an empty profile in `folder`; skips the test where there is none."""
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on this machine: `make browser`, or apt-get install chromium-headless-shell")
    receive_by_browser, send_fd = os.pipe()
    receive_fd, send_by_browser = os.pipe()
    command = _command(program, folder, receive_by_browser, send_by_browser)
    process = subprocess.Popen(
        command, pass_fds=(receive_by_browser, send_by_browser), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(receive_by_browser)
    os.close(send_by_browser)
    try:
        browser = Browser(process, send_fd, receive_fd)
        browser.start(width=width, height=height, scheme=scheme)
        yield browser
    finally:
        process.kill()
        process.wait()
        os.close(send_fd)
        os.close(receive_fd)


def _command(program: str, folder: Path, read_fd: int, write_fd: int) -> Sequence[str]:
    """Return the command line: the pipes are expected as descriptors 3 and 4."""
    options = [
        "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
    ]  # fmt: skip
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # root may not have Chromium's sandbox; the pages are our own
    moved = f'exec "$0" "$@" 3<&{read_fd} 4>&{write_fd}'
    return ["/bin/bash", "-c", moved, program, *options]
