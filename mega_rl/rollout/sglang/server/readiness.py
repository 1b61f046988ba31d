"""Readiness of a server that has just started or been adopted: its health, and a first token. Imports no torch."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mega_rl.rollout.sglang.http.control import Control, ServerError
from mega_rl.rollout.sglang.http.keys import Endpoint

_POLL_S = 0.1
_HEALTH_S = 10.0  # for one answer
_ADOPT_S = 30.0  # of a healthy server it takes two, of which an abort of its requests is one
_LONGEST_ANSWER = 300  # characters, in a message


@dataclass(frozen=True)
class Readiness:
    """Requests to one server until it is ready. Methods return the problem, None for none."""

    endpoint: Endpoint
    exit_code: Callable[[], int | None]  # of its process, None while that runs
    timeout_s: float  # of the whole wait, for messages

    def wait_for_health(self, deadline: float) -> str | None:
        """Wait until /health answers 200."""
        last = "no answer"
        while time.monotonic() < deadline:
            code = self.exit_code()
            if code is not None:
                return f"its process ended with exit code {code} before /health answered"
            try:
                status, _ = self._call("GET", "/health", None, timeout_s=_HEALTH_S)
                if status == 200:
                    return None
                last = f"status {status}"
            except (OSError, http.client.HTTPException) as error:
                last = f"{type(error).__name__}: {error}"
            time.sleep(_POLL_S)
        return f"/health did not answer 200 within {self.timeout_s:g} s (last: {last})"

    def first_token(self, deadline: float) -> str | None:
        """Generate one token."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
        try:
            status, content = self._call("POST", "/generate", body, timeout_s=max(1.0, deadline - time.monotonic()))
            answer = json.loads(content)
        except (OSError, http.client.HTTPException, ValueError) as error:
            code = self.exit_code()
            ended = "" if code is None else f"; its process ended with exit code {code}"
            return f"the first generation failed: {type(error).__name__}: {error}{ended}"
        if status != 200 or not isinstance(answer, dict) or len(answer.get("output_ids", ())) != 1:
            return f"the first generation was answered {status}: {str(answer)[:_LONGEST_ANSWER]}"
        return None

    def _call(self, method: str, path: str, body: Any, *, timeout_s: float) -> tuple[int, bytes]:
        """Return (status, body) of one request; proxies of the environment are ignored."""
        url = urlsplit(self.endpoint.url)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {self.endpoint.keys.api_key}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def recover(endpoint: Endpoint, exit_code: Callable[[], int | None]) -> str | None:
    """Bring a server to the state of one that has just started, whatever its last user was doing; return the problem.

    Requests in flight are aborted, generation is not paused, and no version of weights is claimed: those of an update
    that was cut short are of two versions.
    """
    deadline = time.monotonic() + _ADOPT_S
    check = Readiness(endpoint, exit_code, _ADOPT_S)
    control = Control(endpoint, timeout_s=_ADOPT_S / 2)
    try:
        control.generation.resume()  # requests that wait for the end of a pause are aborted by none
        control.generation.pause("abort")
        control.generation.resume()
        control.weights.forget_version()
        control.generation.flush()
    except ServerError as error:
        return str(error)
    finally:
        control.close()
    # Not before: SGLang's /health generates a token, and so waits while generation is paused.
    return check.wait_for_health(deadline) or check.first_token(deadline)
