"""Rewards by a function in worker processes, with a rule for responses that none of them can score."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait

from mega_rl.data.columns import RewardColumns
from mega_rl.types import Prompt
from mega_rl.workers.reward import Outcomes, Report, ignore
from mega_rl.workers.reward_calls import NoScore, Response, RewardCall, Score
from mega_rl.workers.reward_pool.pool import RewardPool, message_of
from mega_rl.workers.scoring.failures import RewardError, no_score
from mega_rl.workers.scoring.sets import FunctionSet
from mega_rl.workers.scoring.slowest import SlowestCall

_BEAT_S = 5.0


class PooledRewards:
    """Scores by a function in the processes of a pool, as `FunctionRewards` in this one.

    A response that takes longer than its deadline, or crashes its worker twice, has no score either.
    """

    def __init__(self, call: RewardCall | FunctionSet, pool: RewardPool) -> None:
        self.call = call
        self._pool = pool

    @property
    def columns(self) -> RewardColumns:
        """Columns of the data that the function reads."""
        return self.call.columns

    @property
    def slowest(self) -> SlowestCall:
        """Longest call in a worker, of one response or of those that it was asked for together."""
        return self._pool.slowest

    def score_texts(self, items: Sequence[tuple[Prompt, Response]], report: Report = ignore) -> Outcomes:
        """Return the outcomes. Raises RewardError when no worker can score."""
        futures = self._pool.submit_messages([self._message(*item) for item in items])
        self._wait(items, futures, report)
        return [future.result() for future in futures]

    def _message(self, prompt: Prompt, response: Response) -> bytes:
        try:
            return message_of(self.call.arguments(prompt, response))
        except (TypeError, ValueError) as error:
            what = f"the row cannot be sent to a reward worker: {error}; set reward.pool.workers=0, or drop the column"
            raise no_score(what, prompt, response) from None

    def _wait(
        self, items: Sequence[tuple[Prompt, Response]], futures: Sequence[Future[Score | NoScore]], report: Report
    ) -> None:
        """Wait for all outcomes. Raises RewardError when the pool has stopped working."""
        open_items = dict(zip(futures, items, strict=True))
        last_end = time.monotonic()
        while open_items:
            prompt, response = next(iter(open_items.values()))  # the oldest
            report(f"prompt {prompt.index}")
            done, _ = wait(open_items, timeout=_BEAT_S, return_when=FIRST_EXCEPTION)
            for future in done:
                if (error := future.exception()) is not None:
                    raise RewardError(str(error)) from error
                del open_items[future]
                last_end = time.monotonic()
            if time.monotonic() - last_end > self._pool.patience_s:
                raise no_score(f"no score within {self._pool.patience_s:g} s: a defect of mega_rl", prompt, response)
