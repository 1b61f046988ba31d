"""One HTTP request to a server, with a deadline that holds and an error that says what happened."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from mega_rl.errors import RunError
from mega_rl.rollout.sglang.http.keys import GENERATION, Endpoint

NEVER = -1e30  # added to a logit: probability 0; JSON has no infinity
NUCLEUS_OF_ONE = 1e-6  # a top_p so small that the nucleus is the most likely token alone
_MAX_MESSAGE = 400  # characters of a server's words that an error repeats
_MAX_ANSWER = 256 << 20  # bytes; checksums of all tensors of the largest models are far below


def hidden_bias(token_ids: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return SGLang's sampling parameter that gives tokens a probability of 0; none without tokens."""
    return {"logit_bias": {str(token): NEVER for token in token_ids}} if token_ids else {}


class ServerError(RunError):
    """A request that a server did not fulfil. The message names server, endpoint, status and the server's message."""

    def __init__(self, endpoint: Endpoint, path: str, what: str, *, status: int | None = None) -> None:
        self.server = endpoint.index
        self.path = path
        self.status = status  # None: no whole answer came
        said = "" if status is None else f"HTTP {status}: "
        what = _without_keys(what, endpoint)
        super().__init__(f"SGLang server {endpoint.index} at {endpoint.url}, {path}: {said}{what}")


class Caller:
    """HTTP client that opens a connection for each request; usable from any thread.

    A server closes a kept connection between two weight updates, and a request that meets the closing cannot be
    distinguished from one that was half done.
    """

    def __init__(self) -> None:
        self.requests = 0  # made so far, those that failed among them
        self._counting = threading.Lock()
        self._client = httpx.Client(
            trust_env=False,  # a proxy has no business between us and a server of ours
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def close(self) -> None:
        """Close the HTTP client."""
        self._client.close()

    def call(
        self, endpoint: Endpoint, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> bytes:
        """Send a request and return the body of its 200 answer. Raises ServerError for any other outcome."""
        key = endpoint.keys.api_key if path in GENERATION else endpoint.keys.admin_key
        with self._counting:
            self.requests += 1
        with _Deadline(timeout_s) as deadline:
            request = self._client.build_request(
                method,
                endpoint.url + path,
                json=body,
                headers={"Authorization": f"Bearer {key}", "Accept-Encoding": "identity"},
                timeout=timeout_s,
                extensions={"trace": deadline.watch},
            )
            try:
                status, content = self._exchange(request)
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                what = f"{type(error).__name__}: {shortened(str(error)) or 'the connection ended'}"
                if deadline.passed or isinstance(error, httpx.TimeoutException):
                    what = f"waited {timeout_s:g} s for its answer"
                raise ServerError(endpoint, path, what) from None
        if deadline.passed:
            raise ServerError(endpoint, path, f"waited {timeout_s:g} s for its answer")
        if status != 200:
            raise ServerError(endpoint, path, shortened(_message(content)), status=status)
        return content

    def _exchange(self, request: httpx.Request) -> tuple[int, bytes]:
        """Return (status, body) of the answer."""
        response = self._client.send(request, stream=True)
        try:
            content = bytearray()
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > _MAX_ANSWER:
                    raise httpx.ReadError(f"an answer of more than {_MAX_ANSWER} bytes")
            return response.status_code, bytes(content)
        finally:
            response.close()


class _Deadline:
    """Timer that shuts the socket of one request at its deadline.

    httpx's own timeouts are those of single reads: an answer that drips would come for ever.
    """

    def __init__(self, timeout_s: float) -> None:
        self.passed = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def watch(self, event: str, info: Mapping[str, Any]) -> None:
        """Keep the socket of the request's connection; a callback of httpcore's "trace" extension."""
        if event == "connection.connect_tcp.complete":
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
                if self.passed:
                    self._shut()

    def _end(self) -> None:
        with self._lock:
            self.passed = True
            self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the server closed it first
                self._socket.shutdown(socket.SHUT_RDWR)


def _message(content: bytes) -> str:
    """Return the message in a refusal's JSON, else its text."""
    text = content.decode(errors="replace")
    try:
        answer = json.loads(text)
    except ValueError:
        return text
    for name in ("message", "error", "detail"):
        said = answer.get(name) if isinstance(answer, dict) else None
        if isinstance(said, dict):
            said = said.get("message")
        if isinstance(said, str) and said:
            return said
    return text


def shortened(text: str) -> str:
    """Return `text` on one line of at most 400 characters; keep its end, where SGLang's tracebacks name the error."""
    text = " ".join(text.split())
    half = _MAX_MESSAGE // 2
    return text if len(text) <= _MAX_MESSAGE else f"{text[:half]} ... {text[-half:]}"


def _without_keys(text: str, endpoint: Endpoint) -> str:
    for key in (endpoint.keys.api_key, endpoint.keys.admin_key):
        text = text.replace(key, "***") if key else text
    return text
