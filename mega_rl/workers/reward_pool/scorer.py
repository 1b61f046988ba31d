"""Rewards by a function in worker processes, with a rule for responses that none of them can score."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass

from mega_rl.data.columns import RewardColumns
from mega_rl.types import Prompt
from mega_rl.workers.reward import Report, RewardError, ScoreCounts, Scores, ignore, no_score
from mega_rl.workers.reward_calls import FailureScore, NoScoreError, Response, RewardCall, Score
from mega_rl.workers.reward_pool.begun import Begun
from mega_rl.workers.reward_pool.pool import RewardPool, ScoreOutcome
from mega_rl.workers.reward_pool.process import UnusableFunctionError

log = logging.getLogger(__name__)

_BEAT_S = 5.0
_NAMED = 5  # responses without a score in the log of one batch


@dataclass(frozen=True)
class FailedScores:
    """Rule for responses whose scoring took too long or crashed a worker."""

    score: float  # that they get, in every part where a reward has parts
    max_share: float  # of a step's responses; more end the run


class PooledRewards:
    """Scores by a function in the processes of a pool, as `FunctionRewards` in this one.

    A response that takes longer than its deadline, or crashes its worker twice, gets `FailedScores.score`.
    """

    def __init__(self, call: RewardCall, pool: RewardPool, *, failed: FailedScores) -> None:
        self._call = call
        self._pool = pool
        self._failed = failed
        self._counts: Counter[str] = Counter()
        self._examples: list[str] = []
        self._lowest: float | None = None
        self._warned = False
        self._begun: Begun[Future[ScoreOutcome]] = Begun()  # by prompt and response

    @property
    def columns(self) -> RewardColumns:
        """Columns of the data that the function reads."""
        return self._call.columns

    def score_texts(self, items: Sequence[tuple[Prompt, Response]], report: Report = ignore) -> Scores:
        """Return the scores, those of failed ones among them. Raises RewardError as `FunctionRewards` does."""
        futures = [
            self._begun.take((prompt.index, response)) or self._submit(prompt, response) for prompt, response in items
        ]
        self._begun.end_batch()
        self._wait(items, futures, report)
        scores = [
            self._settle(prompt, response, future) for (prompt, response), future in zip(items, futures, strict=True)
        ]
        self._warn_of_prizes()
        return scores

    def begin(self, prompt: Prompt, response: Response) -> None:
        with contextlib.suppress(RewardError):  # which it will be when its score is asked for
            self._begun.add((prompt.index, response), self._submit(prompt, response))

    def take_counts(self) -> ScoreCounts:
        """Return and reset what became of the responses since the last call."""
        counts = ScoreCounts(
            scored=self._counts.total(),
            timeouts=self._counts["timeout"],
            crashes=self._counts["crash"],
            max_failed_share=self._failed.max_share,
            examples=tuple(self._examples),
        )
        self._counts.clear()
        self._examples.clear()
        return counts

    def _submit(self, prompt: Prompt, response: Response) -> Future[ScoreOutcome]:
        try:
            return self._pool.submit(self._call.arguments(prompt, response))
        except (TypeError, ValueError) as error:
            what = f"the row cannot be sent to a reward worker: {error}; set reward.pool.workers=0, or drop the column"
            raise no_score(what, prompt, response) from None

    def _wait(
        self, items: Sequence[tuple[Prompt, Response]], futures: Sequence[Future[ScoreOutcome]], report: Report
    ) -> None:
        """Wait for all outcomes, or for the first exception. Raises RewardError when the pool has stopped working."""
        open_items = dict(zip(futures, items, strict=True))
        last_end = time.monotonic()
        while open_items:
            prompt, response = next(iter(open_items.values()))  # the oldest
            report(f"prompt {prompt.index}")
            done, _ = wait(open_items, timeout=_BEAT_S, return_when=FIRST_EXCEPTION)
            if any(future.exception() is not None for future in done):
                return
            for future in done:
                del open_items[future]
                last_end = time.monotonic()
            if time.monotonic() - last_end > self._pool.patience_s:
                raise no_score(f"no score within {self._pool.patience_s:g} s: a defect of mega_rl", prompt, response)

    def _settle(self, prompt: Prompt, response: Response, future: Future[ScoreOutcome]) -> Score:
        """Return the score of an outcome. Raises RewardError."""
        try:
            outcome = future.result(timeout=0)
        except UnusableFunctionError as error:
            raise RewardError(str(error)) from error
        except NoScoreError as error:
            raise no_score(str(error), prompt, response) from error
        except TimeoutError:  # a later response has an exception
            return FailureScore(self._failed.score)
        self._counts[outcome.kind] += 1
        if outcome.kind == "score":
            numbers = outcome.score.values() if isinstance(outcome.score, dict) else [outcome.score]
            self._lowest = min(numbers if self._lowest is None else [self._lowest, *numbers])
            return outcome.score
        example = str(no_score(f"the reward function {outcome.what}", prompt, response))
        if len(self._examples) < _NAMED:
            self._examples.append(example)
            log.warning("%s; its score is reward.pool.failure_score=%g", example, self._failed.score)
        return FailureScore(self._failed.score)

    def _warn_of_prizes(self) -> None:
        """Warn once if a failed response got more than the function gave another."""
        failed = self._counts["timeout"] + self._counts["crash"]
        if self._warned or not failed or self._lowest is None or self._lowest >= self._failed.score:
            return
        self._warned = True
        log.warning(
            "reward.pool.failure_score=%g is above %g, which the reward function gave a response: hanging or crashing "
            "it is rewarded; set it to the lowest score",
            self._failed.score,
            self._lowest,
        )
