"""Rewards from an HTTP service: batches of texts go out, as many scores come back, each request within a deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import httpx

from mega_rl.types import Prompt
from mega_rl.workers.reward import Outcomes, Report, ignore
from mega_rl.workers.reward_calls import NotAScoreError, Response, as_score
from mega_rl.workers.reward_service import RewardService
from mega_rl.workers.scoring.failures import RewardError, no_score
from mega_rl.workers.scoring.posting import Poster, PostError
from mega_rl.workers.scoring.slowest import SlowestCall

ANSWER_BYTES = 1 << 20  # of a whole answer, and for each of its scores:
SCORE_BYTES = 64

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
        self._poster = Poster(service, section="reward.http", timeout_s=timeout_s, retries=retries, pause_s=pause_s)
        self._batch_size = batch_size
        self.slowest = SlowestCall()
        self._concurrency = concurrency

    def score_texts(self, items: Sequence[Item], report: Report = ignore) -> Outcomes:
        """Return the scores; the first batch that fails ends the others."""
        return asyncio.run(self._score(items, report)) if items else []

    async def _score(self, items: Sequence[Item], report: Report) -> Outcomes:
        batches = [items[first : first + self._batch_size] for first in range(0, len(items), self._batch_size)]
        slots = asyncio.Semaphore(self._concurrency)
        async with self._poster.client() as client:
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
            try:
                with self.slowest.timed():
                    content = await self._poster.post(
                        client, _body(batch), limit=ANSWER_BYTES + SCORE_BYTES * len(batch)
                    )
            except PostError as error:
                raise self._failure(str(error), batch) from None
        return self._scores(content, batch)

    def _scores(self, content: bytes, batch: Sequence[Item]) -> Outcomes:
        """Return the score of each response in an answer. Raises RewardError."""
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            raise self._failure(f"an answer that is no JSON: {self._poster.readable(content)}", batch) from None
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise self._failure(f'an answer without a list "scores": {self._poster.readable(content)}', batch)
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
        return f"reward service {self._poster.address}"

    def _failure(self, what: str, batch: Sequence[Item]) -> RewardError:
        (prompt, response), others = batch[0], len(batch) - 1
        more = f" (and {others} more in this request)" if others else ""
        return no_score(f"{self._where()}: {what}{more}", prompt, response)


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
