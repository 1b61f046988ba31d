"""A viewer of a run that goes on: its report on the loopback address, brought up to date from the run's files.

A browser shows the page to whoever has the token of the address that `mega-rl view` prints: the first request carries
it and gets it back as a cookie that no other site can send and no program of a page can read. The server listens on
127.0.0.1 alone, answers to that name and to localhost alone, and offers a page and its data: no path of a request ever
becomes one of a file.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from mega_rl.errors import UserError
from mega_rl.operations.diagnosis.overview import overview
from mega_rl.report.document import content_of, render
from mega_rl.report.runs import CONFIG, METRICS, read_runs
from mega_rl.storage.strict_json import JsonFields

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost")  # that a browser may call the server: another may be a site that resolves to it
REQUEST_TIMEOUT_S = 10.0
REST = 4  # times as long as reading took is at least the time until files are read again

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LiveRuns:
    """Content of runs' reports, read again when their files have changed; used by several threads."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Read the runs. Raises UserError."""
        self._folders = list(folders)
        self._lock = threading.Lock()
        self._seen = _state(self._folders)
        self._number = 1
        self._content = content_of(read_runs(self._folders))
        self._next = 0.0

    def content(self) -> JsonFields:
        """Return the newest content with its `number`, and `ranks`, the lines of `mega-rl doctor --run`."""
        with self._lock:
            self._refresh()
            return {**self._content, "number": self._number, "ranks": _ranks(self._folders)}

    def changes(self, number: int) -> JsonFields:
        """Return the content if it is newer than that of a number, else only `number` and `ranks`."""
        content = self.content()
        return content if content["number"] != number else {key: content[key] for key in ("number", "ranks")}

    def _refresh(self) -> None:
        state = _state(self._folders)
        start = time.monotonic()
        if state == self._seen or start < self._next:
            return
        try:
            self._content = content_of(read_runs(self._folders))
            self._number += 1
        except UserError as error:
            logger.warning("%s; the page keeps what was read before", error)
        self._seen = state
        self._next = time.monotonic() + REST * (time.monotonic() - start)


class ViewServer(ThreadingHTTPServer):
    """The server of a viewer, on the loopback address."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], *, port: int = 0, refresh_s: int = 5) -> None:
        """port: 0 takes a free one. Raises UserError for runs that cannot be read, or a port that is taken."""
        self.runs = LiveRuns(folders)
        self.refresh_s = refresh_s
        self.token = secrets.token_urlsafe(32)
        try:
            super().__init__((LOOPBACK, port), _PageHandler)
        except OSError as error:
            raise UserError(f"--port={port}: cannot be listened on ({error.strerror}); 0 takes a free one") from error

    @property
    def address(self) -> str:
        """Return the address to open, which carries the token."""
        return f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"

    @property
    def cookie(self) -> str:
        """Return the name of the cookie: browsers share cookies between the ports of a host."""
        return f"mega_rl_view_{self.server_port}"

    def page(self) -> str:
        """Return the page with the newest content."""
        return render(self.runs.content(), refresh_s=self.refresh_s)


class _PageHandler(BaseHTTPRequestHandler):
    """Requests of a browser: the page and its data, for those who have the token."""

    server: ViewServer
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "mega_rl", ""

    def do_GET(self) -> None:
        """Answer a request."""
        try:
            url = urlsplit(self.path)
        except ValueError:
            return self._say(400, "this is no address")
        query = parse_qs(url.query)
        given = query.get("token", [""])[-1]
        if _name_of(self.headers.get("Host", "")) not in NAMES:
            self._say(403, "this server answers to 127.0.0.1 and localhost alone")
        elif url.path == "/" and given and self._fits(given):
            self._send_away()
        elif not self._fits(self._cookie()):
            self._say(403, "open the address that mega-rl view has printed: it carries the token")
        elif url.path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.page())
        elif url.path == "/data":
            number = query.get("number", ["0"])[-1]
            changes = self.server.runs.changes(int(number) if number.isdecimal() and len(number) < 10 else 0)
            self._answer(200, "application/json", json.dumps(changes, allow_nan=False))
        else:
            self._say(404, "there is only /")

    def log_message(self, format: str, *args: object) -> None:
        """Keep requests, whose addresses carry the token, out of the terminal."""

    def _fits(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.server.token.encode())

    def _cookie(self) -> str:
        try:
            morsel = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return ""
        return morsel.value if morsel else ""

    def _send_away(self) -> None:
        """Give the token as a cookie and lead to the address without it."""
        self.send_response(303)
        self.send_header("Location", "/")
        cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        self.send_header("Set-Cookie", cookie)
        self._end(b"")

    def _say(self, status: int, text: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", text + "\n")

    def _answer(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self._end(text.encode())

    def _end(self, body: bytes) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _name_of(host: str) -> str:
    """Return the name of a Host header, without the port: a tunnel may have another one."""
    return host.rpartition(":")[0] if ":" in host else host


def _state(folders: Sequence[Path]) -> list[tuple[int, int]]:
    """Return what changes whenever a run has written something that a report shows."""
    names = (METRICS, CONFIG, "rollouts", "records")
    return [_stamp(folder / name) for folder in folders for name in names]


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


def _ranks(folders: Sequence[Path]) -> list[str]:
    """Return the table of ranks of each run that has records of them."""
    lines: list[str] = []
    for folder in folders:
        try:
            lines += overview(folder)[0]
        except (UserError, OSError):
            continue
    return lines
