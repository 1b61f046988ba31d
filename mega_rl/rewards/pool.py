"""Scores by reward functions, in this process or in workers.

In workers a response that hangs or crashes costs only itself. A worker runs the program `pool_worker`: it reads a line
of JSON, the responses of one message, and writes one, their outcomes. A worker that misses its deadline or ends is
replaced. Pools of installed libraries know no deadline of a task, or unpickle what workers send.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mega_rl
from mega_rl.data.columns import RewardColumns
from mega_rl.environment import of_other_programs, python_module
from mega_rl.processes import KILL_S, PIPE, POLL_S, Child, ChildDeadlineError, ChildStartError
from mega_rl.rewards.call import Arguments, PlannedFunction
from mega_rl.rewards.score import Item, NotAScoreError, Outcome, Report, RewardError, RewardFailure, as_score, ignore

COMMAND = python_module("mega_rl.rewards.pool_worker")
START_S = 300.0  # for imports of the function's file, from a busy file server
GRACE_S = 2.0  # for asynchronous calls that are cancelled at their deadline to end
BEAT_S = 5.0  # between two reports that workers, which have deadlines, are at work


@dataclass
class FunctionRewards:
    """Source of scores by reward functions, in this process without deadlines or in workers."""

    functions: Sequence[PlannedFunction]
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)  # names of functions by a row's source; {}: all
    pool: WorkerPool | None = None

    @property
    def columns(self) -> RewardColumns:
        """Return the columns that the functions read; an answer where every data source needs one."""
        columns = [function.columns for function in self.functions]
        return RewardColumns(
            answer=all(self.takes_answer(source) for source in self.sources or ("",)),
            structured=all(one.structured for one in columns),
            every=any(one.every for one in columns),
        )

    @property
    def can_begin_early(self) -> bool:
        """Return whether responses can be scored in any order and company, off the main thread.

        Calls of several responses keep their company, and functions in this process the main thread, for signals.
        """
        return all(one.per_call == 1 and (self.pool is not None or one.is_async) for one in self.functions)

    def takes_answer(self, source: str) -> bool:
        """Return whether a function that scores rows of a data source needs their answers."""
        return any(function.columns.answer for function in self.functions if self._scores(function, source))

    def score(self, items: Sequence[Item], report: Report = ignore) -> list[Outcome]:
        """Return the outcomes. Functions are called one after the other, until None or a failure."""
        components: list[dict[str, float]] = [{} for _ in items]
        final: dict[int, Outcome] = {}
        for function in self.functions:
            rows = [row for row, (prompt, _) in enumerate(items) if self._scores(function, prompt.source)]
            rows = [row for row in rows if row not in final]
            outcomes = self._call(function, [function.arguments(*items[row]) for row in rows], report)
            for row, outcome in zip(rows, outcomes, strict=True):
                if not function.name or outcome is None or isinstance(outcome, RewardFailure):
                    final[row] = outcome
                    continue
                parts = {"": outcome} if isinstance(outcome, float) else outcome
                own = {f"{function.name}_{part}" if part else function.name: value for part, value in parts.items()}
                if twice := components[row].keys() & own.keys():
                    what = f"{function} gives a part {min(twice)!r}, which another gives too"
                    final[row] = RewardFailure("error", what)
                components[row] |= own
        return [final[row] if row in final else _together(components[row]) for row in range(len(items))]

    def _scores(self, function: PlannedFunction, source: str) -> bool:
        return not self.sources or function.name in self.sources[source]

    def _call(self, function: PlannedFunction, batch: Sequence[Arguments], report: Report) -> list[Outcome]:
        def begin(chunk: Sequence[Arguments]) -> None:
            more = f" and {len(chunk) - 1} more" if len(chunk) > 1 else ""
            report(f"prompt {chunk[0]['prompt_index']}{more}, whose response {function} is scoring")

        return function.run(batch, begin) if self.pool is None else self.pool.score(function, batch, report)


def _together(components: Mapping[str, float]) -> Outcome:
    """Return the components in alphabetical order, or why they are no score."""
    try:
        return as_score(components)
    except NotAScoreError as error:
        return RewardFailure("error", f"the reward functions returned {error}")


class WorkerPool:
    """Worker processes that call reward functions, each asked by one thread."""

    def __init__(
        self,
        functions: str | Mapping[str, str],
        *,
        num_workers: int,
        timeout_s: float,
        memory_bytes: int = 0,
        **settings: int,
    ) -> None:
        """Start the workers without waiting for them.

        functions: the setting reward.function, or reward.functions. timeout_s: deadline of one call. memory_bytes: a
        worker's address space; 0: no limit. settings: as of `load_functions`. Raises RewardError if a worker cannot be
        started.
        """
        assert num_workers > 0, "a pool needs a worker"
        self._timeout_s = timeout_s
        order = {
            "functions": functions if isinstance(functions, str) else dict(functions),
            "settings": {**settings, "timeout_s": timeout_s},
            "memory_bytes": memory_bytes,
            "path": sys.path,
        }
        self._order = json.dumps(order).encode()
        self._workers: list[_Worker | None] = [_Worker(number, self._order) for number in range(num_workers)]
        self._threads = ThreadPoolExecutor(num_workers, "reward worker")
        self._stop = threading.Event()  # ends the call in progress

    def score(self, function: PlannedFunction, batch: Sequence[Arguments], report: Report = ignore) -> list[Outcome]:
        """Return the outcome of each response.

        A message that gets no outcomes is repeated one by one, and a crash of one response once: a worker may have
        died of the machine's lack of memory. Raises RewardError when a worker cannot start, or a row cannot be sent.
        """
        share = math.ceil(len(batch) / len(self._workers))
        size = max(1, share if function.is_async else min(share, function.per_call))
        waiting = deque(range(len(batch))[first : first + size] for first in range(0, len(batch), size))
        outcomes: list[Outcome] = [None] * len(batch)
        crashed: set[int] = set()
        stop = self._stop = threading.Event()

        def serve(number: int) -> None:
            while not stop.is_set():
                try:
                    rows = waiting.popleft()
                except IndexError:
                    return
                result = self._ask(number, function, [batch[row] for row in rows])
                if isinstance(result, list):
                    for row, outcome in zip(rows, result, strict=True):
                        outcomes[row] = outcome
                elif len(rows) > 1:
                    waiting.extendleft(rows[place : place + 1] for place in range(len(rows)))
                elif result.kind == "crash" and rows[0] not in crashed:
                    crashed.add(rows[0])
                    waiting.append(rows)
                else:
                    outcomes[rows[0]] = result

        asking = [self._threads.submit(serve, number) for number in range(len(self._workers))]
        try:
            while wait(asking, BEAT_S).not_done:
                report("its workers, which have deadlines")
            for one in asking:
                one.result()
        finally:
            stop.set()
        return outcomes

    def _ask(self, number: int, function: PlannedFunction, batch: Sequence[Arguments]) -> list[Outcome] | RewardFailure:
        """Return a worker's outcomes, or why it gave none and was ended. Raises RewardError."""
        try:
            message = json.dumps([function.name, batch]).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RewardError(
                f"prompt {batch[0]['prompt_index']}: its row cannot be sent to a reward worker: {error}; set "
                "reward.source.workers=0, or leave that column out"
            ) from error
        within_s = self._timeout_s
        if function.is_async:  # calls at a time, one round after the other
            calls = math.ceil(len(batch) / function.per_call)
            within_s = math.ceil(calls / function.concurrency) * within_s + GRACE_S
        worker = self._workers[number] = self._workers[number] or _Worker(number, self._order)
        try:
            return worker.ask(message, within_s)
        except ChildDeadlineError:
            failure = function.timed_out(self._timeout_s)
        except EOFError as error:
            failure = RewardFailure("crash", f"{function} crashed its process, which {error}")
        worker.end()
        self._workers[number] = None
        return failure

    def close(self) -> None:
        """End all workers and what they have started. May be called twice."""
        self._stop.set()
        for worker in filter(None, self._workers):
            worker.kill()  # a thread that still asks it hears its end
        self._threads.shutdown()
        for worker in filter(None, self._workers):
            worker.end()
        self._workers.clear()


class _Worker(Child):
    """A worker process, which ends with its starter, and its process group with it."""

    def __init__(self, number: int, order: bytes) -> None:
        """Start the process and send it the order. Raises RewardError if it cannot be started."""
        variables = of_other_programs()
        path = [str(Path(mega_rl.__file__).resolve().parents[1]), variables.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        try:
            super().__init__(f"reward worker {number}", COMMAND, streams=(PIPE, PIPE, None), env=variables | own)
        except ChildStartError as error:
            raise RewardError(str(error)) from error
        self._is_ready = False
        with contextlib.suppress(OSError):  # ended already; `ask` says how
            self._send(order)

    def ask(self, message: bytes, within_s: float) -> list[Outcome]:
        """Return a message's outcomes.

        Raises ChildDeadlineError after `within_s`, EOFError with how the worker ended, RewardError if it cannot start.
        """
        if not self._is_ready:
            try:
                self._is_ready = bool(self._receive(START_S))
            except (ChildDeadlineError, EOFError) as error:
                raise RewardError(f"a reward worker could not start: {error}; the log says why") from None
        with contextlib.suppress(OSError):  # ended; `_receive` says how
            self._send(message)
        outcomes = cast("list[Any]", self._receive(within_s))
        return [RewardFailure.or_score(one) for one in outcomes]

    def _send(self, message: bytes) -> None:
        self.stdin.write(message + b"\n")
        self.stdin.flush()

    def _receive(self, within_s: float) -> object:
        line = next(self.lines(within_s=within_s), None)
        if line is not None:
            return json.loads(line)
        deadline = time.monotonic() + KILL_S
        while self.exit_code is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        raise EOFError(self.end_in_words())
