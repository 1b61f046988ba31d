"""One node of a run on Ray: its launcher is a child process that the driver polls."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mega_rl.checkpoint.folders import CHECKPOINTS, complete
from mega_rl.checkpoint.lock import LOCK_FILE
from mega_rl.disk import lock_file
from mega_rl.environment import python_module
from mega_rl.errors import UserError, name_of_signal
from mega_rl.processes import DEVNULL, PIPE, STDOUT, Child, ChildStartError

TRAIN = python_module("mega_rl.cli", "train")
LOCK_WAIT_S = 300.0  # for ranks of a lost node to end; afterwards the run names the holder of the folder
LINES_KEPT = 20_000  # lines of output that the driver has not read
LINES_PER_CALL = 1_000
DRAIN_S = 5.0  # for the rest of an ended launcher's output
NOT_INHERITED = ("OMP_NUM_THREADS",)  # Ray sets it to the CPUs of the actor; the launcher sets its own


@dataclass(frozen=True)
class NodeOutput:
    """Lines that a node's launcher has written since the last call, and how it ended.

    exit_code: of the launcher, below 0 the signal that killed it; None while it runs. lost: why the node or its actor
    is gone; empty while it is there.
    """

    lines: tuple[str, ...] = ()
    exit_code: int | None = None
    lost: str = ""

    @property
    def gone(self) -> str:
        """Return why the node is lost, or its launcher was killed; empty if neither."""
        if self.lost or self.exit_code is None or self.exit_code >= 0:
            return self.lost
        return f"its launcher was killed by {name_of_signal(-self.exit_code)}"


class NodeLauncher:
    """The launcher of one node. The threads of a Ray actor call its methods."""

    def __init__(self, program: Sequence[str] = TRAIN) -> None:
        """program: gets the arguments of `mega-rl train`."""
        self._program = program
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._dropped = 0
        self._stop = 0  # the last signal that came before the process
        self._child: Child | None = None
        self._exit_code: int | None = None

    def prepare(self, address: str, run_dir: str) -> tuple[int, list[str]]:
        """Return a free TCP port of this node, and a run's complete checkpoints, oldest first.

        A checkpoint is its name and the time of its folder.
        """
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))
            port = int(listener.getsockname()[1])
        return port, [f"{one.name}@{one.stat().st_mtime_ns}" for one in complete(Path(run_dir) / CHECKPOINTS)]

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: str, wait_for_lock_of: str = ""
    ) -> None:
        """Run `mega-rl train` with these arguments in a folder; return at once.

        environment: added to the actor's. wait_for_lock_of: run folder that ranks of a lost node may still write to;
        the launcher starts when they have ended.
        """
        variables = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED} | {**environment}

        # The kernel signals the child when the thread that started it ends, so this thread outlives the child.
        def run() -> None:
            if wait_for_lock_of:
                self._wait_for_lock(Path(wait_for_lock_of) / CHECKPOINTS / LOCK_FILE)
            code = self._run([*self._program, *arguments], variables, folder)
            with self._changed:
                self._exit_code = code
                self._changed.notify_all()

        threading.Thread(target=run, name="launcher of this node", daemon=True).start()

    def signal(self, number: int) -> None:
        """Send a signal to the launcher, SIGKILL also to its ranks; before its start, prevent it."""
        with self._changed:
            child = self._child
            if child is None:
                self._stop = number
            elif child.exit_code is None and number == signal.SIGKILL:
                _kill_tree(child)
            else:
                child.signal(number)

    def poll(self, wait_s: float) -> NodeOutput:
        """Return the launcher's next lines, then its end; empty after `wait_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._exit_code is not None, wait_s)
            lines = [self._lines.popleft() for _ in range(min(LINES_PER_CALL, len(self._lines)))]
            if self._dropped:
                lines.insert(0, f"({self._dropped} lines were written faster than they were read, and are left out)")
                self._dropped = 0
            return NodeOutput(tuple(lines), None if self._lines else self._exit_code)

    def _run(self, command: Sequence[str], environment: Mapping[str, str], folder: str) -> int:
        """Run the launcher to its end and return its exit code."""
        with self._changed:
            if self._stop:
                return 128 + self._stop
            try:
                streams = (DEVNULL, PIPE, STDOUT)
                self._child = child = Child(
                    "the launcher", command, dies_by=signal.SIGTERM, streams=streams, env=environment, cwd=folder
                )
            except ChildStartError as error:
                self._lines.append(
                    f"error: {error} in the run's folder {folder}; start the run in a folder that every node has, "
                    "under the same path"
                )
                return UserError.exit_code
        reader = threading.Thread(target=self._read, args=(child,), name="output of the launcher", daemon=True)
        reader.start()
        code = child.wait()
        reader.join(DRAIN_S)  # a process that the launcher left behind would keep the pipe open
        return code

    def _read(self, child: Child) -> None:
        for line in child.lines():
            with self._changed:
                self._dropped += len(self._lines) == LINES_KEPT
                self._lines.append(line)
                self._changed.notify_all()

    def _wait_for_lock(self, path: Path) -> None:
        """Wait until a checkpoint folder's lock is free, at most LOCK_WAIT_S, or for a signal."""
        deadline = time.monotonic() + LOCK_WAIT_S
        while time.monotonic() < deadline and path.is_file() and not self._stop:
            try:
                os.close(lock_file(path))
            except BlockingIOError:
                time.sleep(0.2)
            except OSError:
                return
            else:
                return


def _kill_tree(launcher: Child) -> None:
    """Kill a launcher and its ranks, each of which leads a process group."""
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
