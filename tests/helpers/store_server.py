"""A server's `WeightStore` over real HTTP, SGLang's loading from its memory, and a network that spoils messages."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torch import Tensor

from mega_rl.rollout.sglang.control import Control, Endpoint, Keys, ServerError
from mega_rl.rollout.sglang.server.store import BUCKETS, READY, StoreEndpoints, WeightStore


class StoreServer:
    """Use as a context manager; `weights` are what its ranks have loaded, `versions` the weight versions so far."""

    def __init__(self, index: int = 0, *, tp: int = 1) -> None:
        self.index, self.tp = index, tp
        self.sizes: list[int] = []  # bytes of each message to the store
        self.restart()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True

    def restart(self) -> None:
        """Lose all memory."""
        self.store = WeightStore()
        self.weights: dict[str, Tensor] = {}
        self.versions: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> StoreServer:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, method: str, path: str, content: bytes) -> tuple[int, bytes]:
        """Answer a request as the launcher's server does."""
        if path in (BUCKETS, READY):
            self.sizes += [len(content)] if path == BUCKETS else []
            return asyncio.run(_asked(StoreEndpoints(_nothing, store=self.store), method, path, content))
        assert path == "/update_weights_from_tensor", path
        body = json.loads(content)
        assert body["load_format"] == "flattened_bucket"
        assert len(body["serialized_named_tensors"]) == self.tp
        for text in body["serialized_named_tensors"]:
            bucket = pickle.loads(base64.b64decode(text))
            for meta in bucket["metadata"]:
                flat = bucket["flattened_tensor"][meta.start_idx : meta.end_idx]
                self.weights[meta.name] = flat.view(meta.dtype).reshape(meta.shape).clone()
        if "weight_version" in body:
            self.versions.append(body["weight_version"])
        return 200, b'{"success": true, "message": ""}'


async def _nothing(*_: Any) -> None:
    raise AssertionError("the store let a request pass")


async def _asked(app: StoreEndpoints, method: str, path: str, content: bytes) -> tuple[int, bytes]:
    half = len(content) // 2
    parts = [
        {"type": "http.request", "body": content[:half], "more_body": True},
        {"type": "http.request", "body": content[half:]},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop(0)

    async def send(event: Any) -> None:
        sent.append(event)

    await app({"type": "http", "method": method, "path": path}, receive, send)
    return sent[0]["status"], sent[1]["body"]


def _handler(server: StoreServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = server.answer(self.command, self.path, content)
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST

    return Handler


KEYS = Keys("api", "admin")


class BadNetwork(Control):
    """Messages to a store are lost, doubled, delayed until after later ones, or changed in a bit; `events` counts."""

    def __init__(self, endpoint: Endpoint, timeout_s: float, *, seed: int, rate: float) -> None:
        super().__init__(endpoint, timeout_s)
        self.events: dict[str, int] = dict.fromkeys(("sent", "lost", "answer lost", "doubled", "late", "changed"), 0)
        self._random, self._rate = random.Random(seed), rate
        self._old: list[tuple[str, Any, Any]] = []  # messages that come again later

    def call(
        self, method: str, path: str, body: Any = None, *, content: bytes | None = None, timeout_s: float | None = None
    ) -> bytes:
        def deliver(path: str, body: Any, content: Any) -> bytes:
            return super(BadNetwork, self).call(method, path, body, content=content, timeout_s=timeout_s)

        if path not in (BUCKETS, READY):
            if self._random.random() < self._rate:
                self._replay(deliver)  # between two buckets that SGLang loads
            return deliver(path, body, content)
        self.events["sent"] += 1
        kind = self._random.choice(list(self.events)[1:]) if self._random.random() < self._rate else "sent"
        self.events[kind] += kind != "sent"
        self._old.append((path, body, content))
        if kind == "lost":
            raise ServerError(self.endpoint, path, "lost")
        if kind == "changed" and content is not None:
            at = self._random.randrange(content.index(b"\n") + 1, len(content))
            content = content[:at] + bytes([content[at] ^ 1 << self._random.randrange(8)]) + content[at + 1 :]
        if kind == "doubled":
            deliver(path, body, content)
        if kind == "late":
            self._replay(deliver)
        answer = deliver(path, body, content)
        if kind == "answer lost":
            raise ServerError(self.endpoint, path, "its answer is lost")
        return answer

    def _replay(self, deliver: Any) -> None:
        """Deliver up to eight messages of any age again, whatever the answer."""
        for message in self._random.choices(self._old, k=min(8, len(self._old))):
            try:
                deliver(*message)
            except ServerError as error:
                if error.status != 409:
                    raise
