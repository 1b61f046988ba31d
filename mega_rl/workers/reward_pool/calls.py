"""Calls of a reward worker: a worker that is ready, and the outcomes of responses that it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mega_rl.workers.reward_calls import NoScore, NotAScoreError, Score, as_score
from mega_rl.workers.reward_pool.process import WorkerEndedError, WorkerOrder, WorkerProcess

GRACE_S = 2.0  # for asynchronous calls that are cancelled at their deadline to end


@dataclass(frozen=True)
class WorkerCalls:
    """Starts of workers and questions to them, for one reward function."""

    order: WorkerOrder
    timeout_s: float  # deadline of one response

    async def start(self, number: int) -> WorkerProcess:
        """Return a worker that has loaded the function. Raises UnusableFunctionError."""
        worker = WorkerProcess(self.order, number)
        try:
            await worker.ready(self.timeout_s)
        except BaseException:
            await worker.end()
            raise
        return worker

    async def score(self, worker: WorkerProcess, message: bytes, within_s: float) -> Score | NoScore:
        """Return the outcome of a response; after a timeout or a crash the worker is lost."""
        answer = await self._asked(worker, message, within_s)
        return answer if isinstance(answer, NoScore) else outcome_of(answer)

    async def score_together(self, worker: WorkerProcess, messages: Sequence[bytes]) -> list[Score | NoScore] | NoScore:
        """Return the outcome of each response, or why the worker that scored them is lost."""
        answer = await self._asked(worker, b"[" + b",".join(messages) + b"]", self.timeout_s + GRACE_S)
        if isinstance(answer, NoScore):
            return answer
        answers = answer.get("answers")
        if not isinstance(answers, list) or len(answers) != len(messages):
            return NoScore("crash", "the reward worker sent another number of scores than responses")
        return [outcome_of(one) for one in answers]

    async def _asked(self, worker: WorkerProcess, message: bytes, within_s: float) -> dict[str, object] | NoScore:
        try:
            async with asyncio.timeout(within_s):
                return await worker.ask(message)
        except TimeoutError:
            return NoScore("timeout", f"the reward function took longer than reward.pool.timeout_s={self.timeout_s:g}")
        except WorkerEndedError as error:
            return NoScore("crash", f"the reward function crashed its process, which {error}")


def outcome_of(answer: object) -> Score | NoScore:
    """Return the outcome that a worker's message for one response tells; the user's code may have written to it."""
    if isinstance(answer, dict) and "score" in answer:
        try:
            return as_score(answer["score"])
        except NotAScoreError as error:
            return NoScore("error", f"the reward worker sent {error}")
    sent = answer if isinstance(answer, dict) else {}
    kind: Literal["timeout", "error"] = "timeout" if "timeout" in sent else "error"
    return NoScore(kind, str(sent.get(kind, "the reward worker sent no score")))
