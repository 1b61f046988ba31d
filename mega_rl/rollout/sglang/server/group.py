"""Processes of one server: their identities, their process group, and its end. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

# These remove files of the others from /dev/shm (semaphores, tensors) and end by themselves once the others are gone.
_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, and not another one that gets its number later."""

    pid: int
    ticks: int  # the kernel's clock ticks from boot to its start

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the identity of a process that runs; None for none, or a zombie."""
        state, own = _state_of(pid)
        return None if state in (b"", b"Z", b"X") else own

    @classmethod
    def of_own(cls, pid: int) -> ProcessIdentity:
        """Return the identity of this process or of a child that was not waited for."""
        return _state_of(pid)[1]

    @property
    def runs(self) -> bool:
        """Return whether it still runs."""
        return self.of(self.pid) == self

    def kill_group(self) -> None:
        """Kill the process group that it leads; do nothing if the id was reused."""
        if self.of(self.pid) in (None, self):
            kill(self.pid)

    def end_group(self, *, deadline_s: float) -> list[int]:
        """End the process group that it leads, see `end`; do nothing if the id was reused."""
        return end(self.pid, deadline_s=deadline_s) if self.of(self.pid) in (None, self) else []


def _state_of(pid: int) -> tuple[bytes, ProcessIdentity]:
    """Return the kernel's letter for a process's state, empty where there is none, and its identity."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return b"", ProcessIdentity(pid, 0)
    state, *fields = stat.rpartition(b")")[2].split()  # a program's name may hold anything
    return state, ProcessIdentity(pid, int(fields[18]))


def members(group: int) -> list[psutil.Process]:
    """Return the living processes of a process group, without zombies."""
    assert group > 1, f"{group} is not the group of a server"
    living = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return living


def kill(group: int, *, spare: int = 0) -> int:
    """Send SIGKILL to a group's members but `spare` and `_CLEANERS`; return the number of signals sent."""
    targets = [process for process in members(group) if process.pid != spare and not _cleans(process)]
    for process in targets:
        _kill_one(process)
    return len(targets)


def end(group: int, *, deadline_s: float) -> list[int]:
    """Kill a group and wait for its end; return the processes left at the deadline.

    `_CLEANERS` have half of that time to end by themselves.
    """
    start = time.monotonic()
    while left := members(group):
        passed = time.monotonic() - start
        if passed > deadline_s:
            return [process.pid for process in left]
        if passed > deadline_s / 2:
            for process in left:
                _kill_one(process)
        else:
            kill(group)  # again and again: a process may have been started meanwhile
        time.sleep(0.05)
    return []


def _cleans(process: psutil.Process) -> bool:
    try:
        return any(name in argument for argument in process.cmdline() for name in _CLEANERS)
    except psutil.Error:
        return False


def _kill_one(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()  # checks first that the id is still this process's
