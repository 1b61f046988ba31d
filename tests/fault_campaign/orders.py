"""Orders to services of the campaign, which are processes of their own: a file in the folder of the run they serve."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

START_S = 60.0
LOCK = threading.Lock()  # of a service's threads
ORDER, HIT = "service-order", "service-hit"


def give_order(folder: Path, how: str, times: int) -> None:
    """Have the next requests answered in a way, `times` of them; 0: all from now on."""
    replacement = folder / f"{ORDER}.new"
    replacement.write_text(json.dumps({"how": how, "times": times}))
    replacement.rename(folder / ORDER)


def take_order(folder: Path) -> str:
    """Return the order for this request, empty for a right answer."""
    order = folder / ORDER
    with LOCK:
        try:
            given = json.loads(order.read_text())
        except FileNotFoundError:
            return ""
        (folder / HIT).touch()
        if given["times"] == 1:
            order.unlink(missing_ok=True)
        elif given["times"]:
            give_order(folder, given["how"], given["times"] - 1)
        return str(given["how"])


class Service(ThreadingHTTPServer):
    """A service whose clients may hang up without a word about it."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def serve(port: int, handler: type[BaseHTTPRequestHandler]) -> int:
    """Start a service in a process of its own, which ends with this one; returns it once it listens."""
    pid = os.fork()
    if not pid:
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            Service(("127.0.0.1", port), handler).serve_forever(0.01)
        finally:
            os._exit(0)
    wait_for_port(port)
    return pid


def free_port() -> int:
    """Return a port of this host at which no program listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def wait_for_port(port: int) -> None:
    """Return once a program listens at a port of this host. Raises TimeoutError."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.01)
    raise TimeoutError(f"nobody listens at port {port} after {START_S:g} s")
