"""Handle of a reward worker in the rank, on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mega_rl
from mega_rl.environment import of_other_programs, python_module
from mega_rl.errors import name_of_signal
from mega_rl.workers.reward_calls import SHOWN_CHARACTERS
from mega_rl.workers.reward_pool.called import CalledFunction
from mega_rl.workers.reward_pool.program import END_S, LENGTH, OUT_OF_MEMORY, SIGNAL_CODES
from mega_rl.workers.scoring.sets import subject_of

log = logging.getLogger(__name__)

COMMAND = python_module("mega_rl.workers.reward_pool.program")
GRACE_S = 2.0  # for asynchronous calls that are cancelled at their deadline to end
START_S = 300.0  # for imports of the function's file, from a busy file server
ANSWER_BYTES = 1 << 20  # of one answer, of which a message is the largest part
SHOWN_BYTES = 64 << 10  # of a worker's output in a minute; the rest is dropped
TAIL_BYTES = 4000  # of the output, kept for errors


class WorkerEndedError(Exception):
    """A worker ended, or answered what no worker answers; the message says how."""


class UnusableFunctionError(Exception):
    """A worker cannot load the reward function, or does not start."""


@dataclass(frozen=True)
class WorkerOrder:
    """Work of a worker: the function that it loads, and the memory that it may use."""

    function: str | Mapping[str, str]  # as in reward.function, or reward.functions
    memory_bytes: int  # of address space; 0 is no limit
    concurrency: int = 0  # calls of an asynchronous function at a time; 0: the function is none
    batch_size: int = 0  # responses of one call, of a function that takes several; 0: it takes one

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the functions of a set; () of a single one."""
        return () if isinstance(self.function, str) else tuple(self.function)

    @property
    def group_size(self) -> int:
        """Return the number of responses that a worker may be asked for at the same time; 0: one after the other."""
        return self.concurrency * max(self.batch_size, 1) or self.batch_size

    def group_timeout_s(self, timeout_s: float) -> float:
        """Return the deadline of such responses; timeout_s: that of one call.

        A worker cancels asynchronous calls itself, and may repeat those of several responses one by one.
        """
        if not self.concurrency:
            return timeout_s
        return GRACE_S + timeout_s * (2 if self.batch_size else 1)


class WorkerProcess:
    """A worker process; it ends when the thread that starts it does, in whatever way, with all that it has started."""

    def __init__(self, order: WorkerOrder, number: int) -> None:
        """Start the process; `ready` waits for it. Raises UnusableFunctionError if it cannot be started."""
        self._order = order
        self._number = number
        self._channel, there = socket.socketpair()
        output, write_end = os.pipe()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        running = CalledFunction.create()
        self._running = CalledFunction(running, order.names)
        try:
            with there:
                self._process = subprocess.Popen(
                    [*COMMAND, str(there.fileno()), str(running)],
                    stdin=subprocess.PIPE,  # never written to: its end is the rank's
                    stdout=write_end,
                    stderr=write_end,
                    env=_environment(),
                    pass_fds=(there.fileno(), running),
                    start_new_session=True,  # Ctrl-C is the trainer's
                )
        except OSError as error:
            self._channel.close()
            os.close(output)
            raise UnusableFunctionError(f"a reward worker cannot be started: {error.strerror}") from error
        finally:
            os.close(write_end)
            os.close(running)
        self._output = _Output(output, number)

    def subject(self) -> str:
        """Return how errors name the function that the worker is in, or was in when it ended."""
        return subject_of(self._order.function, self._running.get())

    def num_calls(self) -> int:
        """Return a number that grows with each function of a set that the worker calls."""
        return self._running.count()

    @property
    def pid(self) -> int:
        """Return the process id of the worker's keeper."""
        return self._process.pid

    async def ready(self, timeout_s: float) -> None:
        """Wait until the function is loaded; timeout_s: its deadline of one response. Raises UnusableFunctionError."""
        self._streams = await asyncio.open_connection(sock=self._channel)
        function = self._order.function
        function = function if isinstance(function, str) else dict(function)
        order = {
            "function": function,
            "timeout_s": timeout_s,
            "batch_size": self._order.batch_size,
            "memory_bytes": self._order.memory_bytes,
            "path": sys.path,
        }
        answer: dict[str, object]
        try:
            async with asyncio.timeout(START_S):
                answer = await self.ask(json.dumps(order).encode())
        except TimeoutError:
            answer = {"unusable": f"a reward worker has not loaded the function in {START_S:g} s{self._output.tail()}"}
        except WorkerEndedError as error:
            answer = {"unusable": f"a reward worker could not start: it {error}"}
        if "unusable" in answer:
            raise UnusableFunctionError(str(answer["unusable"]))

    async def ask(self, message: bytes) -> dict[str, object]:
        """Return the answer to a message. Raises WorkerEndedError; one that is cancelled leaves the worker unusable."""
        self.send(message)
        return await self.receive()

    def send(self, message: bytes) -> None:
        """Send a message, which the worker answers after those that were sent before; keeps it until it is taken."""
        assert self._streams is not None, "asked before it is ready"
        self._streams[1].write(LENGTH.pack(len(message)) + message)

    async def receive(self) -> dict[str, object]:
        """Return the next answer. Raises as `ask` does."""
        assert self._streams is not None, "asked before it is ready"
        reader = self._streams[0]
        try:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            if length > ANSWER_BYTES:
                raise WorkerEndedError(f"sent an answer of {length} bytes")
            answer = json.loads(await reader.readexactly(length))
        except (OSError, EOFError):
            raise WorkerEndedError(await self._how_it_ended()) from None
        except ValueError:
            raise WorkerEndedError("sent an answer that is not JSON") from None
        if not isinstance(answer, dict):
            raise WorkerEndedError("sent an answer of another form")
        return answer

    async def end(self) -> None:
        """End the process and all that it has started, and free its descriptors."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # for the keeper
        if not await self._has_ended():
            log.warning("reward worker %d (process %d) outlives its end", self._number, self.pid)
            self._process.kill()
        if self._streams is None:
            self._channel.close()
        else:
            self._streams[1].close()
        self._output.close()
        self._running.close()

    async def _has_ended(self) -> bool:
        """Wait for the keeper, which needs `END_S` at most; return whether it has ended."""
        deadline = time.monotonic() + 2 * END_S
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
        return self._process.poll() is not None

    async def _how_it_ended(self) -> str:
        if not await self._has_ended():
            return "closed its connection" + self._output.tail()
        code = self._process.returncode
        if code == OUT_OF_MEMORY:
            return "ran out of memory" + self._output.tail()
        if SIGNAL_CODES < code < SIGNAL_CODES + signal.NSIG:
            return f"died of {name_of_signal(code - SIGNAL_CODES)}" + self._output.tail()
        return f"ended with exit code {code}" + self._output.tail()


def _environment() -> dict[str, str]:
    """Return the variables of a worker: no GPU, one thread, this package."""
    variables = of_other_programs()
    package = str(Path(mega_rl.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (package, variables.get("PYTHONPATH"))))
    return variables | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class _Output:
    """Reader of what a worker writes: the log gets some of it, and the last of it goes into errors."""

    def __init__(self, descriptor: int, number: int) -> None:
        self._descriptor = descriptor
        self._number = number
        self._last = self._line = b""
        self._minute = 0.0
        self._shown = 0
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def tail(self) -> str:
        """Return the cause of an end as a part of a sentence: of a crash what Python says, of a traceback its error.

        Otherwise the end of the output; empty without any.
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
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self) -> None:
        """Read what there is; the log gets whole lines, and the rest of a line when the worker has ended."""
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
