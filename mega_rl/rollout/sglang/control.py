"""Address, keys and control of one server: a deadline for each call. Imports no torch.

Endpoints, bodies and answers are those of SGLang 0.5.21 (srt/entrypoints/http_server.py, srt/managers/io_struct.py).
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from mega_rl.errors import RunError, UserError

ADAPTER = "policy"  # name under which servers hold the policy's adapters
_MAX_MESSAGE = 400  # characters of a server's words that an error repeats
_MAX_ANSWER = 256 << 20  # bytes; checksums of all tensors of the largest models are far below
_FLUSH_PAUSE_S = 0.02  # between two tries; the scheduler needs a few milliseconds to find itself idle
_MOST_THREADS = 128

Answer = TypeVar("Answer")


class ServerError(RunError):
    """A request that a server did not fulfil; the message has the server's answer."""

    def __init__(self, endpoint: Endpoint, path: str, what: str, *, status: int | None = None) -> None:
        self.server = endpoint.index
        self.path = path
        self.status = status  # None: no whole answer came
        said = "" if status is None else f"HTTP {status}: "
        for key in (endpoint.keys.api_key, endpoint.keys.admin_key):
            what = what.replace(key, "***") if key else what
        super().__init__(f"SGLang server {endpoint.index} at {endpoint.url}, {path}: {said}{what}")


class Control:
    """Client of one server, usable from several threads. Methods raise ServerError for anything but success.

    It opens a connection for each request: a server closes a kept connection between two weight updates, and nobody
    can tell a request that meets the closing from a half-done one.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        """timeout_s: seconds for one call, from the connection to the answer's last byte."""
        self.endpoint = endpoint  # set another one after a restart
        self.timeout_s = timeout_s
        self.requests = 0  # so far, failed ones included
        self._counting = threading.Lock()
        # A proxy must not stand between us and our server.
        self._client = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    def close(self) -> None:
        """Close the HTTP client."""
        self._client.close()

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        content: bytes | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """Send a request, of JSON or of bytes, and return the body of its 200 answer."""
        endpoint, timeout_s = self.endpoint, self.timeout_s if timeout_s is None else timeout_s
        key = endpoint.keys.api_key if path in GENERATION else endpoint.keys.admin_key
        with self._counting:
            self.requests += 1
        deadline = time.monotonic() + timeout_s
        headers = {"Authorization": f"Bearer {key}", "Accept-Encoding": "identity"}
        try:
            with self._client.stream(
                method, endpoint.url + path, json=body, content=content, headers=headers, timeout=timeout_s
            ) as response:
                answer = read_answer(response, deadline)
        except httpx.TimeoutException:
            raise ServerError(endpoint, path, f"waited {timeout_s:g} s for its answer") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            what = f"{type(error).__name__}: {shortened(str(error)) or 'the connection ended'}"
            raise ServerError(endpoint, path, what) from None
        if response.status_code != 200:
            raise ServerError(endpoint, path, shortened(answer.decode(errors="replace")), status=response.status_code)
        return answer

    def object(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and return its answer, a JSON object."""
        content = self.call(method, path, body)
        try:
            answer = json.loads(content)
        except ValueError as error:
            what = f"answered no JSON ({error}): {shortened(content.decode(errors='replace'))!r}"
            raise ServerError(self.endpoint, path, what, status=200) from None
        if not isinstance(answer, dict):
            raise ServerError(self.endpoint, path, f"answered no object but {answer!r:.80}", status=200)
        return answer

    def succeed(self, path: str, body: Mapping[str, Any]) -> None:
        """POST to an endpoint that answers {"success", "message"}, and check "success"."""
        answer = self.object("POST", path, body)
        if answer.get("success") is not True:
            raise ServerError(self.endpoint, path, f"no success: {shortened(str(answer.get('message')))}", status=200)

    def answers(self, path: str, *, timeout_s: float) -> bool:
        """Return whether a GET of this endpoint is answered with 200 in time."""
        try:
            self.call("GET", path, timeout_s=min(self.timeout_s, timeout_s))
        except ServerError:
            return False
        return True

    def flush(self) -> None:
        """Empty the prefix cache; retry for up to `timeout_s` until the server is idle."""
        deadline, tries, what = time.monotonic() + self.timeout_s, 0, ""
        while (left := deadline - time.monotonic()) > 0:
            tries += 1
            try:
                self.call("GET", "/flush_cache", timeout_s=left)
                return
            except ServerError as error:
                if error.status != 400 and not what:  # 400: a server that still has requests
                    raise
                what = f"waited {self.timeout_s:g} s for the server to be idle, {tries} tries; last answer: {error}"
            time.sleep(min(_FLUSH_PAUSE_S * tries, 1.0, max(0.0, deadline - time.monotonic())))
        raise ServerError(self.endpoint, "/flush_cache", what)

    def update_from_tensor(
        self, payloads: Sequence[str], *, load_format: str | None = None, version: int | None = None
    ) -> None:
        """Load one bucket; payloads: one text per tensor-parallel rank of the server."""
        body = {"serialized_named_tensors": list(payloads), "load_format": load_format}
        self._update("/update_weights_from_tensor", body, version)

    def init_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None:
        """Join a process group with the trainer as rank 0; returns when it is complete."""
        body = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        self.succeed("/init_weights_update_group", body | {"group_name": group, "backend": backend})

    def update_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        load_format: str | None = None,
        version: int | None = None,
    ) -> None:
        """Receive one bucket over a group made by `init_group`; dtypes as "bfloat16"."""
        body = {"names": list(names), "dtypes": list(dtypes), "shapes": [list(shape) for shape in shapes]}
        self._update(
            "/update_weights_from_distributed", {**body, "group_name": group, "load_format": load_format}, version
        )

    def destroy_group(self, group: str) -> None:
        """Leave a group made by `init_group`."""
        self.succeed("/destroy_weights_update_group", {"group_name": group})

    def _update(self, path: str, body: dict[str, Any], version: int | None) -> None:
        # Flush before the update, not with it: SGLang asserts that it succeeds, and a server with requests would die.
        body |= {"flush_cache": False, "abort_all_requests": False}
        if version is not None:
            body["weight_version"] = str(version)
        self.succeed(path, body)


def each(servers: Collection[int], ask: Callable[[int], Answer]) -> tuple[dict[int, Answer], dict[int, str]]:
    """Call `ask` for all servers at once; return answers and failures by server."""
    answers: dict[int, Answer] = {}
    failed: dict[int, str] = {}

    def attempt(server: int) -> None:
        try:
            answers[server] = ask(server)
        except ServerError as error:
            failed[server] = str(error)

    if servers:
        with ThreadPoolExecutor(min(len(servers), _MOST_THREADS), thread_name_prefix="server") as pool:
            list(pool.map(attempt, servers))
    return {i: answers[i] for i in servers if i in answers}, {i: failed[i] for i in servers if i in failed}


def read_answer(response: httpx.Response, deadline: float, *, most: int = _MAX_ANSWER) -> bytes:
    """Return the body of an answer, at most `most` bytes. Raises httpx.HTTPError, also after `deadline`."""
    content = bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if time.monotonic() > deadline:  # httpx's own limit is of single reads, and an answer may drip for ever
            raise httpx.ReadTimeout("the answer's deadline")
        if len(content) > most:
            raise httpx.ReadError(f"an answer of more than {most} bytes")
    return bytes(content)


def shortened(text: str) -> str:
    """Return `text` on one line of at most 400 characters, its start and its end."""
    text = " ".join(text.split())
    half = _MAX_MESSAGE // 2
    return text if len(text) <= _MAX_MESSAGE else f"{text[:half]} ... {text[-half:]}"


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# The api key opens these paths. All else, known or not, needs the admin key: weights, memory, pausing,
# aborting, adapters (which SGLang reads with pickle), profiles.
GENERATION = frozenset({"/generate", "/health", "/health_generate", "/model_info", "/server_info"})


@dataclass(frozen=True)
class Keys:
    """Two keys of a server, which repr does not show."""

    api_key: str = field(repr=False)  # for GENERATION
    admin_key: str = field(repr=False)  # for all else

    @classmethod
    def random(cls) -> Keys:
        """Return two random keys of 256 bits."""
        return cls(secrets.token_urlsafe(32), secrets.token_urlsafe(32))

    def appear_in(self, content: bytes) -> bool:
        """Return whether `content` holds one of the keys, and so must not be shown."""
        return any(key.encode() in content for key in (self.api_key, self.admin_key))

    def write(self, path: Path) -> None:
        """Write both into a new file that only its owner can read. Raises FileExistsError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read both keys; raises UserError if the file is incomplete or readable by others."""
        try:
            mode = path.stat().st_mode
            keys = cls(**json.loads(path.read_text("utf-8")))
            if not all(isinstance(key, str) and key for key in (keys.api_key, keys.admin_key)):
                raise ValueError("a key is empty or not a string")
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f'{path}: cannot be read as a file of keys: {type(error).__name__}; it holds {{"api_key": "...", '
                '"admin_key": "..."}'
            ) from None
        if mode & 0o077:
            raise UserError(f"{path}: others than its owner may read it (mode {mode & 0o777:o}); chmod 600 {path}")
        return keys


@dataclass(frozen=True)
class Endpoint:
    """Address and keys of one server."""

    index: int  # number of the server in the run
    url: str  # "http://127.0.0.1:31001"
    keys: Keys


class KeyCheck:
    """ASGI middleware: 401 for a request without its path's key, even for /health.

    Websockets are refused whatever their key: the trainer has no use for them.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], *, api_key: str, admin_key: str) -> None:
        self._app = app
        self._api = f"Bearer {api_key}".encode()
        self._admin = f"Bearer {admin_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it was accepted: the client sees a 403
            return
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b'{"error": "missing or wrong key"}'})

    def _may(self, scope: Scope) -> bool:
        if scope["type"] != "http":
            return False
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        wanted = self._api if scope["path"] in GENERATION else self._admin
        return secrets.compare_digest(given, wanted)
