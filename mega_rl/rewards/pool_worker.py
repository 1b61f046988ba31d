"""Program of a reward worker: a process that calls the function, and its keeper.

`python -m mega_rl.rewards.pool_worker` imports no torch. The keeper waits for the end of the worker and of its standard
input, which the rank holds open. At the first of them it kills the worker and every process that descends from
it, and ends. The worker is killed with the keeper, and the keeper hears of the rank's death twice, by its input and by
a signal. Messages are lines of JSON, so nothing is unpickled.

The rank sends an order, then lists of responses' arguments. The worker answers as `WorkerMessage` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import faulthandler
import io
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import NoReturn, TypedDict

import psutil

from mega_rl.errors import UserError
from mega_rl.processes import PR_SET_PDEATHSIG
from mega_rl.rewards.call import CallWatch, load_call
from mega_rl.rewards.score import Outcome, RewardFailure

OUT_OF_MEMORY = 86  # exit code
SIGNAL_CODES = 128  # plus the signal's number: the keeper's exit code for a worker that died of it
END_S = 5.0  # for all that a worker started to be gone
PR_SET_CHILD_SUBREAPER = 36


class WorkerMessage(TypedDict, total=False):
    """A message of a worker: of its start, of a call that begins, or of outcomes."""

    unusable: str  # why the function cannot be loaded; absent once it is
    begin: list[int]  # places, in the list that was sent, of responses that a function is called for
    function: str  # its name
    end: list[int]  # places of responses that have an outcome
    outcomes: list[dict[str, object]]  # {"score": ...}, {"error": why} or {"timeout": why} of each
    longest_s: float  # seconds of the longest call since the list came


def main(channel: int) -> NoReturn:
    """Run the keeper, and the worker as its child. channel: socket to the rank, a descriptor."""
    _control(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the worker become this process's children
    events = _catch_signals()
    _control(PR_SET_PDEATHSIG, signal.SIGTERM)
    worker = os.fork()
    if worker == 0:
        os.setpgid(0, 0)  # what it forks is killed with it at once, however fast that forks on
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        _control(PR_SET_PDEATHSIG, signal.SIGKILL)
        _control(PR_SET_CHILD_SUBREAPER, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
        try:
            _work(socket.socket(fileno=channel))
        except MemoryError:  # what holds the memory may be kept: the next response gets a new process
            os._exit(OUT_OF_MEMORY)
        os._exit(0)
    os.close(channel)
    os._exit(_keep(worker, events))


def _catch_signals() -> int:
    """Return a descriptor from which the numbers of SIGCHLD and SIGTERM can be read."""
    events, caught = os.pipe()
    for end in (events, caught):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(caught)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return events


def _keep(worker: int, events: int) -> int:
    """Wait for the worker's or the rank's end, kill everything, and return the exit code."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    poll.register(events, select.POLLIN)
    code: int | None = None
    while code is None:
        ready = dict(poll.poll())
        numbers = os.read(events, 512) if events in ready else b""
        if sys.stdin.fileno() in ready or signal.SIGTERM in numbers:
            break
        code = _reaped(worker)
    end = time.monotonic() + END_S
    while time.monotonic() < end:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker, signal.SIGKILL)
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        try:
            while (reaped := _reaped(worker)) is not None:
                code = reaped
        except ChildProcessError:
            break
        time.sleep(0.002)
    return 0 if code is None else code


def _reaped(worker: int) -> int | None:
    """Reap ended children; return the worker's exit code if it has ended.

    Raises ChildProcessError without children.
    """
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return None
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else SIGNAL_CODES - code


def _work(channel: socket.socket) -> None:
    """Load the function and answer the rank's messages until it closes the channel."""
    channel.set_inheritable(False)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected here
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # a crash loses no line
    messages = channel.makefile("rb")
    order = json.loads(messages.readline() or "null")
    if order is None:
        return
    sys.path[:] = order["path"]
    if order["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (order["memory_bytes"],) * 2)
    try:
        call = load_call(order["functions"], concurrency=order["concurrency"], batch_size=order["batch_size"])
    except UserError as error:
        _send(channel, {"unusable": str(error)})
        return
    call = dataclasses.replace(call, timeout_s=order["timeout_s"], fatal=(MemoryError,))
    _send(channel, {})
    runner = asyncio.Runner()
    watch = _Messages(channel, cleans_up=not call.is_async)
    for text in messages:
        watch.longest_s = 0.0
        call.run(json.loads(text), watch, runner.run)
        if call.is_async:
            watch.clean_up()
        watch.flush()


class _Messages(CallWatch):
    """Messages to the rank about calls, and an end to what a response has left behind."""

    def __init__(self, channel: socket.socket, *, cleans_up: bool) -> None:
        """cleans_up: after each call, since no other is running."""
        self._channel, self._cleans_up = channel, cleans_up
        self._pid, self._kept = os.getpid(), _children()
        self._unsent: list[WorkerMessage] = []

    def begin(self, rows: Sequence[int], name: str) -> None:
        self._unsent.append({"begin": list(rows), "function": name})
        self.flush()

    def end(self, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        if self._cleans_up:
            self.clean_up()
        sent: list[dict[str, object]] = [
            {one.kind: one.what} if isinstance(one, RewardFailure) else {"score": one} for one in outcomes
        ]
        self._unsent.append({"end": list(rows), "outcomes": sent, "longest_s": self.longest_s})
        if not self._cleans_up:  # others are running: the next call may be far
            self.flush()

    def flush(self) -> None:
        """Send the messages so far; a call's outcomes go with the next begin."""
        self._exit_as_fork()
        _send(self._channel, *self._unsent)
        self._unsent.clear()

    def clean_up(self) -> None:
        """Cancel the alarm, and kill the children that responses have left; those before the first stay.

        If they multiply faster than that, end this process: its keeper kills all of them at once.
        """
        self._exit_as_fork()
        signal.setitimer(signal.ITIMER_REAL, 0)
        end = time.monotonic() + END_S
        while children := _children() - self._kept:
            if time.monotonic() > end:
                os._exit(1)
            for pid in children:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _exit_as_fork(self) -> None:
        """End a process that a function has forked and let come back."""
        if os.getpid() != self._pid:
            os._exit(0)


def _children() -> frozenset[int]:
    """Return the ids of this process's children, orphans of its descendants included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # far cheaper than a list of all processes
    except ChildProcessError:
        return frozenset()
    return frozenset(child.pid for child in psutil.Process().children())


def _send(channel: socket.socket, *messages: WorkerMessage) -> None:
    channel.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))


def _control(option: int, value: int) -> None:
    """Set an attribute of this process; see prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
