"""Rewards from an HTTP service: batches of texts go out, as many scores come back, each request within a deadline."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from mega_rl.errors import UserError
from mega_rl.types import Prompt
from mega_rl.workers.reward import Outcomes, Report, ignore
from mega_rl.workers.reward_calls import NotAScoreError, Response, as_score, shortened
from mega_rl.workers.reward_service import RewardService
from mega_rl.workers.scoring.failures import RewardError, no_score

TRIED_AGAIN = (408, 429)  # and whatever the server calls its own fault: 500 and above
MAX_PAUSE_S = 30.0  # between tries, unless the service asks for more
ANSWER_BYTES = 1 << 20  # of a whole answer, and for each of its scores:
SCORE_BYTES = 64
REFUSAL_BYTES = 4096  # read of an answer that has no scores

Item = tuple[Prompt, Response]  # a prompt and a response to it


class HttpRewards:
    """A service that scores {"items": [{"prompt", "response", ...}]} with {"scores": [number or parts]}; see `_body`.

    A batch is posted again, after a growing random pause, when the connection fails or the status is 408, 429 or from
    500 on; so the service may see it more than once. Any other answer than the scores ends the run. Each request has a
    connection of its own, goes through no proxy and follows no redirect.
    """

    def __init__(
        self,
        service: RewardService,
        *,
        batch_size: int,
        concurrency: int,
        timeout_s: float,
        retries: int,
        pause_s: float = 0.5,
    ) -> None:
        """`timeout_s` bounds a request with all its tries and pauses; `pause_s` is the first pause, then it doubles."""
        try:
            self._url = httpx.URL(service.url)
        except httpx.InvalidURL as error:
            raise UserError(f"reward.http.url={service.url!r}: {error}") from None
        self._key = service.key
        self._batch_size = batch_size
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._tries = 1 + retries
        self._pause_s = pause_s
        self._jitter = random.Random()  # not the global one: the run's random numbers do not depend on a service
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if self._url.scheme == "https" else False

    def score_texts(self, items: Sequence[Item], report: Report = ignore) -> Outcomes:
        """Return the scores; the first batch that fails ends the others."""
        return asyncio.run(self._score(items, report)) if items else []

    async def _score(self, items: Sequence[Item], report: Report) -> Outcomes:
        batches = [items[first : first + self._batch_size] for first in range(0, len(items), self._batch_size)]
        slots = asyncio.Semaphore(self._concurrency)
        async with httpx.AsyncClient(
            verify=self._tls,
            trust_env=False,  # no proxy and no netrc: texts and key go to the service and nowhere else
            timeout=None,  # each request has its deadline as a whole: a limit per read would let a slow drip live
            limits=httpx.Limits(max_keepalive_connections=0),
        ) as client:
            requests = [asyncio.ensure_future(self._request(client, slots, batch, report)) for batch in batches]
            try:
                batch_scores = await asyncio.gather(*requests)
            finally:
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)
        return [score for scores in batch_scores for score in scores]

    async def _request(
        self, client: httpx.AsyncClient, slots: asyncio.Semaphore, batch: Sequence[Item], report: Report
    ) -> Outcomes:
        """Return the scores of one batch. Raises RewardError."""
        async with slots:
            report(f"{self._where()}, which scores prompt {batch[0][0].index} and others")
            failures: list[str] = []
            try:
                content = await asyncio.wait_for(self._answer(client, batch, failures), self._timeout_s)
            except TimeoutError:
                what = (
                    f"no answer to try {len(failures) + 1} of {self._tries} in "
                    f"reward.http.timeout_s={self._timeout_s:g}"
                )
                raise self._failure(what, batch, failures) from None
        return self._scores(content, batch)

    async def _answer(self, client: httpx.AsyncClient, batch: Sequence[Item], failures: list[str]) -> bytes:
        """Return the body of a 200; failed tries before it go to `failures`. Raises RewardError."""
        body = _body(batch)
        limit = ANSWER_BYTES + SCORE_BYTES * len(batch)
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
                    raise self._failure(f"an answer of more than {limit} bytes", batch, failures)
                if status == 200:
                    return content
                said = f"HTTP {status}: {self._readable(content)}"
                if status not in TRIED_AGAIN and status < 500:
                    hint = "; redirects are not followed" if 300 <= status < 400 else ""
                    raise self._failure(said + hint, batch, failures)
                failures.append(said)
                asked_s = _retry_after_s(headers)
            if len(failures) == self._tries:
                raise self._failure(f"all {self._tries} tries failed", batch, failures)
            pause_s = max(asked_s, self._next_pause_s(len(failures)))
            if clock() + pause_s >= deadline:
                what = f"the next try would be in {pause_s:.3g} s, past reward.http.timeout_s={self._timeout_s:g}"
                raise self._failure(what, batch, failures)
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

    def _scores(self, content: bytes, batch: Sequence[Item]) -> Outcomes:
        """Return the score of each response in an answer. Raises RewardError."""
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            raise self._failure(f"an answer that is no JSON: {self._readable(content)}", batch) from None
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise self._failure(f'an answer without a list "scores": {self._readable(content)}', batch)
        if len(scores) != len(batch):
            raise self._failure(f"{len(scores)} scores for {len(batch)} responses", batch)
        read: Outcomes = []
        for (prompt, response), value in zip(batch, scores, strict=True):
            try:
                read.append(as_score(_without_booleans(value)))
            except NotAScoreError as error:
                raise no_score(f"{self._where()}: it gave {error}", prompt, response) from None
        return read

    def _where(self) -> str:
        """The service's address without its query, where some keep secrets."""
        return f"reward service {self._url.copy_with(query=None, fragment=None)}"

    def _readable(self, content: bytes) -> str:
        text = " ".join(content.decode(errors="replace").split())
        return shortened(text.replace(self._key, "***") if self._key else text)

    def _failure(self, what: str, batch: Sequence[Item], failures: Sequence[str] = ()) -> RewardError:
        last = f"; the last failure: {failures[-1]}" if failures else ""
        (prompt, response), others = batch[0], len(batch) - 1
        more = f" (and {others} more in this request)" if others else ""
        return no_score(f"{self._where()}: {what}{last}{more}", prompt, response)


def _without_booleans(value: object) -> object:
    """Return a value of JSON with texts for true and false, which Python takes for numbers."""
    entries = value if isinstance(value, dict) else {"": value}
    texts = {name: str(part).lower() if isinstance(part, bool) else part for name, part in entries.items()}
    return texts if isinstance(value, dict) else texts[""]


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
