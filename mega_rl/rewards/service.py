"""Rewards from an HTTP service: address and key, requests with retries, batches of texts.

Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from mega_rl.config.rules.rollout import is_loopback
from mega_rl.errors import UserError
from mega_rl.rewards.score import (
    Item,
    NotAScoreError,
    Outcome,
    Report,
    RewardError,
    as_score,
    ignore,
    no_score,
    shortened,
)

TRIED_AGAIN = (408, 429)  # also the server's faults: 500 and above
MAX_PAUSE_S = 30.0  # between tries, unless the service asks for more
REFUSAL_BYTES = 4096  # read of an answer that is not a 200
ANSWER_BYTES = 1 << 20  # longest answer without its scores, which may each have:
SCORE_BYTES = 64


@dataclass(frozen=True)
class Service:
    """Address of a service, and its key, which repr does not show."""

    url: str  # http://127.0.0.1:8000/score
    key: str = field(default="", repr=False)  # bearer token; empty sends none


def find_service(url: str, key_file: str, section: str = "reward.source") -> Service:
    """Return the service of the settings url and key_file ("" for none) of a section.

    Raises:
        UserError: no address, or one with a password; a key that others can read, or that would travel unencrypted.
    """
    host = _host(url, section)
    if not key_file:
        return Service(url)
    if url.startswith("http://") and not is_loopback(host):
        raise UserError(
            f"{section}.url={url!r} with {section}.key_file: the key would travel unencrypted to {host}; use "
            "https://, or a tunnel that ends on 127.0.0.1"
        )
    path = Path(key_file)
    try:
        mode = path.stat().st_mode
        if mode & 0o077:
            raise UserError(
                f"{section}.key_file: {path}: others than its owner may read it (mode {mode & 0o777:o}); chmod 600 "
                f"{path}"
            )
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{section}.key_file: {path}: cannot be read: {type(error).__name__}; it holds one line"
        ) from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"{section}.key_file: {path}: must hold one key of printable ASCII characters without spaces")
    return Service(url, key)


def _host(url: str, section: str) -> str:
    if not url.isprintable() or " " in url:
        raise UserError(f"{section}.url={url!r}: holds white space or other characters that no address has; quote them")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"{section}.url={url!r}: {error}; write it as http://host:port/path") from None
    if parts.scheme not in ("http", "https") or not host:
        raise UserError(f"{section}.url={url!r}: legal: http://host:port/path or https://host/path")
    if parts.username is not None or parts.password is not None:
        raise UserError(
            f"{section}.url: names a user or password for {host}, and addresses are logged; use {section}.key_file"
        )
    return host


class PostError(Exception):
    """A request has failed for good; the message says how, without the key."""


class Poster:
    """Posts JSON to one address.

    A request is posted again, after a growing random pause, when the connection fails or the status is 408, 429 or from
    500 on, so the service may see it more than once. Each request has its own connection, goes through no proxy and
    follows no redirect.
    """

    def __init__(self, service: Service, *, section: str, timeout_s: float, retries: int, pause_s: float = 0.5) -> None:
        """
        section: the settings that errors name, "reward.source".
        timeout_s: bounds a request with all its tries and pauses.
        pause_s: the first pause, which then doubles.
        """
        try:
            self._url = httpx.URL(service.url)
        except httpx.InvalidURL as error:
            raise UserError(f"{section}.url={service.url!r}: {error}") from None
        self._key = service.key
        self._limit = f"{section}.timeout_s={timeout_s:g}"
        self._timeout_s = timeout_s
        self._tries = 1 + retries
        self._pause_s = pause_s
        self._jitter = random.Random()  # not the global one: the run's random numbers do not depend on a service
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if self._url.scheme == "https" else False

    @property
    def address(self) -> str:
        """Return the service's address without its query, where some keep secrets."""
        return str(self._url.copy_with(query=None, fragment=None))

    async def post(self, body: bytes, *, limit: int) -> bytes:
        """Return the body, at most `limit` bytes, of a 200. Raises PostError."""
        failures: list[str] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._answer(body, failures, limit)
        except TimeoutError:
            raise PostError(
                f"no answer to try {len(failures) + 1} of {self._tries} in {self._limit}{_last(failures)}"
            ) from None

    async def _answer(self, body: bytes, failures: list[str], limit: int) -> bytes:
        """Return the body of a 200; failed tries before it go to `failures`. Raises PostError."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            asked_s = 0.0
            try:
                status, headers, content = await self._exchange(body, limit)
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
            usual_s = min(MAX_PAUSE_S, self._pause_s * 2 ** (len(failures) - 1)) * self._jitter.uniform(0.5, 1.0)
            pause_s = max(asked_s, usual_s)
            if time.monotonic() + pause_s >= deadline:
                raise PostError(f"the next try would be in {pause_s:.3g} s, past {self._limit}{_last(failures)}")
            await asyncio.sleep(pause_s)

    async def _exchange(self, body: bytes, limit: int) -> tuple[int, Mapping[str, str], bytes]:
        """Return (status, headers, body) of the answer; the body is cut soon after its length limit."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # nothing to unpack, no bombs
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        # No proxy and no netrc: texts and key go only to the service. A limit per read would let a slow drip live.
        client = httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=None)
        async with client, client.stream("POST", self._url, content=body, headers=headers) as response:
            content = bytearray()
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > (limit if response.status_code == 200 else REFUSAL_BYTES):
                    break
            return response.status_code, response.headers, bytes(content)

    def readable(self, content: bytes) -> str:
        """Return the start of an answer as text, without the key."""
        text = " ".join(content.decode(errors="replace").split())
        return shortened(text.replace(self._key, "***") if self._key else text)


def _last(failures: list[str]) -> str:
    return f"; the last failure: {failures[-1]}" if failures else ""


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that the service asks to wait, given as a number or a date."""
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


class HttpRewards:
    """Scores by a service: {"items": [{"prompt", "response", ...}]} in, {"scores": [number or components]} out.

    An answer that is not the scores ends the run.
    """

    def __init__(self, poster: Poster, *, batch_size: int, concurrency: int) -> None:
        """batch_size: most responses of a request. concurrency: requests at a time."""
        self._poster = poster
        self._batch_size, self._concurrency = batch_size, concurrency
        self.longest_s = 0.0

    def score(self, items: Sequence[Item], report: Report = ignore) -> list[Outcome]:
        """Return the scores; the first batch that fails ends the others."""
        return asyncio.run(self._score(items, report)) if items else []

    async def _score(self, items: Sequence[Item], report: Report) -> list[Outcome]:
        batches = [items[first : first + self._batch_size] for first in range(0, len(items), self._batch_size)]
        slots = asyncio.Semaphore(self._concurrency)
        # The first failure ends `asyncio.run`, which cancels the other requests.
        scores = await asyncio.gather(*(self._request(slots, batch, report) for batch in batches))
        return [score for part in scores for score in part]

    async def _request(self, slots: asyncio.Semaphore, batch: Sequence[Item], report: Report) -> list[Outcome]:
        """Return the scores of one batch. Raises RewardError."""
        limit = ANSWER_BYTES + SCORE_BYTES * len(batch)
        async with slots:
            report(f"{self._where()}, which scores prompt {batch[0][0].index} and others")
            begin = time.perf_counter()
            try:
                content = await self._poster.post(_body(batch), limit=limit)
            except PostError as error:
                raise self._failure(str(error), batch) from None
            finally:
                self.longest_s = max(self.longest_s, time.perf_counter() - begin)
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            raise self._failure(f"an answer that is no JSON: {self._poster.readable(content)}", batch) from None
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise self._failure(f'an answer without a list "scores": {self._poster.readable(content)}', batch)
        if len(scores) != len(batch):
            raise self._failure(f"{len(scores)} scores for {len(batch)} responses", batch)
        read: list[Outcome] = []
        for item, value in zip(batch, scores, strict=True):
            try:
                read.append(as_score(_without_booleans(value)))
            except NotAScoreError as error:
                raise no_score(f"{self._where()}: it gave {error}", *item) from None
        return read

    def _where(self) -> str:
        return f"reward service {self._poster.address}"

    def _failure(self, what: str, batch: Sequence[Item]) -> RewardError:
        more = f" (and {len(batch) - 1} more in this request)" if len(batch) > 1 else ""
        return no_score(f"{self._where()}: {what}{more}", *batch[0])


def _without_booleans(value: object) -> object:
    """Return a value of JSON with texts for true and false, which Python takes for numbers."""
    if isinstance(value, dict):
        return {name: _without_booleans(part) for name, part in value.items()}
    return str(value).lower() if isinstance(value, bool) else value


def _body(batch: Sequence[Item]) -> bytes:
    items = [
        {
            "prompt": prompt.text,
            "response": response.text,
            "answer": prompt.answer,
            "messages": [{"role": role, "content": content} for role, content in prompt.messages],
            "finish": response.finish,
            "num_tokens": response.num_tokens,
            **({"turns": response.turns, "transcript": response.transcript} if response.turns else {}),
        }
        for prompt, response in batch
    ]
    return json.dumps({"items": items}).encode()
