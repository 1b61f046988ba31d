"""Program that outlives a killed launcher for as long as its ranks may take to save, and kills those that do not end.

    python -m mega_rl.launcher.warden DESCRIPTOR

The kernel asks the ranks of a killed launcher to end (`leash`). One that is stopped, or waits in a collective for a
peer that is gone, does not; nothing inside of it could end it for certain. The warden has a descriptor of each rank's
process, so it never means another process that has got the same number.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from mega_rl.environment import python_module
from mega_rl.errors import RunError
from mega_rl.launcher.signals import blocked

SAVE_S = 300.0  # to end the step and save: the time that a launcher gives its ranks as well
CLOSE_S = 10.0
_MAX_BYTES = 32  # of a message: a process's number


class Warden:
    """A warden's process, as its launcher sees it."""

    def __init__(self, *, save_s: float = SAVE_S) -> None:
        """save_s: seconds that ranks have to end after their launcher was killed.

        Raises RunError when the machine allows no further process.
        """
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = python_module("mega_rl.launcher.warden", str(its.fileno()), str(save_s))
        try:
            with its, blocked():
                self._process = subprocess.Popen(
                    command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self._socket.close()
            raise RunError(f"{socket.gethostname()}: the warden cannot be started: {error.strerror}") from None

    def watch(self, pid: int) -> None:
        """Have a child of this process, the leader of its process group, killed if it outlives the launcher."""
        descriptor = os.pidfd_open(pid)
        try:
            with contextlib.suppress(OSError):  # a warden that was killed: the kernel's signal is left
                socket.send_fds(self._socket, [str(pid).encode()], [descriptor])
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """End the warden's process; the ranks have ended."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a rank that not even SIGKILL ends is left to the warden
            self._process.wait(CLOSE_S)


def main(arguments: Sequence[str]) -> None:
    """Wait for the launcher's end, and then for that of the ranks."""
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
            os.killpg(pid, signal.SIGKILL)  # the leader lives, so its group is still its own
        with contextlib.suppress(OSError):  # whoever read standard error may be gone as well
            sys.stderr.write(f"error: process {pid} did not end within {save_s} s after its launcher: killed\n")
            sys.stderr.flush()


def _ranks_at_the_end(launcher: socket.socket) -> dict[int, int]:
    """Return the process descriptor of each rank by its number, when the launcher has closed its end of the socket."""
    ranks: dict[int, int] = {}
    while True:
        message, descriptors, _, _ = socket.recv_fds(launcher, _MAX_BYTES, 1)
        if not message:
            return ranks
        ended = {pid: fd for pid, fd in ranks.items() if pid not in _living(ranks)}
        for pid, fd in ended.items():
            os.close(fd)
            del ranks[pid]
        ranks[int(message)] = descriptors[0]


def _living(ranks: dict[int, int]) -> dict[int, int]:
    """Return the ranks that have not ended: a descriptor of a process is readable when it has."""
    ended, _, _ = select.select(list(ranks.values()), [], [], 0.0)
    return {pid: fd for pid, fd in ranks.items() if fd not in ended}


if __name__ == "__main__":
    main(sys.argv[1:])
