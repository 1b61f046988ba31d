"""Calls of asynchronous reward functions, several at a time on one event loop. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from mega_rl.workers.reward_calls import SUBJECT, Batch, NoScore, NoScoreError, RewardCall, Score
from mega_rl.workers.scoring.sets import RUNNING, FunctionSet, subject_of
from mega_rl.workers.scoring.slowest import SlowestCall

T = TypeVar("T")


def failed(error: NoScoreError) -> NoScore:
    """Return the outcome of a response whose function raised, or returned something else."""
    return NoScore("error", str(error))


def timed_out(subject: str, timeout_s: float | None) -> NoScore:
    """Return the outcome of a response whose function took too long."""
    return NoScore("timeout", f"{subject} took longer than reward.pool.timeout_s={timeout_s:g}")


@dataclass(frozen=True)
class Calls:
    """Calls of one asynchronous function, or of a set with one, on the running event loop."""

    call: RewardCall | FunctionSet
    concurrency: int  # calls at a time, which begin in order
    batch_size: int = 1  # responses of one call, of a function that takes several
    timeout_s: float | None = None  # deadline of each call, after which it is cancelled; None: none
    on_error: Callable[[NoScoreError], NoScore] = failed
    slowest: SlowestCall = field(default_factory=SlowestCall)

    async def outcomes_of(self, batch: Batch) -> list[Score | NoScore]:
        """Return the outcome of each response, given what the function gets, in order."""
        free = asyncio.Semaphore(self.concurrency)
        size = self.batch_size if self.call.batched else 1
        parts = [batch[start : start + size] for start in range(0, len(batch), size)]
        outcomes = await asyncio.gather(*(self._of_part(part, free) for part in parts))
        return [outcome for part in outcomes for outcome in part]

    async def _of_part(self, part: Batch, free: asyncio.Semaphore) -> list[Score | NoScore]:
        """Return the outcomes of one call; where it fails for several responses, those of a call of each."""
        if len(part) > 1:
            async with free:
                outcomes = await self._together(part)
            if outcomes is not None:
                return outcomes
        return list(await asyncio.gather(*(self._alone(arguments, free) for arguments in part)))

    async def _together(self, part: Batch) -> list[Score | NoScore] | None:
        assert isinstance(self.call, RewardCall), "functions of a set are called for one response after the other"
        try:
            results = await self._in_time(self.call.evaluate_batch_later(part))
        except (NoScoreError, TimeoutError):
            return None
        return [self.on_error(one) if isinstance(one, NoScoreError) else one for one in results]

    async def _alone(self, arguments: Mapping[str, object], free: asyncio.Semaphore) -> Score | NoScore:
        async with free:
            try:
                return await self._in_time(self.call.evaluate_later(arguments))
            except NoScoreError as error:
                return self.on_error(error)
            except TimeoutError:
                running = RUNNING.get()
                return timed_out(subject_of({}, running) if running else SUBJECT, self.timeout_s)

    async def _in_time(self, call: Awaitable[T]) -> T:
        with self.slowest.timed():
            async with asyncio.timeout(self.timeout_s):
                return await call


def outcomes_of_batch(
    call: RewardCall | FunctionSet, batch: Batch, on_error: Callable[[NoScoreError], NoScore] = failed
) -> list[Score | NoScore]:
    """Return the outcomes of responses by a function that takes several, or a set with one.

    Raises NoScoreError where it fails as a whole.
    """
    return [on_error(one) if isinstance(one, NoScoreError) else one for one in call.evaluate_batch(batch)]


def message_of(outcome: Score | NoScore) -> dict[str, object]:
    """Return an outcome as a worker sends it."""
    return {outcome.kind: outcome.what} if isinstance(outcome, NoScore) else {"score": outcome}
