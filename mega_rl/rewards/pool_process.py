"""Handle of a reward worker in the rank, on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import cast

import mega_rl
from mega_rl.environment import of_other_programs, python_module
from mega_rl.errors import name_of_signal
from mega_rl.processes import PIPE, Child, ChildStartError
from mega_rl.rewards.pool_worker import END_S, OUT_OF_MEMORY, SIGNAL_CODES, WorkerMessage
from mega_rl.rewards.score import SHOWN_CHARACTERS, RewardError

log = logging.getLogger(__name__)

COMMAND = python_module("mega_rl.rewards.pool_worker")
START_S = 300.0  # for imports of the function's file, from a busy file server
MESSAGE_BYTES = 1 << 20  # longest message of a worker
SHOWN_BYTES = 64 << 10  # a worker's output in a minute; the rest is dropped
TAIL_BYTES = 4000  # end of the output, kept for errors


class WorkerEndedError(Exception):
    """A worker ended, or sent what no worker sends; the message says how."""


class WorkerProcess:
    """A worker process. It ends with the thread that starts it, and all that it has started ends, too."""

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
