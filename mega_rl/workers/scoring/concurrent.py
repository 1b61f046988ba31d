"""Calls of asynchronous reward functions, several at a time on one event loop. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from mega_rl.workers.reward_calls import NoScore, NoScoreError, RewardCall, Score
from mega_rl.workers.scoring.sets import FunctionSet


def failed(error: NoScoreError) -> NoScore:
    """Return the outcome of a response whose function raised, or returned something else."""
    return NoScore("error", str(error))


async def outcomes_of(
    call: RewardCall | FunctionSet,
    batch: Sequence[Mapping[str, object]],
    *,
    concurrency: int,
    timeout_s: float | None = None,
    on_error: Callable[[NoScoreError], NoScore] = failed,
) -> list[Score | NoScore]:
    """Return the outcome of each response, given what the function gets, in order.

    concurrency: calls at a time, which begin in order. timeout_s: deadline of each, after which it is cancelled; None:
    none.
    """
    free = asyncio.Semaphore(concurrency)

    async def one(arguments: Mapping[str, object]) -> Score | NoScore:
        async with free:
            try:
                async with asyncio.timeout(timeout_s):
                    return await call.evaluate_later(arguments)
            except NoScoreError as error:
                return on_error(error)
            except TimeoutError:
                return NoScore("timeout", f"the reward function took longer than reward.pool.timeout_s={timeout_s:g}")

    return await asyncio.gather(*map(one, batch))
