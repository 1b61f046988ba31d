"""A viewer of a live run: its report on the loopback address.

A browser sees the page only with the token of the address that `mega-rl view` prints. The first request carries it and
gets it back as a cookie that no other site can send and no program of a page can read. The server listens only on
127.0.0.1, answers only to that name and to localhost, and offers a page and its data: no path of a request ever becomes
the path of a file.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from mega_rl.errors import UserError
from mega_rl.operations.diagnosis.overview import overview
from mega_rl.tracking.report.content import CONFIG, METRICS, content_of, read_runs
from mega_rl.tracking.report.page import render
from mega_rl.untrusted import JsonFields

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost")  # legal Host headers: another name may be a site that resolves to this address
REQUEST_TIMEOUT_S = 10.0
REST = 4  # files are read again after at least this many times the duration of the last reading

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
        self._seen = self._stamps()
        self._content, self._number = content_of(read_runs(self._folders)), 1
        self._next = 0.0  # time of the next reading, at the earliest

    def content(self) -> JsonFields:
        """Return the newest content with its `number`, and `ranks`, the lines of `mega-rl doctor --run`."""
        ranks: list[str] = []
        for folder in self._folders:
            with suppress(UserError, OSError):
                ranks += overview(folder)[0]
        with self._lock:
            stamps, start = self._stamps(), time.monotonic()
            if stamps != self._seen and start >= self._next:
                try:
                    self._content = content_of(read_runs(self._folders))
                    self._number += 1
                except UserError as error:
                    logger.warning("%s; the page keeps what was read before", error)
                self._seen = stamps
                self._next = time.monotonic() + REST * (time.monotonic() - start)
            return {**self._content, "number": self._number, "ranks": ranks}

    def changes(self, number: int) -> JsonFields:
        """Return the content if it is newer than content `number`, else only `number` and `ranks`."""
        content = self.content()
        return content if content["number"] != number else {key: content[key] for key in ("number", "ranks")}

    def _stamps(self) -> list[tuple[int, int]]:
        """Return values that change whenever a run has written something that a report shows."""
        stamps = []
        for path in (folder / name for folder in self._folders for name in (METRICS, CONFIG, "rollouts", "records")):
            try:
                status = path.stat()
                stamps.append((status.st_mtime_ns, status.st_size))
            except OSError:
                stamps.append((0, 0))
        return stamps


class ViewServer(ThreadingHTTPServer):
    """The server of a viewer, on the loopback address."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], *, port: int = 0, refresh_s: int = 5) -> None:
        """port: 0 takes a free one. Raises UserError for unreadable runs or a taken port."""
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
            return self._answer(400, "the address of the request is malformed\n")
        query = parse_qs(url.query)
        host = self.headers.get("Host", "")
        if (host.rpartition(":")[0] if ":" in host else host) not in NAMES:  # a tunnel may have another port
            self._answer(403, "this server answers only to 127.0.0.1 and localhost\n")
        elif url.path == "/" and self._fits(query.get("token", [""])[-1]):
            cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(303, "", Location="/", **{"Set-Cookie": cookie})
        elif not self._fits(self._cookie()):
            self._answer(403, "open the address that mega-rl view has printed: it carries the token\n")
        elif url.path == "/":
            page = render(self.server.runs.content(), refresh_s=self.server.refresh_s)
            self._answer(200, page, kind="text/html; charset=utf-8")
        elif url.path == "/data":
            number = query.get("number", ["0"])[-1]
            changes = self.server.runs.changes(int(number) if number.isdecimal() and len(number) < 10 else 0)
            self._answer(200, json.dumps(changes, allow_nan=False), kind="application/json")
        else:
            self._answer(404, "there is only /\n")

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

    def _answer(self, status: int, text: str, *, kind: str = "text/plain; charset=utf-8", **headers: str) -> None:
        self.send_response(status)
        body = text.encode()
        sent = {"Content-Type": kind, **headers, **_HEADERS, "Content-Length": str(len(body))}
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
