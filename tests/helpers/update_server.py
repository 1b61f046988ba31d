"""A server with SGLang's control endpoints over real HTTP; its "model" is a few numbers, and it fails when told to.

Its log-probs follow from the numbers that it was sent, so that a lost bucket shows.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from mega_rl.rollout.sglang.control import GENERATION, Endpoint, Keys

VOCAB_SIZE = 50
KEYS = Keys("api-secret", "admin-secret")


def next_logprobs(weights: Mapping[str, float], temperature: float) -> torch.Tensor:
    """[V] float64, the log-probs of every token, whatever came before it, under a model of a few named numbers."""
    total = sum((place + 1) * weights[name] for place, name in enumerate(sorted(weights)))
    return (torch.cos(torch.arange(1, VOCAB_SIZE + 1) * total).double() / temperature).log_softmax(0)


def payload(bucket: Mapping[str, float]) -> str:
    """Return the payload of an update of these numbers."""
    return base64.b64encode(json.dumps(bucket).encode()).decode()


class UpdateServer:
    """Use as a context manager. `faults`: path -> (kind, number of the first call that it meets, from 1).

    Kinds: refuse (400), error (500), unsuccessful (200 with success false), html, list, cut, reset, hang, drip,
    die (the server ends), ignore (200 and nothing done), echo (400 that repeats the keys), late (done
    a second later).
    """

    def __init__(
        self,
        index: int = 0,
        *,
        tp: int = 1,
        info: Mapping[str, Any] | None = None,
        host: str = "127.0.0.1",
        keys: Keys = KEYS,
    ) -> None:
        self.index, self.tp, self.keys, self._host = index, tp, keys, host
        self.info = dict(info or {})
        self.faults: dict[str, tuple[str, int]] = {}
        self.calls: list[tuple[str, Any]] = []  # (path, body) in the order in which they came
        self.weights: dict[str, float] = {}
        self.adapter: dict[str, float] = {}  # added to the weights of requests that name it
        self.version = "default"
        self.paused = False
        self.has_sessions = True  # as SGLang from 0.5.21 on
        self.in_session = False
        self.busy = 0  # flushes that it still refuses
        self.stopped = threading.Event()
        self._http = ThreadingHTTPServer((host, 0), _handler(self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.index, f"http://{self._host}:{self._http.server_address[1]}", self.keys)

    def __enter__(self) -> UpdateServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Refuse all further connections."""
        if not self.stopped.is_set():
            self.stopped.set()
            self._http.shutdown()
            self._http.server_close()

    def paths(self) -> list[str]:
        """Return the paths of all requests, in order."""
        return [path for path, _ in self.calls]

    def number(self, path: str) -> int:
        """Calls of an endpoint so far."""
        return self.paths().count(path)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """(status, JSON or text) of a call that nothing befalls."""
        if path == "/generate":
            return 200, self._generated(body)
        if path == "/model_info":
            return 200, {"weight_version": self.version, **self.info.get("model", {})}
        if path == "/server_info":
            return 200, {"tp_size": self.tp, **self.info.get("server", {})}
        if path == "/flush_cache":
            self.busy -= self.busy > 0
            return (400, "Flush cache failed.\n") if self.busy else (200, "Cache flushed.\n")
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
            return 200, {"status": "ok"}
        if path in ("/begin_weight_update", "/end_weight_update"):
            begins, was = path.startswith("/begin"), self.in_session
            if not self.has_sessions or begins == was:
                message = "a weight-update session is already open" if was else "no weight-update session is open"
                return (400 if self.has_sessions else 404), {"success": False, "message": message}
            self.in_session = begins
        if path.startswith("/update_weights_from"):
            if self.has_sessions and not self.in_session:
                return 400, {"success": False, "message": "must run between begin_weight_update() and its end"}
            assert self.paused, "weights came to a server that generates"
            assert body["flush_cache"] is False, "a flush would be asserted to succeed"
            for part in body.get("serialized_named_tensors", ()):
                self.weights |= json.loads(base64.b64decode(part))
            self.version = body.get("weight_version", self.version)
        if path == "/unload_lora_adapter":
            had, self.adapter = self.adapter, {}
            return (200 if had else 400), {"success": bool(had), "error_message": "", "loaded_adapters": {}}
        if path == "/load_lora_adapter_from_tensors":
            assert self.paused, "an adapter came to a server that generates"
            assert not self.adapter, "it is loaded already"
            scale = body["config_dict"]["lora_alpha"] / body["config_dict"]["r"]  # SGLang's, whatever use_rslora says
            tensors = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
            self.adapter = {name: scale * float(tensor.sum()) for name, tensor in tensors.items()}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return 200, {"success": True, "message": "done"}

    def restart(self) -> None:
        """Go back to other weights, without an adapter."""
        self.weights = {name: value + 0.1 for name, value in self.weights.items()}  # its checkpoint's
        self.adapter, self.version = {}, "default"

    def _generated(self, body: Any) -> Any:
        params = body["sampling_params"]
        weights = self.weights | (self.adapter if "lora_path" in body else {})
        logprobs = next_logprobs(weights, params["temperature"])
        token = int(logprobs.argmax())
        count = params["max_new_tokens"]
        return {
            "output_ids": [token] * count,
            "meta_info": {"output_token_logprobs": [[float(logprobs[token]), token, None]] * count},
        }


def _handler(server: UpdateServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            path = self.path.partition("?")[0]
            wanted = server.keys.api_key if path in GENERATION else server.keys.admin_key
            if self.headers.get("Authorization") != f"Bearer {wanted}":
                self._send(401, {"error": "missing or wrong key"})
                return
            server.calls.append((path, body))
            kind, first = server.faults.get(path, ("", 0))
            if kind and server.number(path) >= first:
                self._misbehave(kind, path, body)
            else:
                self._send(*server.answer(path, body))

        do_POST = do_GET

        def _send(self, status: int, content: Any) -> None:
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _misbehave(self, kind: str, path: str, body: Any) -> None:
            answers: dict[str, tuple[int, Any]] = {
                "refuse": (400, {"success": False, "message": "not now " + "x" * 5000 + " the reason"}),
                "error": (500, "Internal Server Error"),
                "unsuccessful": (200, {"success": False, "message": "partially updated"}),
                "html": (200, "<html>"),
                "list": (200, [1]),
                "ignore": (200, {"success": True, "message": ""}),
                "echo": (400, {"message": f"keys {KEYS.api_key} {KEYS.admin_key}"}),
            }
            if kind in answers:
                self._send(*answers[kind])
                return
            self.close_connection = True
            if kind == "late":
                time.sleep(1.0)
                self._send(*server.answer(path, body))
            elif kind == "hang":
                server.stopped.wait()
            elif kind == "drip":
                self._drip([b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", *[b" "] * 1000])
            elif kind == "cut":
                self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"succ')
            elif kind == "die":
                threading.Thread(target=server.die).start()
                server.stopped.wait()
            else:
                assert kind == "reset", kind

        def _drip(self, parts: Iterable[bytes]) -> None:
            for part in parts:
                try:
                    self.wfile.write(part)
                except OSError:
                    return
                if server.stopped.wait(0.05):
                    return

    return Handler


def weights_of_version(version: int, names: Sequence[str] = ("a", "b", "c")) -> dict[str, float]:
    """Numbers that differ from version to version."""
    return {name: math.sin(7.0 * version + place) for place, name in enumerate(names)}
