"""Process group of one server: its members and its end. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

# These remove files of the others from /dev/shm (semaphores, tensors) and end by themselves once the others are gone.
_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")


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
