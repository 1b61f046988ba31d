"""A real SGLang server of a worker, and a proxy before it that lies to a run when it is ordered to."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mega_rl.rollout.sglang.control import Keys
from tests.fault_campaign.control_groups import ControlGroup
from tests.fault_campaign.orders import free_port, serve, take_order
from tests.fault_campaign.runs import ROOT

START_S = 400.0
VOCABULARY = 50  # of the campaign's model
SLOW_S = 2.0  # before a slow answer
SETTINGS = (
    *("rollout.backend=sglang", "rollout.sglang.request_timeout_s=8", "rollout.sglang.max_concurrency=16"),
    # Waits for a server count as collectives of the ranks that do not steer it.
    *("rollout.sglang.start_timeout_s=300", "rollout.sglang.sync.timeout_s=60", "trainer.timeout_s=90"),
)
Json = dict[str, Any]


class SglangServer:
    """A server that all cases of a worker generate with, one after the other."""

    def __init__(self, folder: Path, group: ControlGroup, checkpoint: Path) -> None:
        self.group = group
        folder.mkdir()
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        with group.around(), (folder / "owner.log").open("wb") as log:
            self._owner = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.sglang_owner", str(checkpoint), str(folder), "wait", "1"],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.url, self.keys = self._ready(folder)

    def _ready(self, folder: Path) -> tuple[str, Keys]:
        """Return address and keys once the server generates. Raises RuntimeError."""
        assert self._owner.stdout is not None
        os.set_blocking(self._owner.stdout.fileno(), False)
        answer, deadline = b"", time.monotonic() + START_S
        while not answer.endswith(b"\n"):
            answer += self._owner.stdout.read() or b""
            if self._owner.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"the SGLang server does not start: {(folder / 'owner.log').read_text()[-600:]}")
            time.sleep(0.05)
        said = json.loads(answer)
        return str(said["url"]), Keys(said["api_key"], said["admin_key"])

    def close(self) -> None:
        """End the server."""
        try:
            self._owner.terminate()
            self._owner.wait(60.0)
        except subprocess.TimeoutExpired:
            self._owner.kill()
            self._owner.wait(60.0)
        finally:
            self.group.close()


def start_proxy(folder: Path, server: SglangServer) -> tuple[int, int]:
    """Start a proxy that follows the orders in a folder; returns its process and its port."""
    port = free_port()
    return serve(port, proxy(folder, server.url)), port


def proxy(folder: Path, url: str) -> type[BaseHTTPRequestHandler]:
    """Return a handler that hands requests on to a server, and answers of /generate back as the orders say."""
    place = urlsplit(url)

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._hand_on()

        def do_POST(self) -> None:
            self._hand_on()

        def _hand_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            how = take_order(folder) if self.path == "/generate" and b"probe" not in body else ""
            if how == "close":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if how == "hang":
                time.sleep(3600)
            if how == "slow":
                time.sleep(SLOW_S)
            connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=300)
            try:
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                status, content = answer.status, answer.read()
            finally:
                connection.close()
            if how in LIES and status == 200:
                content = json.dumps(LIES[how](json.loads(content))).encode()
            self.send_response(int(how) if how.isdigit() else status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if how == "cut" else content)
            self.close_connection |= how == "cut"

        def log_message(self, *_: object) -> None:
            """Write no log."""

    return Proxy


def _foreign(answer: Json) -> Json:
    tokens = [VOCABULARY + 7, *answer["output_ids"][1:]]
    logprobs = [[each[0], token, None] for each, token in zip(_logprobs(answer), tokens, strict=True)]
    return {**_with(answer, output_token_logprobs=logprobs), "output_ids": tokens}


def _old(answer: Json) -> Json:
    version = str(int(answer["meta_info"]["weight_version"]) - 1)
    spans = [{**span, "version": version} for span in answer["meta_info"].get("weight_versions", ())]
    return _with(answer, weight_version=version, **({"weight_versions": spans} if spans else {}))


def _logprobs(answer: Json) -> list[list[Any]]:
    return list(answer["meta_info"]["output_token_logprobs"])


def _with(answer: Json, **changes: object) -> Json:
    return {**answer, "meta_info": {**answer["meta_info"], **changes}}


def _first(value: object) -> Callable[[Json], Json]:
    """Return a lie in which every log-probability is this value."""
    return lambda answer: _with(answer, output_token_logprobs=[[value, *each[1:]] for each in _logprobs(answer)])


# Answers that a client must not believe.
LIES: Mapping[str, Callable[[Json], Json]] = {
    "a token short": lambda answer: {**answer, "output_ids": answer["output_ids"][:-1]},
    "a token long": lambda answer: {**answer, "output_ids": [*answer["output_ids"], 3]},
    "token outside the vocabulary": _foreign,
    "NaN for log-probs": _first(float("nan")),
    "null for log-probs": _first(None),
    "no log-probs": lambda answer: _with(answer, output_token_logprobs=None),
    "old weights version": _old,
}
HOW = (*LIES, "500", "503", "close", "hang", "cut", "slow")
