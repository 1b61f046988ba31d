"""Reward functions in processes, so that a response that hangs or crashes costs only itself.

Each worker runs the program `pool_worker`. The rank's thread runs an event loop while it waits for scores. The pools of
`concurrent.futures`, `multiprocessing` and pebble unpickle what workers send, know no deadline of a task or share one
pipe among the workers, and leave the processes that a task has started.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mega_rl.rewards.call import RewardCall, subject, timed_out
from mega_rl.rewards.pool_process import WorkerEndedError, WorkerProcess
from mega_rl.rewards.score import (
    Item,
    NotAScoreError,
    Outcome,
    Report,
    RewardFailure,
    as_score,
    ignore,
    no_score,
)
from mega_rl.types import Prompt

log = logging.getLogger(__name__)

GRACE_S = 2.0  # for asynchronous calls that are cancelled at their deadline to end
QUICK_S = 0.005  # below this for a response, sending several at a time saves more than sharing them evenly
AHEAD = 16  # responses that a worker gets at a time while they are quick
BEAT_S = 5.0  # between two reports that workers, which have deadlines, are at work


@dataclass(frozen=True)
class WorkerOrder:
    """Work of a pool's workers."""

    functions: str | Mapping[str, str]  # the setting reward.function, or reward.functions
    timeout_s: float  # deadline of one call
    memory_bytes: int = 0  # address space; 0: no limit


class RewardPool:
    """Scores by the functions of a call in worker processes, which are replaced when they end.

    A response that takes longer than its deadline, or crashes its worker twice, has no score.
    """

    def __init__(self, call: RewardCall, order: WorkerOrder, *, num_workers: int) -> None:
        """Start the workers without waiting for them. Raises RewardError if one cannot be started."""
        assert num_workers > 0, "a pool needs a worker"
        self.call = call
        self.longest_s = 0.0
        self._order = order
        self._loop = asyncio.new_event_loop()
        self._workers: list[WorkerProcess | None] = [self._start(number) for number in range(num_workers)]

    def score(self, items: Sequence[Item], report: Report = ignore) -> list[Outcome]:
        """Return the outcomes. Raises RewardError when no worker can score, or a row cannot be sent."""
        if not items:
            return []
        messages = [self._message(item) for item in items]
        return self._loop.run_until_complete(self._score(_PoolBatch(items, messages), report))

    def close(self) -> None:
        """End all workers and what they have started. May be called twice."""
        if self._loop.is_closed():
            return
        workers, self._workers = [worker for worker in self._workers if worker is not None], []
        for task in asyncio.all_tasks(self._loop):  # from scoring that was interrupted
            task.cancel()
        self._loop.run_until_complete(_gather(worker.end() for worker in workers))
        self._loop.close()

    def _message(self, item: Item) -> bytes:
        try:
            return json.dumps(self.call.arguments(*item)).encode()
        except (TypeError, ValueError) as error:
            what = (
                f"the row cannot be sent to a reward worker: {error}; set reward.source.workers=0, or drop the column"
            )
            raise no_score(what, *item) from None

    def _start(self, number: int) -> WorkerProcess:
        order = {
            "functions": self._order.functions if isinstance(self._order.functions, str) else {**self._order.functions},
            "timeout_s": self._order.timeout_s,
            "memory_bytes": self._order.memory_bytes,
            "concurrency": self.call.concurrency,
            "batch_size": self.call.batch_size,
            "path": sys.path,
        }
        return WorkerProcess(json.dumps(order).encode(), number, self._loop)

    async def _score(self, batch: _PoolBatch, report: Report) -> list[Outcome]:
        async def beat() -> None:
            while True:
                report(f"prompt {batch.oldest.index}")
                await asyncio.sleep(BEAT_S)

        beating = self._loop.create_task(beat())
        try:
            await _gather(self._serve(number, batch) for number in range(len(self._workers)))
        finally:
            beating.cancel()
        return batch.outcomes

    async def _serve(self, number: int, batch: _PoolBatch) -> None:
        """Let one worker and its successors score responses until none waits. Raises RewardError."""
        seconds = math.inf  # for a response in the last group
        group: list[int] = []
        worker = self._workers[number]
        try:
            while group := batch.next(self._group_size(len(batch.items), quick=seconds < QUICK_S)):
                self._workers[number] = worker = worker or self._start(number)
                await worker.ready()
                begin = time.monotonic()
                lost = await self._score_group(worker, group, batch)
                seconds, group = (time.monotonic() - begin) / len(group), []
                if lost:
                    worker = self._workers[number] = None
        finally:
            if group and worker is not None:  # called off: its answers would be taken for later ones
                self._workers[number] = None
                worker.leave()

    def _group_size(self, num_items: int, *, quick: bool) -> int:
        """Return how many responses a worker gets at a time."""
        if self.call.is_async:
            return self.call.concurrency * (self.call.batch_size if self.call.batched else 1)
        most = self.call.batch_size if self.call.batched else AHEAD if quick else 1
        return min(most, math.ceil(num_items / len(self._workers)))  # idle workers have equal shares

    async def _score_group(self, worker: WorkerProcess, group: list[int], batch: _PoolBatch) -> bool:
        """Score some responses; return whether the worker was lost, which is then ended."""
        worker.send(b"[" + b",".join(batch.messages[row] for row in group) + b"]")
        running: dict[int, str] = {}  # rows that a function has been called for, and its name
        left = set(group)
        limit_s = self._order.timeout_s + (GRACE_S if self.call.is_async else 0.0)  # from one message to the next
        heard = time.monotonic()
        try:
            while left:
                async with asyncio.timeout(limit_s):
                    message = await worker.receive()
                heard = time.monotonic()
                running |= {group[place]: str(message["function"]) for place in message.get("begin", ())}
                for place, sent in zip(message.get("end", ()), message.get("outcomes", ()), strict=True):
                    batch.outcomes[group[place]] = _outcome_of(sent)
                    left.remove(group[place])
                self.longest_s = max(self.longest_s, float(message.get("longest_s", 0.0)))
            return False
        except TimeoutError:
            how = ""
        except WorkerEndedError as error:
            how = str(error)
        except (KeyError, IndexError, TypeError, ValueError):  # a user's code has written to the connection
            how = "sent what no worker sends"
        self.longest_s = max(self.longest_s, time.monotonic() - heard)
        await worker.end()
        if not left:
            return True
        # Asynchronous calls were running at the same time, and so were the responses of one call.
        suspects = [row for row in group if row in left and row in running] or [row for row in group if row in left][:1]
        name = running.get(suspects[0], "")
        failure = timed_out(name, self._order.timeout_s)
        if how:
            failure = RewardFailure("crash", f"{subject(name)} crashed its process, which {how}")
        batch.put_back([row for row in group if row in left and row not in suspects])
        batch.settle(suspects, failure)
        return True


class _PoolBatch:
    """Responses of one batch: those that wait, and the outcomes of the others."""

    def __init__(self, items: Sequence[Item], messages: Sequence[bytes]) -> None:
        self.items, self.messages = items, messages
        self.outcomes: list[Outcome] = [RewardFailure("error", "not scored")] * len(items)
        self._waiting = deque(range(len(items)))
        self._alone: deque[int] = deque()  # to be tried one by one
        self._tried: set[int] = set()  # have crashed a worker by themselves

    @property
    def oldest(self) -> Prompt:
        """Return the prompt of a response that waits, or of the last one."""
        row = next(iter((*self._alone, *self._waiting)), len(self.items) - 1)
        return self.items[row][0]

    def next(self, size: int) -> list[int]:
        """Return the rows that a worker gets next; [] without any."""
        if self._alone:
            return [self._alone.popleft()]
        return [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]

    def put_back(self, rows: Sequence[int]) -> None:
        """Let rows wait again, the first."""
        self._waiting.extendleft(reversed(rows))

    def settle(self, rows: Sequence[int], failure: RewardFailure) -> None:
        """Record the failure of one response; try each of several again by itself.

        A crash is tried once more, since a worker may have died of the machine's lack of memory.
        """
        if len(rows) > 1 or (failure.kind == "crash" and rows[0] not in self._tried):
            if len(rows) == 1:
                self._tried.update(rows)
            self._alone.extend(rows)
        else:
            self.outcomes[rows[0]] = failure


def _outcome_of(sent: Mapping[str, object]) -> Outcome:
    """Return the outcome in a worker's message, which a user's code may have written, too."""
    if "score" in sent:
        try:
            return as_score(sent["score"])
        except NotAScoreError as error:
            return RewardFailure("error", f"the reward worker sent {error}")
    return (
        RewardFailure("timeout", str(sent["timeout"]))
        if "timeout" in sent
        else RewardFailure("error", str(sent["error"]))
    )


async def _gather(works: Iterator[Awaitable[None]]) -> None:
    """Wait for all; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
