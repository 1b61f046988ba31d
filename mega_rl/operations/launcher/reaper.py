"""Kill the ranks of a killed launcher that do not end by themselves.

    python -m mega_rl.operations.launcher.reaper DESCRIPTOR SECONDS

is a process that outlives the launcher. The kernel sends SIGTERM to the ranks of a killed launcher. A stopped rank, or
one that waits in a collective for a lost peer, does not end. The reaper has a descriptor of each rank's process, so it
never signals another process that got the same number.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from types import FrameType, TracebackType

from mega_rl.environment import python_module
from mega_rl.processes import DEVNULL, Child, ChildDeadlineError

# Slurm sends SIGUSR1 before the time limit; SIGHUP and SIGQUIT end ranks without a checkpoint, as they end any program.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
STOPPED = tuple(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))  # ranks that have saved


class StopSignals:
    """Context manager that collects the signals to this process in their order.

    A signal that the process ignored at its start, as SIGHUP under nohup, stays ignored. Signals blocked before are let
    through.
    """

    def __init__(self, numbers: Sequence[signal.Signals] = SIGNALS) -> None:
        self.first = 0
        self._numbers = numbers
        self._pending: list[int] = []
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        numbers = [number for number in self._numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._remember) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def take(self) -> list[int]:
        """Return the signals that came since the last call."""
        taken, self._pending = self._pending, []
        return taken

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self._pending.append(number)


SAVE_S = 300.0  # to end the step and save; a launcher gives its ranks the same time
CLOSE_S = 10.0
_MAX_BYTES = 32  # length of a message: a process's number


class Reaper:
    """The reaper's process, as its launcher sees it."""

    def __init__(self, *, save_s: float = SAVE_S) -> None:
        """save_s: seconds that ranks have to end after their launcher was killed.

        Raises RunError when the machine allows no further process.
        """
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = python_module("mega_rl.operations.launcher.reaper", str(its.fileno()), str(save_s))
        with its:
            self._child = Child(
                "the reaper", command, blocks=SIGNALS, pass_fds=[its.fileno()], streams=(DEVNULL, DEVNULL, None)
            )

    def watch(self, pid: int) -> None:
        """Have a child, the leader of its process group, killed if it outlives the launcher."""
        descriptor = os.pidfd_open(pid)
        try:
            with contextlib.suppress(OSError):  # the reaper was killed; the kernel still sends SIGTERM
                socket.send_fds(self._socket, [str(pid).encode()], [descriptor])
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """End the reaper's process; the ranks have ended."""
        self._socket.close()
        with contextlib.suppress(ChildDeadlineError):  # the reaper waits for ranks that even SIGKILL does not end
            self._child.wait(CLOSE_S)


def main(arguments: Sequence[str]) -> None:
    """Wait for the end of the launcher, and then of the ranks."""
    descriptor, save_s = arguments
    ranks = _ranks_at_the_end(socket.socket(fileno=int(descriptor)))
    deadline = time.monotonic() + float(save_s)
    for fd in _living(ranks).values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGTERM)
    while _living(ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in _living(ranks):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # the leader lives, so the group has this number
        with contextlib.suppress(OSError):  # the reader of standard error may have ended too
            sys.stderr.write(f"error: process {pid} did not end within {save_s} s after its launcher: killed\n")
            sys.stderr.flush()


def _ranks_at_the_end(launcher: socket.socket) -> dict[int, int]:
    """Wait until the launcher closes its socket; return the ranks' process descriptors by pid."""
    ranks: dict[int, int] = {}
    while True:
        message, descriptors, _, _ = socket.recv_fds(launcher, _MAX_BYTES, 1)
        if not message:
            return ranks
        living = _living(ranks)
        for pid in ranks.keys() - living.keys():
            os.close(ranks[pid])
        ranks = {**living, int(message): descriptors[0]}


def _living(ranks: dict[int, int]) -> dict[int, int]:
    """Return the ranks that have not ended: an ended process's descriptor is readable."""
    ended, _, _ = select.select(list(ranks.values()), [], [], 0.0)
    return {pid: fd for pid, fd in ranks.items() if fd not in ended}


if __name__ == "__main__":
    main(sys.argv[1:])
