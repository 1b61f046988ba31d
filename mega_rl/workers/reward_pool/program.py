"""Program of a reward worker: a process that calls the function, and its keeper, which ends all that it has started.

`python -m mega_rl.workers.reward_pool.program` imports no torch. The keeper waits for the worker's end and for that of
its own standard input, which the rank holds open: whichever comes first, it kills the worker and every process that
descends from it, and ends. The worker is killed with the keeper, and the keeper hears of the rank's death twice, by its
input and by a signal. Messages are JSON behind their length (`read_message`), nothing is unpickled.
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
import struct
import sys
import time
from collections.abc import Collection, Mapping
from typing import NoReturn

import psutil

from mega_rl.errors import UserError
from mega_rl.workers.reward_calls import Batch, NoScore, NoScoreError, RewardCall
from mega_rl.workers.reward_pool.called import CalledFunction
from mega_rl.workers.scoring.concurrent import Calls, failed, message_of, outcomes_of_batch
from mega_rl.workers.scoring.sets import FunctionSet, load_call

LENGTH = struct.Struct("<I")  # before each message
OUT_OF_MEMORY = 86  # exit code
SIGNAL_CODES = 128  # plus the signal's number: the keeper's exit code for a worker that died of it
END_S = 5.0  # for all that a worker started to be gone
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(channel: int, running: int) -> NoReturn:
    """Run the keeper, and the worker as its child.

    channel: descriptor of the socket to the rank. running: that of the memory which names the function that is called.
    """
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
        _work(socket.socket(fileno=channel), running)
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
    """Reap ended children; return the worker's exit code if it is among them. Raises ChildProcessError without any."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return None
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else SIGNAL_CODES - code


def _work(channel: socket.socket, running: int) -> None:
    """Load the function and answer the rank's messages until it closes the channel."""
    channel.set_inheritable(False)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected here
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # a crash loses no line
    text = read_message(channel)
    if text is None:
        return
    order = json.loads(text)
    sys.path[:] = order["path"]
    if order["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (order["memory_bytes"],) * 2)
    try:
        call = load_call(order["function"])
    except UserError as error:
        send_message(channel, {"unusable": str(error)})
        return
    send_message(channel, {"ready": True})
    note = CalledFunction(running, order["function"] if isinstance(call, FunctionSet) else ()).set
    os.close(running)
    if isinstance(call, FunctionSet):
        call = dataclasses.replace(call, note=note)
    own, kept, runner = os.getpid(), _children(), asyncio.Runner()
    while (text := read_message(channel)) is not None:
        asked = json.loads(text)
        if call.is_async:
            calls = Calls(call, len(asked), order["batch_size"], order["timeout_s"], _without_score)
            outcomes = runner.run(calls.outcomes_of(asked))
            answer: dict[str, object] = {"answers": [message_of(outcome) for outcome in outcomes]}
        elif call.batched:
            answer = _answers(call, asked)
        else:
            answer = _answer(call, asked)
        note("")
        if os.getpid() != own:  # a fork that the function has made and not ended
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)  # no alarm of one response in the next
        _end_children(kept)
        send_message(channel, answer)


def _answers(call: RewardCall | FunctionSet, batch: Batch) -> dict[str, object]:
    """Return the message for responses that the function takes together; without memory end the process."""
    try:
        return {"answers": [message_of(outcome) for outcome in outcomes_of_batch(call, batch, _without_score)]}
    except NoScoreError as error:
        return {"error": _without_score(error).what}


def _answer(call: RewardCall | FunctionSet, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the message for one response; without memory end the process."""
    try:
        return {"score": call.evaluate(arguments)}
    except NoScoreError as error:
        return {"error": _without_score(error).what}


def _without_score(error: NoScoreError) -> NoScore:
    """Return the outcome of a response whose function failed; without memory end the process."""
    if isinstance(error.__cause__, MemoryError):
        os._exit(OUT_OF_MEMORY)  # what holds the memory may be kept: the next response gets a new process
    return failed(error)


def _children() -> frozenset[int]:
    """Return the ids of this process's children, orphans of its descendants among them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # far cheaper than a list of all processes
    except ChildProcessError:
        return frozenset()
    return frozenset(child.pid for child in psutil.Process().children())


def _end_children(kept: Collection[int]) -> None:
    """Kill the children that one response has left; those that were there before the first stay.

    If they multiply faster than that, end this process: its keeper kills all of them at once.
    """
    end = time.monotonic() + END_S
    while (children := _children() - frozenset(kept)) and time.monotonic() < end:
        for pid in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    if _children() - frozenset(kept):
        os._exit(1)


def send_message(channel: socket.socket, message: Mapping[str, object]) -> None:
    """Send one message."""
    text = json.dumps(message).encode()
    channel.sendall(LENGTH.pack(len(text)) + text)


def read_message(channel: socket.socket) -> bytes | None:
    """Return the text of the next message, None at the end of the connection."""
    head = _read(channel, LENGTH.size)
    return None if head is None else _read(channel, *LENGTH.unpack(head))


def _read(channel: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        part = channel.recv(count - len(received))
        if not part:
            return None
        received += part
    return bytes(received)


def _control(option: int, value: int) -> None:
    """Set an attribute of this process; see prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
