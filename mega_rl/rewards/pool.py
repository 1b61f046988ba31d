"""Reward functions in processes, so that a response that hangs or crashes costs only itself.

Each worker runs the program `pool_worker`. The rank's thread runs an event loop while it waits for scores. The pools of
`concurrent.futures`, `multiprocessing` and pebble unpickle what workers send, know no deadline of a task or share one
pipe among the workers, and leave the processes that a task has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import mega_rl
from mega_rl.environment import of_other_programs, python_module
from mega_rl.errors import name_of_signal
from mega_rl.processes import PIPE, Child, ChildStartError
from mega_rl.rewards.call import RewardCall, subject, timed_out
from mega_rl.rewards.pool_worker import END_S, OUT_OF_MEMORY, SIGNAL_CODES, WorkerMessage
from mega_rl.rewards.score import (
    SHOWN_CHARACTERS,
    Item,
    NotAScoreError,
    Outcome,
    Report,
    RewardError,
    RewardFailure,
    as_score,
    ignore,
    no_score,
)
from mega_rl.types import Prompt

log = logging.getLogger(__name__)

COMMAND = python_module("mega_rl.rewards.pool_worker")
START_S = 300.0  # for imports of the function's file, from a busy file server
MESSAGE_BYTES = 1 << 20  # longest message of a worker
SHOWN_BYTES = 64 << 10  # a worker's output in a minute; the rest is dropped
TAIL_BYTES = 4000  # end of the output, kept for errors


class WorkerEndedError(Exception):
    """A worker ended, or sent what no worker sends; the message says how."""


class WorkerProcess:
    """A worker process, which ends with its starter's thread, and its own children with it."""

    def __init__(self, order: bytes, number: int, loop: asyncio.AbstractEventLoop) -> None:
        """Start the process and send it the order; `ready` waits until the function is loaded.

        Raises RewardError if it cannot be started.
        """
        self._number = number
        self._channel, there = socket.socketpair()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        output, write_end = os.pipe()
        variables = of_other_programs()
        path = os.pathsep.join(
            filter(None, (str(Path(mega_rl.__file__).resolve().parents[1]), variables.get("PYTHONPATH")))
        )
        try:
            with there:
                self._child = Child(
                    f"reward worker {number}",
                    [*COMMAND, str(there.fileno())],
                    streams=(PIPE, write_end, write_end),  # the input is never written to: its end is the rank's
                    env=variables | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                    pass_fds=(there.fileno(),),
                )
        except ChildStartError as error:
            self._channel.close()
            os.close(output)
            raise RewardError(str(error)) from error
        finally:
            os.close(write_end)
        self._output = _Output(output, number, loop)
        with contextlib.suppress(OSError):  # ended already; `ready` says how
            self._channel.sendall(order + b"\n")

    async def ready(self) -> None:
        """Wait until the function is loaded. Raises RewardError."""
        if self._streams is not None:
            return
        self._streams = await asyncio.open_connection(sock=self._channel, limit=MESSAGE_BYTES)
        try:
            async with asyncio.timeout(START_S):
                answer = await self.receive()
        except TimeoutError:
            answer = {"unusable": f"a reward worker has not loaded the function in {START_S:g} s{self._output.tail()}"}
        except WorkerEndedError as error:
            answer = {"unusable": f"a reward worker could not start: it {error}"}
        if "unusable" in answer:
            raise RewardError(str(answer["unusable"]))

    def send(self, message: bytes) -> None:
        """Send a message; keeps it until it is taken."""
        assert self._streams is not None, "asked before it is ready"
        self._streams[1].write(message + b"\n")

    async def receive(self) -> WorkerMessage:
        """Return the worker's next message. Raises WorkerEndedError."""
        assert self._streams is not None, "asked before it is ready"
        try:
            line = await self._streams[0].readline()
            if not line.endswith(b"\n"):
                raise WorkerEndedError(await self._how_it_ended())
            message = json.loads(line)
        except OSError:
            raise WorkerEndedError(await self._how_it_ended()) from None
        except (ValueError, RecursionError):  # too long, or no JSON
            raise WorkerEndedError("sent what no worker sends") from None
        if not isinstance(message, dict):
            raise WorkerEndedError("sent what no worker sends")
        return cast(WorkerMessage, message)

    async def end(self) -> None:
        """End the process and all that it has started, and free its descriptors."""
        self._child.close()  # for the keeper
        if not await self._has_ended():
            log.warning("reward worker %d (process %d) outlives its end", self._number, self._child.pid)
            self._child.kill()
        self.leave()

    def leave(self) -> None:
        """Close this end of the pipes without waiting; the keeper then kills the worker."""
        self._child.close()
        if self._streams is None:
            self._channel.close()
        else:
            self._streams[1].close()
        self._output.close()
        if self._child.exit_code is not None:
            self._child.wait()

    async def _has_ended(self) -> bool:
        """Wait for the keeper, which needs `END_S` at most; return whether it has ended."""
        deadline = time.monotonic() + 2 * END_S
        while self._child.exit_code is None and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
        return self._child.exit_code is not None

    async def _how_it_ended(self) -> str:
        if not await self._has_ended():
            return "closed its connection" + self._output.tail()
        code = self._child.exit_code or 0
        how = f"ended with exit code {code}"
        if code == OUT_OF_MEMORY:
            how = "ran out of memory"
        elif SIGNAL_CODES < code < SIGNAL_CODES + signal.NSIG:
            how = f"died of {name_of_signal(code - SIGNAL_CODES)}"
        return how + self._output.tail()


class _Output:
    """Reader of a worker's output: the log gets some of it, errors show its end."""

    def __init__(self, descriptor: int, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._descriptor, self._number, self._loop = descriptor, number, loop
        self._last = self._line = b""
        self._minute = 0.0
        self._shown = 0
        os.set_blocking(descriptor, False)
        loop.add_reader(descriptor, self._read)

    def tail(self) -> str:
        """Return the cause of a worker's end as a part of a sentence.

        That is Python's report of a crash, else a traceback's error, else the end of the output; empty without any.
        """
        self._read()  # the last lines may have come with the end
        text = self._last.decode(errors="replace")
        crash, trace = text.rfind("Fatal Python error"), text.rfind("Traceback (most recent call last)")
        if crash < 0 <= trace:
            error = [line for line in text[trace:].splitlines()[1:] if line.strip() and not line.startswith(" ")]
            text = " ".join(error) or text
        text = " ".join(text[max(crash, 0) :].split())
        text = text[:SHOWN_CHARACTERS] if max(crash, trace) >= 0 else text[-SHOWN_CHARACTERS:]
        return f", saying: {text}" if text else ""

    def close(self) -> None:
        """Stop reading; a process that still writes gets SIGPIPE."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self) -> None:
        """Read the output so far and log its whole lines; at the end also the rest."""
        try:
            text = os.read(self._descriptor, 1 << 16) if self._descriptor >= 0 else b""
        except BlockingIOError:
            return
        self._last = (self._last + text)[-TAIL_BYTES:]
        *lines, self._line = (self._line + text).split(b"\n")
        if len(self._line) > SHOWN_BYTES or not text:
            lines, self._line = [*lines, self._line], b""
        for line in filter(None, map(bytes.rstrip, lines)):
            self._log(line)
        if not text:
            self.close()

    def _log(self, line: bytes) -> None:
        now = time.monotonic()
        if now - self._minute >= 60:
            self._minute, self._shown = now, 0
        if self._shown < SHOWN_BYTES:
            log.info("reward worker %d: %s", self._number, line[:SHOWN_BYTES].decode(errors="replace"))
            if self._shown + len(line) + 1 >= SHOWN_BYTES:
                log.info("reward worker %d: the rest of its output is dropped for a minute", self._number)
        self._shown += len(line) + 1


log = logging.getLogger(__name__)

GRACE_S = 2.0  # for asynchronous calls that are cancelled at their deadline to end
QUICK_S = 0.005  # below this for a response, sending several at a time saves more than sharing them evenly
AHEAD = 16  # responses that a worker gets at a time while they are quick
BEAT_S = 5.0  # between two reports that workers, which have deadlines, are at work


class RewardPool:
    """Scores by the functions of a call in worker processes, which are replaced when they end.

    A response that takes longer than its deadline, or crashes its worker twice, has no score.
    """

    def __init__(
        self,
        call: RewardCall,
        functions: str | Mapping[str, str],
        *,
        num_workers: int,
        timeout_s: float,
        memory_bytes: int = 0,
    ) -> None:
        """Start the workers without waiting for them.

        functions: the setting reward.function, or reward.functions. timeout_s: deadline of one call. memory_bytes: a
        worker's address space; 0: no limit. Raises RewardError if a worker cannot be started.
        """
        assert num_workers > 0, "a pool needs a worker"
        self.call = call
        self.longest_s = 0.0
        self._timeout_s = timeout_s
        order = {
            "functions": functions if isinstance(functions, str) else dict(functions),
            "timeout_s": timeout_s,
            "memory_bytes": memory_bytes,
            "concurrency": call.concurrency,
            "batch_size": call.batch_size,
            "path": sys.path,
        }
        self._order = json.dumps(order).encode()
        self._loop = asyncio.new_event_loop()
        self._workers: list[WorkerProcess | None] = [
            WorkerProcess(self._order, number, self._loop) for number in range(num_workers)
        ]

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
                self._workers[number] = worker = worker or WorkerProcess(self._order, number, self._loop)
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
        limit_s = self._timeout_s + (GRACE_S if self.call.is_async else 0.0)  # from one message to the next
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
        failure = timed_out(name, self._timeout_s)
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
    if "timeout" in sent:
        return RewardFailure("timeout", str(sent["timeout"]))
    return RewardFailure("error", str(sent["error"]))


async def _gather(works: Iterator[Awaitable[None]]) -> None:
    """Wait for all; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
