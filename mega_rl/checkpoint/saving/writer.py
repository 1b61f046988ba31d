"""Background process of a rank that writes its part of saves.

`python -m mega_rl.checkpoint.saving.writer` imports no torch. It maps the rank's staging memory, reads jobs from a
socket, one JSON line each, and answers each with a line. It ends with its parent: the kernel kills it, and the socket
is closed. It ignores signals that are meant for the trainer, so they do not tear a save.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import mega_rl
from mega_rl.checkpoint.saving.job import SaveJob, perform
from mega_rl.disk import SaveError
from mega_rl.environment import python_module
from mega_rl.processes import DEVNULL, Child, ChildDeadlineError, ChildStartError, die_with_parent

COMMAND = python_module("mega_rl.checkpoint.saving.writer")
SEND_TIMEOUT_S = 60.0  # for an idle process to receive a job
END_TIMEOUT_S = 10.0  # for a killed process; a process that waits for a dead disk cannot end
TRAINERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
NICENESS = 10
MESSAGE_BYTES = 4000  # last output of a process that died


class WriterProcess:
    """Handle of the writer process: one job at a time; it dies with its starter's thread."""

    command: ClassVar[Sequence[str]] = COMMAND

    def __init__(self, memory: int) -> None:
        """memory: descriptor of the memory that the pieces of jobs lie in.

        Raises:
            SaveError: the process cannot be started.
        """
        here, there = socket.socketpair()
        self._said = os.memfd_create("checkpoint writer")
        package = str(Path(mega_rl.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        try:
            with there:
                self._child = Child(
                    "the process that writes checkpoints",
                    [*self.command, str(os.getpid()), str(there.fileno()), str(memory)],
                    blocks=TRAINERS_SIGNALS,
                    pass_fds=(there.fileno(), memory),
                    streams=(DEVNULL, DEVNULL, self._said),
                    env=os.environ | {"PYTHONPATH": path},
                    cwd="/",
                )
        except ChildStartError as error:
            here.close()
            os.close(self._said)
            raise SaveError(str(error)) from error
        self._socket = here
        self._received = b""

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._child.exit_code is None

    def start(self, job: SaveJob, *, memory_bytes: int) -> None:
        """Send a job whose pieces lie in the first `memory_bytes` of the staging memory. Raises SaveError."""
        line = json.dumps({"job": job, "memory_bytes": memory_bytes}) + "\n"
        self._socket.settimeout(SEND_TIMEOUT_S)
        try:
            self._socket.sendall(line.encode())
        except OSError as error:
            raise SaveError(f"{self._death() or f'the writer (process {self.pid}) takes no job'}: {error}") from error

    def wait(self, timeout_s: float) -> list[str] | None:
        """Wait for the job; return harmless problems, None if it is not done within the time.

        Raises:
            SaveError: the job failed, or the process died.
        """
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            try:
                part = self._socket.recv(1 << 16)
            except ConnectionError:
                part = b""
            if not part:
                raise SaveError(self._death() or f"the writer (process {self.pid}) has closed its connection")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SaveError(answer["error"])
        notes: list[str] = answer["notes"]
        return notes

    def stop(self) -> None:
        """End the process and its pending job; may be called twice."""
        self._child.end(kill_s=END_TIMEOUT_S)
        if self._said >= 0:
            self._socket.close()
            os.close(self._said)
            self._said = -1

    def _death(self) -> str:
        """Return how the process died, with its last messages; empty if it lives."""
        try:
            self._child.wait(END_TIMEOUT_S / 10)
        except ChildDeadlineError:
            return ""
        said = os.pread(self._said, 1 << 20, 0)[-MESSAGE_BYTES:].decode(errors="replace").strip()
        return f"the writer (process {self.pid}) {self._child.end_in_words()}" + (f", saying: {said}" if said else "")


def main(arguments: Sequence[str]) -> None:
    """Run the jobs of a connection until it ends. arguments: parent's pid, socket, memory descriptor."""
    parent, connection, memory = map(int, arguments)
    for number in TRAINERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TRAINERS_SIGNALS)
    os.nice(NICENESS)
    die_with_parent(parent, signal.SIGKILL)
    channel = socket.socket(fileno=connection)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, lines), daemon=True).start()
    view = memoryview(b"")
    while True:
        request = json.loads(lines.get())
        if len(view) < request["memory_bytes"]:  # the staging memory grows between jobs
            view = memoryview(mmap.mmap(memory, request["memory_bytes"], prot=mmap.PROT_READ))
        answer = _answer(SaveJob.from_json(request["job"]), view)
        channel.sendall(json.dumps(answer).encode() + b"\n")


def _answer(job: SaveJob, view: memoryview) -> dict[str, Any]:
    """Run one job over the staged bytes and return the answer for the trainer."""

    def data(index: int) -> memoryview:
        piece = job.pieces[index]
        return view[piece.at : piece.at + piece.spec.nbytes]

    try:
        return {"notes": perform(job, data, given_up=lambda: False)}
    except SaveError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - any error must reach the trainer
        return {"error": f"the writer (process {os.getpid()}) failed: {type(error).__name__}: {error}"}


def _listen(channel: socket.socket, lines: queue.SimpleQueue[bytes]) -> None:
    """Queue the trainer's messages; end the process with the connection, even during a job."""
    with contextlib.suppress(ConnectionError), channel.makefile("rb") as file:
        for line in file:
            lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
