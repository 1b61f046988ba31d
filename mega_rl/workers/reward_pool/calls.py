"""Calls of a reward worker: a worker that is ready, and the outcomes of responses that it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mega_rl.workers.reward_calls import NoScore, NotAScoreError, Score, as_score
from mega_rl.workers.reward_pool.process import WorkerEndedError, WorkerOrder, WorkerProcess
from mega_rl.workers.scoring.concurrent import timed_out


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

    async def score(self, worker: WorkerProcess, within_s: float) -> Score | NoScore:
        """Return the outcome of the oldest response that was sent; after a timeout or a crash the worker is lost."""
        answer = await self._answer(worker, within_s)
        return answer if isinstance(answer, NoScore) else outcome_of(answer)

    async def score_together(self, worker: WorkerProcess, messages: Sequence[bytes]) -> list[Score | NoScore] | NoScore:
        """Return the outcome of each response, or of all of them together: an error, or why the worker is lost."""
        worker.send(b"[" + b",".join(messages) + b"]")
        answer = await self._answer(worker, self.order.group_timeout_s(self.timeout_s))
        if isinstance(answer, NoScore):
            return answer
        if "error" in answer:
            return NoScore("error", str(answer["error"]))
        answers = answer.get("answers")
        if not isinstance(answers, list) or len(answers) != len(messages):
            return NoScore("crash", "the reward worker sent another number of scores than responses")
        return [outcome_of(one) for one in answers]

    async def _answer(self, worker: WorkerProcess, within_s: float) -> dict[str, object] | NoScore:
        """Return the next answer within a deadline, or why there is none."""
        try:
            if not isinstance(self.order.function, str) and self.order.batch_size:
                return await self._answer_of_set(worker, within_s)
            async with asyncio.timeout(within_s):
                return await worker.receive()
        except TimeoutError:
            return timed_out(worker.subject(), self.timeout_s)
        except WorkerEndedError as error:
            return NoScore("crash", f"{worker.subject()} crashed its process, which {error}")

    async def _answer_of_set(self, worker: WorkerProcess, within_s: float) -> dict[str, object]:
        """Return the answer of functions that score a batch together. Raises TimeoutError.

        Each call has the deadline, since some of the functions are called once for each response.
        """
        answer = asyncio.ensure_future(worker.receive())
        try:
            while True:
                num_calls = worker.num_calls()
                done, _ = await asyncio.wait({answer}, timeout=within_s)
                if done:
                    return answer.result()
                if worker.num_calls() == num_calls:
                    raise TimeoutError
        finally:
            answer.cancel()


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
