"""Address and keys of a server, in a file and in every request. Imports no torch."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mega_rl.errors import UserError

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
        """Read both keys from a file. Raises UserError for a file that others can read or without both keys."""
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
