"""The processes of one server: all that share its process group. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

# These remove what the others leave in /dev/shm (semaphores, tensors) and end by themselves once the others are gone.
_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")


def members(group: int) -> list[psutil.Process]:
    """Living processes of a process group, zombies left out."""
    assert group > 1, f"{group} is no group of ours"
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def kill(group: int, *, spare: int = 0) -> int:
    """SIGKILL to a group's members but `spare` and those that clean up after the others; how many that were."""
    found = [process for process in members(group) if process.pid != spare and not _cleans(process)]
    for process in found:
        _send(process)
    return len(found)


def end(group: int, *, deadline_s: float) -> list[int]:
    """Kill a group and wait until nothing of it is left; the process ids of what is left at the deadline, if any.

    What cleans up has half of that time to end by itself.
    """
    start = time.monotonic()
    while left := members(group):
        passed = time.monotonic() - start
        if passed > deadline_s:
            return [process.pid for process in left]
        if passed > deadline_s / 2:
            for process in left:
                _send(process)
        else:
            kill(group)  # again and again: a process may have been started meanwhile
        time.sleep(0.05)
    return []


def _cleans(process: psutil.Process) -> bool:
    try:
        return any(name in argument for argument in process.cmdline() for name in _CLEANERS)
    except psutil.Error:
        return False


def _send(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()  # looks first whether the id is still this process's
