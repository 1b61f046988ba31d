"""Requests to a service: tried again after growing pauses, within a deadline and a length. Imports no torch."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from mega_rl.errors import UserError
from mega_rl.workers.reward_calls import shortened
from mega_rl.workers.reward_service import RewardService

TRIED_AGAIN = (408, 429)  # and whatever the server calls its own fault: 500 and above
MAX_PAUSE_S = 30.0  # between tries, unless the service asks for more
REFUSAL_BYTES = 4096  # read of an answer that is not a 200


class PostError(Exception):
    """A request has failed for good; the message says how, without the key."""


class Poster:
    """Posts JSON to one address.

    A request is posted again, after a growing random pause, when the connection fails or the status is 408, 429 or from
    500 on; so the service may see it more than once. Each request has a connection of its own, goes through no proxy
    and follows no redirect.
    """

    def __init__(
        self, service: RewardService, *, section: str, timeout_s: float, retries: int, pause_s: float = 0.5
    ) -> None:
        """
        section: of the settings that errors name, "reward.http".
        timeout_s: bounds a request with all its tries and pauses.
        pause_s: the first pause, then it doubles.
        """
        try:
            self._url = httpx.URL(service.url)
        except httpx.InvalidURL as error:
            raise UserError(f"{section}.url={service.url!r}: {error}") from None
        self._key = service.key
        self._section = section
        self._timeout_s = timeout_s
        self._tries = 1 + retries
        self._pause_s = pause_s
        self._jitter = random.Random()  # not the global one: the run's random numbers do not depend on a service
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if self._url.scheme == "https" else False

    @property
    def address(self) -> str:
        """Return the service's address without its query, where some keep secrets."""
        return str(self._url.copy_with(query=None, fragment=None))

    def client(self) -> httpx.AsyncClient:
        """Return a client for `post`; use it as a context."""
        return httpx.AsyncClient(
            verify=self._tls,
            trust_env=False,  # no proxy and no netrc: texts and key go to the service and nowhere else
            timeout=None,  # each request has its deadline as a whole: a limit per read would let a slow drip live
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def post(self, client: httpx.AsyncClient, body: bytes, *, limit: int) -> bytes:
        """Return the body, at most `limit` bytes, of a 200. Raises PostError."""
        failures: list[str] = []
        try:
            return await asyncio.wait_for(self._answer(client, body, failures, limit), self._timeout_s)
        except TimeoutError:
            raise PostError(
                f"no answer to try {len(failures) + 1} of {self._tries} in "
                f"{self._section}.timeout_s={self._timeout_s:g}{_last(failures)}"
            ) from None

    async def _answer(self, client: httpx.AsyncClient, body: bytes, failures: list[str], limit: int) -> bytes:
        """Return the body of a 200; failed tries before it go to `failures`. Raises PostError."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s
        while True:
            asked_s = 0.0
            try:
                status, headers, content = await self._exchange(client, body, limit=limit)
            except httpx.TransportError as error:
                failures.append(f"{type(error).__name__}: {error or 'the connection ended'}")
            else:
                if status == 200 and len(content) > limit:
                    raise PostError(f"an answer of more than {limit} bytes{_last(failures)}")
                if status == 200:
                    return content
                said = f"HTTP {status}: {self.readable(content)}"
                if status not in TRIED_AGAIN and status < 500:
                    hint = "; redirects are not followed" if 300 <= status < 400 else ""
                    raise PostError(said + hint + _last(failures))
                failures.append(said)
                asked_s = _retry_after_s(headers)
            if len(failures) == self._tries:
                raise PostError(f"all {self._tries} tries failed{_last(failures)}")
            pause_s = max(asked_s, self._next_pause_s(len(failures)))
            if clock() + pause_s >= deadline:
                raise PostError(
                    f"the next try would be in {pause_s:.3g} s, past {self._section}.timeout_s={self._timeout_s:g}"
                    f"{_last(failures)}"
                )
            await asyncio.sleep(pause_s)

    async def _exchange(
        self, client: httpx.AsyncClient, body: bytes, *, limit: int
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return (status, headers, body) of the answer; the body is cut soon after its length limit."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # nothing to unpack, no bombs
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        async with client.stream("POST", self._url, content=body, headers=headers) as response:
            content = bytearray()
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > (limit if response.status_code == 200 else REFUSAL_BYTES):
                    break
            return response.status_code, response.headers, bytes(content)

    def _next_pause_s(self, failed: int) -> float:
        return min(MAX_PAUSE_S, self._pause_s * 2 ** (failed - 1)) * self._jitter.uniform(0.5, 1.0)

    def readable(self, content: bytes) -> str:
        """Return the start of an answer as text, without the key."""
        text = " ".join(content.decode(errors="replace").split())
        return shortened(text.replace(self._key, "***") if self._key else text)


def _last(failures: list[str]) -> str:
    return f"; the last failure: {failures[-1]}" if failures else ""


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that the service asks to wait, in numbers or as a date; 0 where it names none."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        date = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
