"""One node of a run: its launcher as a process of its own, whose output and end are read by calls."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mega_rl.checkpoint.folders import CHECKPOINTS, complete
from mega_rl.checkpoint.lock import LOCK_FILE
from mega_rl.environment import python_module
from mega_rl.errors import UserError
from mega_rl.launcher.leash import leashed
from mega_rl.storage.disk import lock_file

TRAIN = python_module("mega_rl.cli", "train")
LOCK_WAIT_S = 300.0  # in which ranks of a lost node end; after it the run itself says who holds the folder
LINES_KEPT = 20_000  # of output that the driver has not read
LINES_PER_CALL = 1_000
DRAIN_S = 5.0  # in which the pipe of a launcher that has ended is read to its end
# Set by Ray to the CPUs of the actor; the launcher shares the node's cores among its ranks.
NOT_INHERITED = ("OMP_NUM_THREADS",)


@dataclass(frozen=True)
class NodeOutput:
    """Lines that a node's launcher has written since the last call, and how it ended.

    exit_code: of the launcher, below 0 the signal that killed it; None while it runs. lost: why the node or its actor
    is gone, empty while it is there.
    """

    lines: tuple[str, ...] = ()
    exit_code: int | None = None
    lost: str = ""


class NodeLauncher:
    """The launcher of one node. Its methods are called from several threads, those of a Ray actor."""

    def __init__(self, program: Sequence[str] = TRAIN) -> None:
        """program: gets the arguments of `mega-rl train`."""
        self._program = program
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._dropped = 0
        self._stop = 0  # the last signal that came before the process
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_code: int | None = None

    def free_port(self, address: str) -> int:
        """Return a TCP port of this node at which no program listens."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))
            return int(listener.getsockname()[1])

    def checkpoints(self, run_dir: str) -> list[str]:
        """Return the complete checkpoints of a run folder, oldest first, each with the time of its folder."""
        return [f"{folder.name}@{folder.stat().st_mtime_ns}" for folder in complete(Path(run_dir) / CHECKPOINTS)]

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: str, wait_for_lock_of: str = ""
    ) -> None:
        """Run `mega-rl train` with these arguments in a folder; returns at once.

        environment: added to the actor's. wait_for_lock_of: run folder whose checkpoints the ranks of a lost node may
        still be writing; the launcher starts when they have ended.
        """
        command = leashed([*self._program, *arguments])
        variables = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED} | {**environment}

        # The kernel's signal at the parent's end comes from the thread that started the process: one that outlives it.
        def run() -> None:
            if wait_for_lock_of:
                _wait_for_lock(Path(wait_for_lock_of) / CHECKPOINTS / LOCK_FILE, lambda: self._stop != 0)
            self._run(command, variables, folder)

        threading.Thread(target=run, name="launcher of this node", daemon=True).start()

    def signal(self, number: int) -> None:
        """Send a signal to the launcher, SIGKILL to its ranks as well; one that is about to start does not start."""
        with self._changed:
            process = self._process
            if process is None:
                self._stop = number
            elif process.poll() is None and number == signal.SIGKILL:
                _kill_tree(process.pid)
            elif process.poll() is None:
                process.send_signal(number)

    def poll(self, wait_s: float) -> NodeOutput:
        """Return the launcher's next lines, or its end once there are none left; empty after `wait_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._exit_code is not None, wait_s)
            lines = [self._lines.popleft() for _ in range(min(LINES_PER_CALL, len(self._lines)))]
            if self._dropped:
                lines.insert(0, f"({self._dropped} lines were written faster than they were read, and are left out)")
                self._dropped = 0
            return NodeOutput(tuple(lines), None if self._lines else self._exit_code)

    def _run(self, command: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        with self._changed:
            if self._stop:
                self._end(128 + self._stop)
                return
            try:
                self._process = process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self._lines.append(
                    f"error: {socket.gethostname()}: the run's folder {folder} cannot be used here "
                    f"({error.strerror}); start the run in a folder that every node has, under the same path"
                )
                self._end(UserError.exit_code)
                return
        reader = threading.Thread(target=self._read, args=(process,), name="output of the launcher", daemon=True)
        reader.start()
        exit_code = process.wait()
        reader.join(DRAIN_S)  # a process that the launcher has left behind would keep the pipe open
        with self._changed:
            self._end(exit_code)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            with self._changed:
                self._dropped += len(self._lines) == LINES_KEPT
                self._lines.append(raw.decode(errors="replace").rstrip("\r\n"))
                self._changed.notify_all()

    def _end(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._changed.notify_all()


def _kill_tree(pid: int) -> None:
    """Kill a launcher, which leads its process group, and its ranks, each of which leads one of its own."""
    descendants = psutil.Process(pid).children(recursive=True)
    os.killpg(pid, signal.SIGKILL)
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _wait_for_lock(path: Path, stopped: Callable[[], bool]) -> None:
    """Wait until no process holds the lock of a checkpoint folder, LOCK_WAIT_S at most, or until `stopped`."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while time.monotonic() < deadline and path.is_file() and not stopped():
        try:
            os.close(lock_file(path))
        except BlockingIOError:
            time.sleep(0.2)
        except OSError:
            return
        else:
            return
