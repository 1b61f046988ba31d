"""HTTP API of one server: requests with a deadline and their decoded answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mega_rl.rollout.sglang.http.keys import Endpoint
from mega_rl.rollout.sglang.http.request import Caller, ServerError, shortened


class ServerApi:
    """Requests to the endpoints of one server; usable from several threads. Methods raise ServerError."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        """timeout_s: deadline of one call, from the connection to the last byte of the answer, in seconds."""
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._caller = Caller()

    @property
    def requests(self) -> int:
        """Return the number of requests so far, failed ones included."""
        return self._caller.requests

    def close(self) -> None:
        """Close the HTTP client."""
        self._caller.close()

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> bytes:
        """Send a request and return the body of its 200 answer."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        return self._caller.call(self.endpoint, method, path, body, timeout_s=timeout_s)

    def json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return its answer, decoded from JSON."""
        content = self.call(method, path, body)
        try:
            return json.loads(content)
        except ValueError as error:
            what = f"answered no JSON ({error}): {shortened(content.decode(errors='replace'))!r}"
            raise ServerError(self.endpoint, path, what, status=200) from None

    def object(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and return its answer, a JSON object."""
        answer = self.json(method, path, body)
        if not isinstance(answer, dict):
            raise ServerError(self.endpoint, path, f"answered no object but {answer!r:.80}", status=200)
        return answer

    def succeed(self, path: str, body: Mapping[str, Any]) -> None:
        """POST to an endpoint that answers {"success", "message"}, and check "success"."""
        answer = self.object("POST", path, body)
        if answer.get("success") is not True:
            raise ServerError(self.endpoint, path, f"no success: {shortened(str(answer.get('message')))}", status=200)
