"""Main process of a server, as its owner sees it: a child of this process, or adopted from ranks that have ended."""

from __future__ import annotations

import os
import subprocess

from mega_rl.rollout.sglang.server import group
from mega_rl.rollout.sglang.server.kept import ProcessIdentity

UNKNOWN_EXIT = 255  # of an adopted process: the kernel tells an exit code to the parent alone


class ChildProcess:
    """A server's main process that this process has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """process: the leader of a process group of its own."""
        self._process = process
        self.pid = process.pid

    @property
    def exit_code(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs.

        `waitid` does not reap the process: until `close` its id, and so its group's, is not reused.
        """
        try:
            state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # this program ignores SIGCHLD, so the kernel has reaped it
            return self._process.poll()
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def kill(self) -> None:
        """Kill its process group without waiting."""
        group.kill(self.pid)

    def end(self, *, deadline_s: float) -> list[int]:
        """End its process group; returns the processes that are left at the deadline."""
        return group.end(self.pid, deadline_s=deadline_s)

    def close(self) -> int:
        """Return the exit code of the process, which has ended."""
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        return code


class AdoptedProcess:
    """A server's main process that an earlier rank has started. Methods are those of `ChildProcess`."""

    def __init__(self, identity: ProcessIdentity) -> None:
        self._identity = identity
        self.pid = identity.pid

    @property
    def exit_code(self) -> int | None:
        """Return UNKNOWN_EXIT once it has ended; None while it runs."""
        return None if self._identity.runs else UNKNOWN_EXIT

    def kill(self) -> None:
        """Kill its process group without waiting."""
        if not self._identity.is_replaced:
            group.kill(self.pid)

    def end(self, *, deadline_s: float) -> list[int]:
        """End its process group; returns the processes that are left at the deadline."""
        return [] if self._identity.is_replaced else group.end(self.pid, deadline_s=deadline_s)

    def close(self) -> int:
        """Return UNKNOWN_EXIT: the process has ended."""
        return UNKNOWN_EXIT
