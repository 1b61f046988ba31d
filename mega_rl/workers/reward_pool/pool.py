"""Pool of reward workers: responses go to the next idle one, and each gets an outcome within its deadline.

One thread of the rank runs an event loop on which each worker has a task. The pools of the standard library and pebble
unpickle what workers send, know no deadline or share one pipe among the workers, and leave the processes that a task
has started: docs/rewards.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from mega_rl.workers.reward_calls import NoScore, NotAScoreError, Score, as_score
from mega_rl.workers.reward_pool.process import (
    START_S,
    UnusableFunctionError,
    WorkerEndedError,
    WorkerOrder,
    WorkerProcess,
)
from mega_rl.workers.reward_pool.program import END_S

log = logging.getLogger(__name__)

_CLOSE_S = 30.0


@dataclass(eq=False)
class _Item:
    """A response that waits for its outcome."""

    message: bytes
    future: Future[Score | NoScore]
    left_s: float  # of its deadline
    tries: int = 0


class RewardPool:
    """Worker processes of this rank for one reward function; starts them, replaces those that end."""

    def __init__(self, order: WorkerOrder, *, num_workers: int, timeout_s: float) -> None:
        """Start the workers without waiting for them. timeout_s: deadline of one response."""
        assert num_workers > 0, "a pool needs a worker"
        self._order = order
        self._timeout_s = timeout_s
        self._broken = ""  # why no worker can score
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._open: set[_Item] = set()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._serve_all(num_workers))
        # Workers die with this thread, so it lives as long as the pool.
        self._thread = threading.Thread(target=self._run, name="reward pool", daemon=True)
        self._thread.start()

    @property
    def patience_s(self) -> float:
        """Return how long a pool with open responses ends none at most: two starts of a worker, and a deadline."""
        return 2 * (START_S + 2 * END_S) + self._timeout_s

    def submit(self, arguments: Mapping[str, object]) -> Future[Score | NoScore]:
        """Return the future outcome of a response, given what the function gets; first come, first served.

        Its exception is UnusableFunctionError. Raises TypeError and ValueError for
        arguments that cannot be written as JSON.
        """
        item = _Item(json.dumps(arguments).encode(), Future(), self._timeout_s)
        self._loop.call_soon_threadsafe(self._take, item)
        return item.future

    def close(self) -> None:
        """End all workers and what they have started; open responses fail. May be called twice."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.warning("reward workers have not ended within %g s", _CLOSE_S)

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        finally:
            self._fail("the reward workers have ended")
            self._loop.close()

    async def _serve_all(self, num_workers: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_workers):
                tasks.create_task(self._serve(number))
            await asyncio.Event().wait()  # until the pool closes

    def _take(self, item: _Item) -> None:
        self._open.add(item)
        if self._broken:
            self._fail(self._broken)
        else:
            self._items.put_nowait(item)

    def _fail(self, reason: str) -> None:
        """Give up all open responses, and those to come."""
        self._broken = reason
        for item in list(self._open):
            self._finish(item, UnusableFunctionError(reason))

    def _finish(self, item: _Item, outcome: Score | NoScore | UnusableFunctionError) -> None:
        if item not in self._open:  # given up meanwhile
            return
        self._open.discard(item)
        if isinstance(outcome, UnusableFunctionError):
            item.future.set_exception(outcome)
        else:
            item.future.set_result(outcome)

    async def _serve(self, number: int) -> None:
        """Run one worker and its successors until the pool closes or no worker can start."""
        worker: WorkerProcess | None = None
        item: _Item | None = None
        try:
            while True:
                worker = worker or await self._start(number)
                item = item or await self._items.get()
                outcome = await self._score(worker, item)
                kind = outcome.kind if isinstance(outcome, NoScore) else "score"
                if kind in ("timeout", "crash"):
                    await worker.end()
                    worker = None
                # A worker may have died of something else, such as the machine's lack of memory.
                if kind != "crash" or item.tries > 1 or item.left_s <= 0:
                    self._finish(item, outcome)
                    item = None
        except UnusableFunctionError as error:
            self._fail(str(error))
        finally:
            if worker is not None:
                await worker.end()

    async def _start(self, number: int) -> WorkerProcess:
        """Return a worker that has loaded the function. Raises UnusableFunctionError."""
        worker = WorkerProcess(self._order, number)
        try:
            await worker.ready()
        except BaseException:
            await worker.end()
            raise
        return worker

    async def _score(self, worker: WorkerProcess, item: _Item) -> Score | NoScore:
        """Return the outcome of one try of a response."""
        begin = time.monotonic()
        item.tries += 1
        try:
            async with asyncio.timeout(item.left_s):
                answer = await worker.ask(item.message)
        except TimeoutError:
            return NoScore("timeout", f"the reward function took longer than reward.pool.timeout_s={self._timeout_s:g}")
        except WorkerEndedError as error:
            return NoScore("crash", f"the reward function crashed its process, which {error}")
        finally:
            item.left_s -= time.monotonic() - begin
        if "score" not in answer:
            return NoScore("error", str(answer.get("no_score", "the reward worker sent no score")))
        try:
            return as_score(answer["score"])
        except NotAScoreError as error:  # the user's code may have written to the channel
            return NoScore("error", f"the reward worker sent {error}")
