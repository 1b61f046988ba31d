"""Pool of reward workers: responses go to the next idle one, and each gets an outcome within its deadline.

One thread of the rank runs an event loop on which each worker has a task. The pools of the standard library and pebble
unpickle what workers send, know no deadline or share one pipe among the workers, and leave the processes that a task
has started: docs/rewards.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from mega_rl.workers.reward_calls import NoScore, Score
from mega_rl.workers.reward_pool.calls import WorkerCalls
from mega_rl.workers.reward_pool.process import (
    START_S,
    UnusableFunctionError,
    WorkerOrder,
    WorkerProcess,
)
from mega_rl.workers.reward_pool.program import END_S
from mega_rl.workers.scoring.slowest import SlowestCall

log = logging.getLogger(__name__)

_CLOSE_S = 30.0
QUICK_S = 0.005  # of a response: sending the next ones ahead saves more than waiting for a free worker
AHEAD = 16  # responses that a worker has at a time while they are quick


@dataclass(eq=False)
class _Item:
    """A response that waits for its outcome."""

    message: bytes
    future: Future[Score | NoScore]
    left_s: float  # of its deadline
    tries: int = 0


class _Waiting:
    """Responses that no worker has been asked for."""

    def __init__(self, order: WorkerOrder) -> None:
        self._order = order
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._idle = 0  # workers that wait for a group

    def put(self, items: Sequence[_Item]) -> None:
        """Add some; workers see all of them at once."""
        for item in items:
            self._items.put_nowait(item)

    async def next(self) -> _Item:
        """Return the first."""
        return await self._items.get()

    def more(self, number: int) -> list[_Item]:
        """Return up to so many of those that wait."""
        return [self._items.get_nowait() for _ in range(min(number, self._items.qsize()))]

    async def next_group(self) -> list[_Item]:
        """Return those that a worker is asked for together."""
        self._idle += 1
        try:
            items = [await self._items.get()]
        finally:
            self._idle -= 1
        size = self._order.group_size
        if not self._order.concurrency:  # a call of many takes longer: idle workers have equal shares
            size = min(size, math.ceil((1 + self._items.qsize()) / (1 + self._idle)))
        return items + self.more(size - 1)


def message_of(arguments: Mapping[str, object]) -> bytes:
    """Return the message that asks for a response, given what the function gets. Raises TypeError and ValueError."""
    return json.dumps(arguments).encode()


class RewardPool:
    """Worker processes of this rank for one reward function; starts them, replaces those that end."""

    def __init__(self, order: WorkerOrder, *, num_workers: int, timeout_s: float) -> None:
        """Start the workers without waiting for them. timeout_s: deadline of one response."""
        assert num_workers > 0, "a pool needs a worker"
        self._order = order
        self._calls = WorkerCalls(order, timeout_s)
        self._timeout_s = timeout_s
        self.slowest = SlowestCall()
        self._broken = ""  # why no worker can score
        self._waiting = _Waiting(order)
        self._open: set[_Item] = set()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._serve_all(num_workers))
        # Workers die with this thread, so it lives as long as the pool.
        self._thread = threading.Thread(target=self._run, name="reward pool", daemon=True)
        self._thread.start()

    @property
    def patience_s(self) -> float:
        """Return how long a pool with open responses ends none at most: starts of a worker, and deadlines.

        A response may be tried twice within one deadline; in a group once more before that, each with its own.
        """
        tries = 3 if self._order.group_size else 2
        hang_s = self._timeout_s
        if self._order.group_size:
            hang_s = tries * self._order.group_timeout_s(self._timeout_s)
        return tries * (START_S + 2 * END_S) + hang_s

    def submit(self, arguments: Mapping[str, object]) -> Future[Score | NoScore]:
        """Return the future outcome of a response, given what the function gets; first come, first served.

        Its exception is UnusableFunctionError. Raises TypeError and ValueError for
        arguments that cannot be written as JSON.
        """
        return self.submit_messages([message_of(arguments)])[0]

    def submit_messages(self, messages: Sequence[bytes]) -> list[Future[Score | NoScore]]:
        """Return the future outcomes of responses, as `submit` does; workers see all of them at once."""
        items = [_Item(message, Future(), self._timeout_s) for message in messages]
        self._loop.call_soon_threadsafe(self._take, items)
        return [item.future for item in items]

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

    def _take(self, items: Sequence[_Item]) -> None:
        self._open.update(items)
        if self._broken:
            self._fail(self._broken)
        else:
            self._waiting.put(items)

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
        own: deque[_Item] = deque()
        num_sent, ahead = 0, 1  # of its own responses, to this worker; and how many it may have at a time
        try:
            while True:
                worker = worker or await self._calls.start(number)
                if self._order.group_size:
                    worker = await self._serve_together(worker, own)
                    continue
                if not own:
                    own.append(await self._waiting.next())
                own.extend(self._waiting.more(ahead - len(own)))
                for item in itertools.islice(own, num_sent, None):
                    worker.send(item.message)
                item = own[0]
                begin, item.tries = time.monotonic(), item.tries + 1
                outcome = await self._calls.score(worker, item.left_s)
                seconds = time.monotonic() - begin
                item.left_s -= seconds
                self.slowest.add(seconds)
                num_sent, ahead = len(own) - 1, AHEAD if seconds < QUICK_S else 1
                kind = outcome.kind if isinstance(outcome, NoScore) else "score"
                if kind in ("timeout", "crash"):
                    await worker.end()
                    worker, num_sent = None, 0
                # A worker may have died of something else, such as the machine's lack of memory.
                if kind != "crash" or item.tries > 1 or item.left_s <= 0:
                    self._finish(own.popleft(), outcome)
        except UnusableFunctionError as error:
            self._fail(str(error))
        finally:
            if worker is not None:
                await worker.end()

    async def _serve_together(self, worker: WorkerProcess, again: deque[_Item]) -> WorkerProcess | None:
        """Finish the next responses at the same time; return the worker, None if it was lost.

        again: responses that failed together, since one of them blocks the event loop, crashes the worker or lets a
        function of several raise. They are tried one by one, so that it costs that one alone.
        """
        items = [again.popleft()] if again else await self._waiting.next_group()
        with self.slowest.timed():
            outcomes = await self._calls.score_together(worker, [item.message for item in items])
        if not isinstance(outcomes, NoScore):
            for item, outcome in zip(items, outcomes, strict=True):
                self._finish(item, outcome)
            return worker
        is_lost = outcomes.kind != "error"
        if is_lost:
            await worker.end()
        if len(items) > 1:
            again.extend(items)
            return None if is_lost else worker
        (item,) = items
        item.tries += 1
        if outcomes.kind == "crash" and item.tries == 1:
            again.append(item)
        else:
            self._finish(item, outcomes)
        return None if is_lost else worker
